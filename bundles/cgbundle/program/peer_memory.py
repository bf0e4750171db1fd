"""Memory `peer`: one range of addresses in which every rank's part lies on its own device, and all ranks may write to all parts.

A part is memory of `cuMemCreate`, mapped into the range of every process.  In one process the range serves all devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ..cuda.driver import Context, check, cu, free_bytes
from ..cuda.libcuda import MEM_ACCESS_READ_WRITE, MEM_DEVICE, MEM_FILE_DESCRIPTOR, MEM_PINNED, AccessDesc, AllocationProp
from ..cuda.memory import copy, fill
from ..errors import MachineError, OutOfMemory
from ..format.schema import World
from ..validate.memories import GRANULARITY


def create_part(world: World, context: Context, cleanup: ExitStack, *, shared: bool = False) -> Any:
    """The handle of a rank's part, on the context's device.  `shared`: other processes get it, too.  Raises OutOfMemory."""
    prop = AllocationProp()
    prop.type, prop.location.type, prop.location.id = MEM_PINNED, MEM_DEVICE, context.device
    prop.requestedHandleTypes = MEM_FILE_DESCRIPTOR if shared else 0
    try:
        handle = check("cuMemCreate", cu.cuMemCreate(world.stride, prop, 0), "memory peer")
    except OutOfMemory:
        text = f"memory peer: needs {world.stride:,} bytes, the GPU has {free_bytes():,} free"
        raise OutOfMemory("out-of-memory", text) from None
    cleanup.callback(within, context, "cuMemRelease", handle)
    return handle


def map_parts(world: World, handles: Sequence[Any], contexts: Sequence[Context], cleanup: ExitStack) -> int:
    """The address of memory peer, of the parts `handles`, which the devices of `contexts` may write to.  The context of one of them
    is current.  Raises wrong-machine for devices that cannot reach each other's memory."""
    size = world.stride * world.size
    base = int(check("cuMemAddressReserve", cu.cuMemAddressReserve(size, GRANULARITY, 0, 0)))
    cleanup.callback(within, contexts[0], "cuMemAddressFree", base, size)
    for rank, handle in enumerate(handles):
        at = base + rank * world.stride
        check("cuMemMap", cu.cuMemMap(at, world.stride, 0, handle, 0))
        cleanup.callback(within, contexts[0], "cuMemUnmap", at, world.stride)
    for device in {context.device: context for context in contexts}:
        access = AccessDesc()
        access.location.type, access.location.id, access.flags = MEM_DEVICE, device, MEM_ACCESS_READ_WRITE
        errors = [cu.cuMemSetAccess(base + rank * world.stride, world.stride, access, 1) for rank in range(world.size)]
        if any(errors):
            raise MachineError(
                "wrong-machine",
                f"device {device} cannot write to the memory of the other ranks' devices",
                "the GPUs of a model have to reach each other, by NVLink or PCIe: `nvidia-smi topo -p2p w` shows which do",
            )
    return base


def begin_part(world: World, base: int, rank: int, limit: int, stream: Any) -> None:
    """Fills a rank's part with zeros, but for the nanoseconds that its kernels wait; done when this returns.  The context of its
    device is current."""
    at = base + rank * world.stride
    fill(at, world.stride, 0, stream)
    number = limit.to_bytes(8, "little")
    copy(at + world.limit, _address(number), len(number), stream, source_on_device=False)
    check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))


def within(context: Context, name: str, *arguments: Any) -> None:
    """A function of the driver that gives something back, where the context is current."""
    with context:
        check(name, getattr(cu, name)(*arguments))


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
