"""Memory `peer`: one range of addresses in which every rank's part lies on its own device, and all ranks may write to all parts.

A part is memory of `cuMemCreate`, mapped into the range of every process.  In one process the range serves all devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from ..cuda.driver import Context, check, cu, free_bytes
from ..cuda.libcuda import MEM_ACCESS_READ_WRITE, MEM_DEVICE, MEM_FILE_DESCRIPTOR, MEM_PINNED, AccessDesc, AllocationProp
from ..cuda.memory import copy, fill
from ..errors import MachineError, OutOfMemory
from ..format.schema import World
from ..validate.memories import GRANULARITY


def create_part(world: World, context: Context, cleanup: ExitStack, *, shared: bool = False) -> int:
    """The handle of a rank's part, on the context's device.  `shared`: other processes get it, too.  Raises OutOfMemory."""
    prop = AllocationProp()
    prop.type, prop.location.type, prop.location.id = MEM_PINNED, MEM_DEVICE, context.device
    prop.requestedHandleTypes = MEM_FILE_DESCRIPTOR if shared else 0
    try:
        handle = int(check("cuMemCreate", cu.cuMemCreate(world.stride, prop, 0), "memory peer"))
    except OutOfMemory:
        text = f"memory peer: needs {world.stride:,} bytes, the GPU has {free_bytes():,} free"
        raise OutOfMemory("out-of-memory", text) from None
    cleanup.callback(within, context, "cuMemRelease", handle)
    return handle


def export_part(handle: int) -> int:
    """A file descriptor for a shared part, the caller's to close."""
    return int(check("cuMemExportToShareableHandle", cu.cuMemExportToShareableHandle(handle, MEM_FILE_DESCRIPTOR, 0)))


def import_part(descriptor: int, context: Context, cleanup: ExitStack) -> int:
    """The handle of another process's part."""
    answer = cu.cuMemImportFromShareableHandle(descriptor, MEM_FILE_DESCRIPTOR)
    handle = int(check("cuMemImportFromShareableHandle", answer, "memory peer"))
    cleanup.callback(within, context, "cuMemRelease", handle)
    return handle


def reserve(world: World, context: Context, cleanup: ExitStack) -> int:
    """Addresses for memory peer, nothing behind them yet."""
    size = world.stride * world.size
    base = int(check("cuMemAddressReserve", cu.cuMemAddressReserve(size, GRANULARITY, 0, 0)))
    cleanup.callback(within, context, "cuMemAddressFree", base, size)
    return base


def map_part(world: World, at: int, handle: int, contexts: Iterable[Context], cleanup: ExitStack) -> None:
    """Puts a part at an address, and lets the devices of `contexts` write to it.  The context of one of them is current.  Raises
    wrong-machine for one that cannot."""
    size, users = world.stride, {context.device: context for context in contexts}
    check("cuMemMap", cu.cuMemMap(at, size, 0, handle, 0))
    cleanup.callback(within, next(iter(users.values())), "cuMemUnmap", at, size)
    for device, context in users.items():
        access = AccessDesc()
        access.location.type, access.location.id, access.flags = MEM_DEVICE, device, MEM_ACCESS_READ_WRITE
        if cu.cuMemSetAccess(at, size, access, 1):
            raise MachineError(
                "wrong-machine",
                f"device {context.index} cannot write to the memory of another rank's device",
                "the GPUs of a model have to reach each other, by NVLink or PCIe: `nvidia-smi topo -p2p w` shows which do",
            )


def begin_part(world: World, at: int, limit: int, stream: Any) -> None:
    """Fills a rank's part with zeros, but for the nanoseconds that its kernels wait; done when this returns.  The context of its
    device is current."""
    fill(at, world.stride, 0, stream)
    number = ctypes.c_uint64(limit)
    copy(at + world.limit, ctypes.addressof(number), 8, stream, source_on_device=False)
    check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))


def within(context: Context, name: str, *arguments: Any) -> None:
    """A function of the driver that gives something back, where the context is current."""
    with context:
        check(name, getattr(cu, name)(*arguments))
