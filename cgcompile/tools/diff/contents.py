"""What the files hold that are not recordings: tensors element by element, and whether any other file has other contents."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

from cgbundle.format import file_names
from cgbundle.format.safetensors import Mapped
from cgbundle.format.schema import DTYPES

from .bundle_files import BundleFiles, tensors
from .differences import Difference, value_text

BLOCK = 1 << 16
"""Bytes compared at a time: both blocks stay in the processor's cache.  Equal ones pass at 5 GB/s, others are counted at 0.25."""


def weights(a: BundleFiles, b: BundleFiles) -> Iterator[Difference]:
    """The tensors of weights and tables that both have in one dtype and layout: how many elements differ, as bits."""
    for name in (file_names.WEIGHTS, file_names.TABLES):
        if _both_other(a, b, name):
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
    """The tensors of exam.safetensors for the int_keys that both have."""
    if not _both_other(a, b, file_names.SELF_TEST):
        return
    keys = [set(_calls(side)) for side in (a, b)]
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


def _calls(bundle: BundleFiles) -> Iterator[str]:
    """What the names of an int_key's tensors begin with, of all entries."""
    for entry in bundle.manifest.entries:
        for program in entry.programs:
            yield file_names.self_test_entry(program.key, "input", 0, entry.name).removesuffix("/input/0")


def files(a: BundleFiles, b: BundleFiles, known: Collection[str]) -> Iterator[Difference]:
    """Files that only one has, or that have other contents, but for those of which another part has `known`."""
    for name in sorted({*a.files, *b.files} - {*known}):
        mine, theirs = a.files.get(name), b.files.get(name)
        if mine is None or theirs is None or mine.sha256 != theirs.sha256:
            sizes = [f"{file.bytes} bytes" if file else None for file in (mine, theirs)]
            note = f"other contents, {sizes[0]}" if sizes[0] == sizes[1] else ""
            yield Difference(part="files", name=name, a=sizes[0], b=sizes[1], note=note)


def _both_other(a: BundleFiles, b: BundleFiles, name: str) -> bool:
    """Whether both have the file, with other contents."""
    return name in a.files and name in b.files and a.files[name].sha256 != b.files[name].sha256


def _elements(part: str, name: str, mine: Mapped, theirs: Mapped) -> Iterator[Difference]:
    dtype = mine.entries[name].dtype
    differ = differing(mine.data(name), theirs.data(name), DTYPES[dtype])
    if differ:
        total = len(mine.data(name)) // DTYPES[dtype]
        note = f"{differ} of {total} elements differ ({dtype})"
        yield Difference(part=part, name=name, note=note, facts={"elements": total, "differ": differ})


def differing(a: memoryview, b: memoryview, width: int) -> int:
    """How many elements of `width` bytes (a power of 2) differ between two pieces of memory of one length.

    Two unequal blocks are taken as one large number each: in their exclusive or, every element's bits are gathered in its lowest
    bit, and these are counted.
    """
    count = 0
    for at in range(0, len(a), BLOCK):
        one, other = bytes(a[at : at + BLOCK]), bytes(b[at : at + BLOCK])
        if one != other:
            bits = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
            shift = 4 * width
            while shift:
                bits |= bits >> shift
                shift //= 2
            count += (bits & _lowest(width)).bit_count()
    return count


@cache
def _lowest(width: int) -> int:
    """The lowest bit of every element of a block."""
    return int.from_bytes((b"\1" + bytes(width - 1)) * (BLOCK // width), "little")
