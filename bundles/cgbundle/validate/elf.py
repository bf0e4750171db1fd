"""Whether a kernel image or a shared object is a whole ELF file: the driver and the dynamic loader take the headers' word for it.

The CUDA driver gets an image without its length, and the dynamic loader maps what the headers say: where a file is cut, both read
past its end.  (System V ABI, chapter 4: object files; 64-bit, little-endian.)
"""

from __future__ import annotations

from struct import Struct, error

from ..errors import BundleError

MAGIC = b"\x7fELF\2\1"
"""An ELF file of 64 bits, little-endian."""

HEADER = Struct("<16x2H4x3Q4x6H")
"""Type, machine; entry, program headers, section headers; sizes and numbers of header, program and section headers."""

SEGMENT = Struct("<I4xQ16xQ16x")
"""Type, offset, bytes in the file."""

SECTION = Struct("<4xI16xQQ24x")
"""Type, offset, bytes."""

NO_BITS = 8
"""A section that takes no room in the file."""

SHARED_OBJECT = 3
"""The type of an ELF file that the dynamic loader loads."""


def check_elf(data: bytes, where: str, kind: int | None = None) -> None:
    """Raises image-invalid, its message starting with `where`, unless all that the headers of an ELF file name lies inside it, and
    it is of type `kind`."""
    try:
        e_type, _, _, segments, sections, _, segment_size, segment_count, section_size, section_count, _ = HEADER.unpack_from(data)
        if not data.startswith(MAGIC) or kind not in (None, e_type):
            raise _invalid(where, "not a shared object" if kind == SHARED_OBJECT else "not an ELF file of 64 bits")
        for index in range(segment_count):
            _, offset, size = SEGMENT.unpack_from(data, segments + index * segment_size)
            _check_inside(data, offset, size, where)
        for index in range(section_count):
            what, offset, size = SECTION.unpack_from(data, sections + index * section_size)
            _check_inside(data, offset, 0 if what == NO_BITS else size, where)
    except (error, OverflowError):
        raise _invalid(where, f"cut off: its headers do not fit into its {len(data)} bytes") from None


def _check_inside(data: bytes, offset: int, size: int, where: str) -> None:
    if offset + size > len(data):
        raise _invalid(where, f"cut off: its headers name byte {offset + size}, it has {len(data)}")


def _invalid(where: str, message: str) -> BundleError:
    return BundleError("image-invalid", f"{where}: {message}")
