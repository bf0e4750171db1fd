"""Reads the needed parts of a cubin, a little-endian ELF-64 file: sections, and symbols of type OBJECT (module variables, with
their initial bytes) and FUNC (kernels).  Layouts are those of the ELF-64 specification.  All reads are bounds-checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...errors import BuildError

MAGIC = b"\x7fELF"
FATBIN_MAGIC = (b"\x50\xed\x55\xba", b"\x51\x46\x62\x46", b"\xb1\x43\x62\x46")
"""First bytes of a fatbin (0xBA55ED50) and of its wrapper (0x466243b1, 0x46624651), in memory order."""

EM_CUDA = 190
"""e_machine of every cubin."""

WRITABLE = ".nv.global"
"""The section of variables that kernels can write and that start as zeros.  `.nv.global.init` has the other variables: strings and
tables in every image seen so far."""

SHT_SYMTAB, SHT_NOBITS = 2, 8
STT_OBJECT, STT_FUNC = 1, 2
STB_LOCAL = 0

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section.  `offset` and `size`: its bytes in the file.  A section of type SHT_NOBITS has no bytes there."""

    name: str
    type: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbol:
    """A data symbol: `value` is its offset in section `section`, `initial` its bytes before anything ran."""

    name: str
    section: str
    value: int
    local: bool
    initial: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubin:
    """The needed parts of a cubin: its variables and the names of its kernels."""

    data: tuple[Symbol, ...]
    functions: frozenset[str]


def read_cubin(image: bytes, what: str = "image") -> Cubin:
    """Reads a cubin.  `what` names the image in messages.  Raises image-format if the bytes are truncated or not a cubin ELF file.
    The message tells if they are a fatbin or PTX text."""
    sections = read_sections(image, what)
    data: list[Symbol] = []
    functions: set[str] = set()
    for table in sections:
        if table.type != SHT_SYMTAB:
            continue
        if table.link >= len(sections):
            raise BuildError(
                "image-format", f"{what}: symbol table {table.name} names string table {table.link} of {len(sections)} sections"
            )
        names = sections[table.link]
        for at in range(table.offset, table.offset + table.size - _SYMBOL.size + 1, _SYMBOL.size):
            name_at, info, _other, index, value, size = _SYMBOL.unpack_from(image, at)
            kind = info & 15
            if kind not in (STT_OBJECT, STT_FUNC) or not 0 < index < len(sections):
                continue
            name = _string(image, names, name_at, what)
            if kind == STT_FUNC:
                functions.add(name)
            elif size:
                home = sections[index]
                initial = _initial(image, home, name, value, size, what)
                data.append(Symbol(name=name, section=home.name, value=value, local=info >> 4 == STB_LOCAL, initial=initial))
    return Cubin(data=tuple(data), functions=frozenset(functions))


def read_sections(image: bytes, what: str = "image") -> tuple[Section, ...]:
    """Returns the section table.  Raises image-format."""
    if image[:4] in FATBIN_MAGIC:
        raise BuildError("image-format", f"{what} is a fatbin, not a cubin ELF file")
    if image[:4] != MAGIC:
        kind = "PTX text" if b".version" in image[:4096] else f"no ELF file (it starts with {image[:4].hex() or 'nothing'})"
        raise BuildError("image-format", f"{what} is {kind}, not a cubin ELF file")
    if len(image) < _HEADER.size:
        raise BuildError("image-format", f"{what}: {len(image)} bytes are too few for an ELF header")
    head = _HEADER.unpack_from(image)
    ident, machine, shoff, (shentsize, shnum, shstrndx) = head[0], head[2], head[6], head[11:14]
    if ident[4] != 2 or ident[5] != 1 or machine != EM_CUDA:
        raise BuildError(
            "image-format", f"{what}: ELF class {ident[4]}, encoding {ident[5]}, machine {machine}; a cubin has 2, 1, {EM_CUDA}"
        )
    if shentsize != _SECTION.size or shoff + shnum * shentsize > len(image) or shstrndx >= shnum:
        raise BuildError("image-format", f"{what}: the section table ({shnum} entries at {shoff}) does not fit {len(image)} bytes")
    rows = [_SECTION.unpack_from(image, shoff + i * shentsize) for i in range(shnum)]
    for row in rows:
        if row[1] not in (0, SHT_NOBITS) and row[4] + row[5] > len(image):
            raise BuildError("image-format", f"{what}: a section of {row[5]} bytes at {row[4]} does not fit {len(image)} bytes")
    raw = [Section(name="", type=r[1], offset=r[4], size=r[5], link=r[6]) for r in rows]
    names = raw[shstrndx]
    return tuple(
        Section(name=_string(image, names, row[0], what), type=s.type, offset=s.offset, size=s.size, link=s.link)
        for row, s in zip(rows, raw, strict=True)
    )


def _initial(image: bytes, home: Section, name: str, value: int, size: int, what: str) -> bytes:
    if value + size > home.size:
        raise BuildError(
            "image-format",
            f"{what}: variable {name} ({size} bytes at {value}) lies outside section {home.name} ({home.size} bytes)",
        )
    if home.type == SHT_NOBITS:
        return bytes(size)
    return image[home.offset + value : home.offset + value + size]


def _string(image: bytes, table: Section, at: int, what: str) -> str:
    start, end = table.offset + at, table.offset + table.size
    stop = image.find(b"\0", start, end)
    if at >= table.size or stop < 0:
        raise BuildError("image-format", f"{what}: a name at {at} lies outside its string table of {table.size} bytes")
    return image[start:stop].decode("utf-8", "backslashreplace")
