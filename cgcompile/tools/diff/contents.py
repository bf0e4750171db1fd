"""Compares files other than recordings: tensors by element, and other files by hash."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

from cgbundle.format import file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.schema import DTYPES

from .bundle_files import BundleFiles, tensors
from .differences import Difference, value_text

BLOCK = 1 << 16
"""Bytes compared at a time: both blocks fit into the processor's cache.  Equal blocks are compared at 5 GB/s; differing elements
are counted at 0.25 GB/s."""


def weights(a: BundleFiles, b: BundleFiles) -> Iterator[Difference]:
    """Counts the elements whose bits differ, in weights that both bundles have with equal dtype and layout."""
    for name in (file_names.WEIGHTS, file_names.TABLES):
        if _differs_in_both(a, b, name):
            yield from _tensors(a, b, name)


def _tensors(a: BundleFiles, b: BundleFiles, file: str) -> Iterator[Difference]:
    layouts = [
        {weight.tensor: (weight.dtype, weight.shape, weight.strides) for weight in file_names.weight_files(side.manifest)[file]}
        for side in (a, b)
    ]
    with tensors(a, file) as mine, tensors(b, file) as theirs:
        for name, layout in layouts[0].items():
            if layouts[1].get(name) == layout:
                yield from _elements("weights", name, mine, theirs)


def self_test(a: BundleFiles, b: BundleFiles) -> Iterator[Difference]:
    """Compares the tensors of exam.safetensors for the int_keys that both bundles have."""
    if not _differs_in_both(a, b, file_names.SELF_TEST):
        return
    keys = [set(_key_prefixes(side)) for side in (a, b)]
    with tensors(a, file_names.SELF_TEST) as mine, tensors(b, file_names.SELF_TEST) as theirs:
        for name in sorted({*mine.entries, *theirs.entries}):
            if name.rpartition("/")[0].rpartition("/")[0] not in keys[0] & keys[1]:
                continue
            shapes = [
                f"{entry.dtype} {value_text(entry.shape)}" if (entry := side.entries.get(name)) else None for side in (mine, theirs)
            ]
            if shapes[0] == shapes[1]:
                yield from _elements("self-test", name, mine, theirs)
            else:
                yield Difference(part="self-test", name=name, a=shapes[0], b=shapes[1])


def _key_prefixes(bundle: BundleFiles) -> Iterator[str]:
    """Yields the prefix of the tensors' names for every int_key of every entry."""
    for entry in bundle.manifest.entries:
        for program in entry.programs:
            yield file_names.self_test_entry(program.key, "input", 0, entry.name).removesuffix("/input/0")


def files(a: BundleFiles, b: BundleFiles, known: Collection[str]) -> Iterator[Difference]:
    """Yields files that only one bundle has or that differ.  Skips the files in `known`, which other parts report."""
    for name in sorted({*a.files, *b.files} - {*known}):
        mine, theirs = a.files.get(name), b.files.get(name)
        if mine is None or theirs is None or mine.sha256 != theirs.sha256:
            sizes = [f"{file.bytes} bytes" if file else None for file in (mine, theirs)]
            note = f"other contents, {sizes[0]}" if sizes[0] == sizes[1] else ""
            yield Difference(part="files", name=name, a=sizes[0], b=sizes[1], note=note)


def _differs_in_both(a: BundleFiles, b: BundleFiles, name: str) -> bool:
    """Returns whether both bundles have the file, with different contents."""
    return name in a.files and name in b.files and a.files[name].sha256 != b.files[name].sha256


def _elements(part: str, name: str, mine: Mapped, theirs: Mapped) -> Iterator[Difference]:
    dtype = mine.entries[name].dtype
    differ = differing(mine.data(name), theirs.data(name), DTYPES[dtype])
    if differ:
        total = len(mine.data(name)) // DTYPES[dtype]
        note = f"{differ} of {total} elements differ ({dtype})"
        yield Difference(part=part, name=name, note=note, facts={"elements": total, "differ": differ})


def differing(a: memoryview, b: memoryview, width: int) -> int:
    """Counts the elements of `width` bytes (a power of 2) that differ between two buffers of equal length.

    Unequal blocks are converted to large integers and combined with exclusive or.  The bits of every element are merged into its
    lowest bit, and these bits are counted.
    """
    count = 0
    for begin in range(0, len(a), BLOCK):
        block, other_block = bytes(a[begin : begin + BLOCK]), bytes(b[begin : begin + BLOCK])
        if block != other_block:
            bits = int.from_bytes(block, "little") ^ int.from_bytes(other_block, "little")
            shift = 4 * width
            while shift:
                bits |= bits >> shift
                shift //= 2
            count += (bits & _lowest(width)).bit_count()
    return count


@cache
def _lowest(width: int) -> int:
    """Returns an integer with the lowest bit of every element of a block set."""
    return int.from_bytes((b"\1" + bytes(width - 1)) * (BLOCK // width), "little")
