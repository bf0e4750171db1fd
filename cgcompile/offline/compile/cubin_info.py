"""Reads from a cubin how a kernel is launched: block and cluster size, and parameters as the driver reports them
(cuFuncGetParamInfo).  Pure.

NVIDIA does not document the section `.nv.info.<kernel>`.  The format was observed in cubins of ptxas 12.8 and 13.1 for sm_80 to
sm_120 and agrees with `cuobjdump -elf`.  A record has a format (1 byte), an attribute (1 byte) and 2 more bytes.  These 2 bytes are
a value or, in format 4, the length of the payload that follows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import BuildError
from ...targets.cuda.elf import read_sections

EIATTR_REQNTID, EIATTR_CTA_PER_CLUSTER = 0x10, 0x3D
"""Attributes: the required threads of a block and blocks of a cluster, per axis."""

EIATTR_KPARAM_INFO, EIATTR_CBANK_PARAM_SIZE, EIATTR_KPARAM_INFO_V2 = 0x17, 0x19, 0x45
"""Attributes: a parameter, the size of all parameters in bytes, and a parameter of a kernel with more than 4 KiB of parameters."""

EIFMT_SVAL = 4
"""The format with a payload; formats 1 to 3 have none."""

_RECORD = struct.Struct("<BBH")
_PARAM = struct.Struct("<IHHI")  # index, ordinal, offset; alignment (8 bits), space (4), bank (5), 1 unknown bit, size (14)
_PARAM_V2 = struct.Struct("<IHHHH")  # index, ordinal, offset, size; alignment and space
_AXES = struct.Struct("<III")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelInfo:
    """`params`: (offset, size) of each parameter in order.  `threads`, `cluster`: the required sizes of blocks and clusters, or
    None."""

    params: tuple[tuple[int, int], ...]
    threads: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None


def read_kernel_info(image: bytes, symbol: str, what: str = "image") -> KernelInfo:
    """Reads the launch data of kernel `symbol` from a cubin; `what` names the image in messages.  Raises image-format if the image
    is no cubin, has no such kernel, is damaged, or has another format."""
    name = f".nv.info.{symbol}"
    sections = [section for section in read_sections(image, what) if section.name == name]
    if len(sections) != 1:
        raise BuildError("image-format", f"{what}: {len(sections)} sections {name}, expected one")
    info = image[sections[0].offset : sections[0].offset + sections[0].size]
    where = f"{what}: {name}"
    places: dict[int, tuple[int, int]] = {}
    axes: dict[int, tuple[int, int, int]] = {}
    total = 0
    for attribute, value, payload in _records(info, where):
        if attribute in (EIATTR_KPARAM_INFO, EIATTR_KPARAM_INFO_V2):
            ordinal, place = _param(attribute, payload, where)
            if ordinal in places:
                raise BuildError("image-format", f"{where}: parameter {ordinal} is listed twice")
            places[ordinal] = place
        elif attribute == EIATTR_CBANK_PARAM_SIZE:
            total = value
        elif attribute in (EIATTR_REQNTID, EIATTR_CTA_PER_CLUSTER):
            x, y, z = _unpack(_AXES, payload, where)
            axes[attribute] = (x, y, z)
    if sorted(places) != list(range(len(places))):
        raise BuildError("image-format", f"{where}: the parameters {sorted(places)} are not numbered from 0")
    params = tuple(places[i] for i in range(len(places)))
    end = 0
    for i, (offset, size) in enumerate(params):
        if offset < end or not size:
            text = f"parameter {i} has {size} bytes at {offset}, expected some from byte {end} on"
            raise BuildError("image-format", f"{where}: {text}")
        end = offset + size
    if end != total:
        raise BuildError("image-format", f"{where}: the parameters end at byte {end}, the kernel says {total}")
    return KernelInfo(params=params, threads=axes.get(EIATTR_REQNTID), cluster=axes.get(EIATTR_CTA_PER_CLUSTER))


def _records(info: bytes, where: str) -> Iterator[tuple[int, int, bytes]]:
    """Yields (attribute, value, payload) of every record; the payload is b"" for formats without one."""
    offset = 0
    while offset < len(info):
        if offset + _RECORD.size > len(info):
            raise BuildError("image-format", f"{where}: a record at byte {offset} is cut off")
        form, attribute, value = _RECORD.unpack_from(info, offset)
        offset += _RECORD.size
        if not 1 <= form <= EIFMT_SVAL:
            raise BuildError("image-format", f"{where}: a record of format {form}, which is not known")
        size = value if form == EIFMT_SVAL else 0
        if offset + size > len(info):
            raise BuildError("image-format", f"{where}: a record's {size} bytes at {offset} do not fit the section's {len(info)}")
        yield attribute, value, info[offset : offset + size]
        offset += size


def _param(attribute: int, payload: bytes, where: str) -> tuple[int, tuple[int, int]]:
    """A parameter's number and its (offset, size)."""
    if attribute == EIATTR_KPARAM_INFO:
        _index, ordinal, offset, packed = _unpack(_PARAM, payload, where)
        return ordinal, (offset, packed >> 18)
    _index, ordinal, offset, size, _rest = _unpack(_PARAM_V2, payload, where)
    return ordinal, (offset, size)


def _unpack(layout: struct.Struct, payload: bytes, where: str) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise BuildError("image-format", f"{where}: a record of {len(payload)} bytes, expected {layout.size}")
    return layout.unpack(payload)
