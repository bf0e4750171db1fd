"""Cubins are read with every bound checked, and other data gives a named error. This cubin is made by hand."""

from __future__ import annotations

import contextlib
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.errors import BuildError
from cgcompile.targets.cuda.elf import EM_CUDA, read_cubin
from tests.helpers.raising import raises

INITIAL = b"\x01\x02\x03\x04\x05\x06\x07\x08"


def cubin() -> bytes:
    """Returns an image: null, .shstrtab, .strtab, .nv.global.init (8 bytes), .nv.global (16 bytes, not in the file), .symtab."""
    names = ["", ".shstrtab", ".strtab", ".nv.global.init", ".nv.global", ".text.kernel", ".symtab"]
    shstrtab = b"\0".join(n.encode() for n in names) + b"\0"
    strtab = b"\0table\0counter\0kernel\0"
    symbols = [(0, 0, 0, 0, 0), (1, 0x11, 3, 4, 4), (7, 0x01, 4, 8, 8), (15, 0x12, 5, 0, 4), (1, 0x13, 3, 0, 0)]
    symtab = b"".join(pack("<IBBHQQ", name, info, 0, section, value, size) for name, info, section, value, size in symbols)
    bodies = [b"", shstrtab, strtab, INITIAL, b"", b"\0" * 4, symtab]
    kinds = [0, 3, 3, 1, 8, 1, 2]
    sizes = [0, len(shstrtab), len(strtab), 8, 16, 4, len(symtab)]
    data, offsets = bytearray(64), []
    for body in bodies:
        offsets.append(len(data))
        data += body
    table = len(data)
    for i, name in enumerate(names):
        at = shstrtab.index(name.encode() + b"\0") if name else 0
        data += pack("<IIQQQQIIQQ", at, kinds[i], 0, 0, offsets[i], sizes[i], 2 if kinds[i] == 2 else 0, 0, 1, 0)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    data[:64] = pack("<16sHHIQQQIHHHHHH", ident, 2, EM_CUDA, 1, 0, 0, table, 0, 64, 56, 0, 64, len(names), 1)
    return bytes(data)


def test_variables_and_kernels_are_read() -> None:
    image = read_cubin(cubin())
    assert image.functions == {"kernel"}
    assert [(s.name, s.section, s.value, s.local, s.initial) for s in image.data] == [
        ("table", ".nv.global.init", 4, False, INITIAL[4:]),
        ("counter", ".nv.global", 8, True, bytes(8)),
    ]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"\x50\xed\x55\xba" + bytes(60), "fatbin"),
        (b"//\n.version 8.0\n.target sm_90\n", "PTX text"),
        (b"", "starts with nothing"),
        (b"MZ\x90\0", "starts with 4d5a9000"),
        (b"\x7fELF", "too few for an ELF header"),
        (cubin()[:18] + pack("<H", 62) + cubin()[20:], "machine 62"),
    ],
)
def test_what_is_no_cubin_is_refused_by_name(image: bytes, message: str) -> None:
    with raises("image-format", match=message):
        read_cubin(image, "image 12ab")


@given(st.integers(0, len(cubin()) - 1))
def test_a_cut_cubin_is_refused(length: int) -> None:
    with raises("image-format"):
        read_cubin(cubin()[:length])


@given(st.integers(0, len(cubin()) - 1), st.integers(0, 255))
def test_a_damaged_cubin_is_read_or_refused(at: int, value: int) -> None:
    data = bytearray(cubin())
    data[at] = value
    with contextlib.suppress(BuildError):
        read_cubin(bytes(data))
