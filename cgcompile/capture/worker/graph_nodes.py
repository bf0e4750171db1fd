"""Reads a captured CUgraph node by node with the driver API, and refuses nodes and attributes that a bundle cannot hold.
Kernel parameters are an array of pointers (`kernelParams`) or, for cuBLAS, one packed buffer in the `extra` list.  Both become one
packed block."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cgbundle.format.schema import IntKey

from ...errors import BuildError, ModelError
from ..rows import Piece, join
from ..take import (
    RawBegin,
    RawEdge,
    RawEmpty,
    RawEnd,
    RawKernel,
    RawMemcpy,
    RawMemset,
    RawNextBody,
    RawNode,
    RawRow,
    RawSetCondition,
    Word,
)
from .address_map import AddressMap
from .driver import check, driver, succeeded
from .steps import Conditional, SetCondition, Step

REFUSED = {
    "HOST": "it calls a function of the recording process",
    "GRAPH": "child graphs are not recorded",
    "WAIT_EVENT": "it waits for an event of the recording process",
    "EVENT_RECORD": "it records an event of the recording process",
    "EXT_SEMAS_SIGNAL": "it signals another API's semaphore",
    "EXT_SEMAS_WAIT": "it waits for another API's semaphore",
    "MEM_ALLOC": "it allocates memory while the graph runs",
    "MEM_FREE": "it frees memory while the graph runs",
    "BATCH_MEM_OP": "it reads or writes memory words from the stream",
    "CONDITIONAL": "its body depends on a value on the device",
}
"""Kinds of node that a bundle cannot hold, with the reason."""

FUNCTION_ATTRIBUTES = {8: 0, 9: -1, 14: 0, 15: 0}
"""CUfunction_attribute -> its default value.  In order: maximum dynamic shared memory, shared memory carve-out, non-portable
cluster size allowed, cluster scheduling policy."""

ATTRIBUTES: dict[int, Callable[[Any], tuple[int, int, int]]] = {
    2: lambda v: (v.cooperative, 0, 0),
    4: lambda v: (v.clusterDim.x, v.clusterDim.y, v.clusterDim.z),
    5: lambda v: (int(v.clusterSchedulingPolicyPreference), 0, 0),
    8: lambda v: (v.priority, 0, 0),
    9: lambda v: (v.memSyncDomainMap.default_, v.memSyncDomainMap.remote, 0),
    10: lambda v: (int(v.memSyncDomain), 0, 0),
    11: lambda v: (v.preferredClusterDim.x, v.preferredClusterDim.y, v.preferredClusterDim.z),
    14: lambda v: (v.sharedMemCarveout, 0, 0),
    16: lambda v: (v.nvlinkUtilCentricScheduling, 0, 0),
}
"""CUlaunchAttributeID -> function that reads its values.  In a captured graph, edges hold programmatic dependent launch.

CUDA does not document the value of an attribute that was not set: the cluster scheduling policy reads 1 on driver 580.  So a value
is recorded only if it differs from that of a newly added node with the same parameters."""

REFUSED_ATTRIBUTES: dict[int, tuple[str, Callable[[Any], int]]] = {
    1: ("an access policy window, which holds an address", lambda v: int(v.accessPolicyWindow.num_bytes)),
    13: ("device-side updates of the node", lambda v: int(v.deviceUpdatableKernelNode.deviceUpdatable)),
}


def walk_steps(
    steps: Sequence[Step],
    key: IntKey,
    addresses: AddressMap,
    modules: Mapping[int, tuple[str, ...]],
    functions: Callable[[str], frozenset[str]],
) -> tuple[tuple[RawRow, ...], tuple[RawEdge, ...], dict[str, int]]:
    """Returns the rows of a region, its edges, and the CUmodule handle of every image used.  Parameters and errors: see `walk`."""
    used: dict[str, int] = {}

    def pieces(steps: Sequence[Step]) -> Iterator[Piece]:
        for step in steps:
            if isinstance(step, SetCondition):
                byte = Word(at=0, readings=addresses.readings(step.byte.address, key))
                yield (RawSetCondition(conditional=step.conditional, byte=byte),), ()
            elif isinstance(step, Conditional):
                for number, body in enumerate(step.bodies):
                    begin = RawBegin(conditional=step.conditional, type=step.type)
                    yield (RawNextBody(conditional=step.conditional) if number else begin,), ()
                    yield from pieces(body)
                yield (RawEnd(conditional=step.conditional),), ()
            else:
                nodes, edges, graph_images = walk(step.raw_cuda_graph(), key, addresses, modules, functions)
                used.update(graph_images)
                yield nodes, edges

    rows, edges = join(list(pieces(steps)))
    return rows, edges, used


def walk(
    graph: int,
    key: IntKey,
    addresses: AddressMap,
    modules: Mapping[int, tuple[str, ...]],
    functions: Callable[[str], frozenset[str]],
    name: str = "",
    lines: Mapping[int, str] = MappingProxyType({}),
) -> tuple[tuple[RawNode, ...], tuple[RawEdge, ...], dict[str, int]]:
    """Returns a CUgraph's nodes, its edges (source, target, from_port, to_port, type), and the CUmodule handle of every image used.
    `modules`: CUmodule handle -> images (ImageLog.modules).  `functions`: image -> names of its kernels.  `name`: the graph's name
    in messages, if it has no int_key.  `lines`: node handle -> the file:line that added it.  Raises node-refused,
    attribute-refused, copy-refused, image-unseen, parameters-unreadable."""
    handle = driver.CUgraph(graph)
    count = check(driver.cuGraphGetNodes(handle, 0))[1]
    handles = check(driver.cuGraphGetNodes(handle, count))[0] if count else []
    used: dict[str, int] = {}
    scratch = check(driver.cuGraphCreate(0))
    nodes: list[RawNode] = []
    for i, node in enumerate(handles):
        kind = check(driver.cuGraphNodeGetType(node)).name.removeprefix("CU_GRAPH_NODE_TYPE_")
        line = lines.get(int(node), "")
        where = f"{name or f'int_key {key}'}, node {i}" + (f", {line}," if line and kind != "KERNEL" else "")
        if kind == "KERNEL":
            kernel_node = _kernel(node, where, key, addresses, modules, functions, used, scratch, line)
            nodes.append(replace(kernel_node, line=line))
        elif kind == "MEMSET":
            nodes.append(_memset(node, where, key, addresses))
        elif kind == "MEMCPY":
            nodes.append(_memcpy(node, where, key, addresses))
        elif kind == "EMPTY":
            nodes.append(RawEmpty())
        else:
            raise ModelError(
                "node-refused", f"{where} is a node of kind {kind}: {REFUSED.get(kind, 'the recorder does not know it')}"
            )
    check(driver.cuGraphDestroy(scratch))
    return tuple(nodes), _edges(handle, {int(node): i for i, node in enumerate(handles)}), used


def _edges(graph: Any, index: Mapping[int, int]) -> tuple[RawEdge, ...]:
    count = check(driver.cuGraphGetEdges(graph, 0))[-1]
    if not count:
        return ()
    sources, targets, data, _count = check(driver.cuGraphGetEdges(graph, count))
    edges = zip(sources, targets, data, strict=True)
    return tuple((index[int(a)], index[int(b)], int(e.from_port), int(e.to_port), int(e.type)) for a, b, e in edges)


def _kernel(
    node: Any,
    where: str,
    key: IntKey,
    addresses: AddressMap,
    modules: Mapping[int, tuple[str, ...]],
    functions: Callable[[str], frozenset[str]],
    used: dict[str, int],
    scratch: Any,
    line: str = "",
) -> RawKernel:
    params = check(driver.cuGraphKernelNodeGetParams(node))
    function = params.func if int(params.func) else check(driver.cuKernelGetFunction(params.kern))
    symbol = check(driver.cuFuncGetName(function)).decode()
    module = int(check(driver.cuFuncGetModule(function)))
    where = f"{where} ({symbol}{', ' if line else ''}{line})"
    images = [image for image in modules.get(module, ()) if symbol in functions(image)]
    if len(images) != 1:
        seen = "no image was" if not images else f"{len(images)} images were"
        raise BuildError("image-unseen", f"{where}: {seen} seen for its module ({module:#x})")
    used[images[0]] = module
    layout = _layout(function)
    return RawKernel(
        image=images[0],
        symbol=symbol,
        params=layout,
        function_attributes=_function_attributes(function),
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        threads=(params.blockDimX, params.blockDimY, params.blockDimZ),
        shared=params.sharedMemBytes,
        attributes=_attributes(node, params, scratch, where),
        block=addresses.block(_parameters(params, layout, where), key),
    )


def _layout(function: Any) -> tuple[tuple[int, int], ...]:
    """Returns (offset, size) of every parameter.  cuFuncGetParamInfo fails after the last one."""
    layout: list[tuple[int, int]] = []
    while succeeded(info := driver.cuFuncGetParamInfo(function, len(layout))):
        layout.append((int(info[1]), int(info[2])))
    return tuple(layout)


def _parameters(params: Any, layout: tuple[tuple[int, int], ...], where: str) -> bytes:
    end = max((offset + size for offset, size in layout), default=0)
    block = bytearray(end)
    if params.kernelParams:
        pointers = (ctypes.c_void_p * len(layout)).from_address(int(params.kernelParams))
        for (offset, size), pointer in zip(layout, pointers, strict=True):
            block[offset : offset + size] = ctypes.string_at(pointer, size)
    elif params.extra:
        words = (ctypes.c_size_t * 5).from_address(int(params.extra))
        named = {words[0]: words[1], words[2]: words[3]}
        if set(named) != {1, 2} or words[4]:  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END
            raise BuildError(
                "parameters-unreadable", f"{where}: its `extra` list starts with {list(words)}, not with a buffer and its size"
            )
        packed = ctypes.string_at(named[1], ctypes.c_size_t.from_address(named[2]).value)
        block = bytearray(packed.ljust(end, b"\0"))
    elif layout:
        raise BuildError("parameters-unreadable", f"{where}: it has {len(layout)} parameters, but neither kernelParams nor extra")
    return bytes(block)


def _function_attributes(function: Any) -> tuple[tuple[int, int], ...]:
    attributes = []
    for number, default in FUNCTION_ATTRIBUTES.items():
        value = check(driver.cuFuncGetAttribute(driver.CUfunction_attribute(number), function))
        if value != default:
            attributes.append((number, int(value)))
    return tuple(attributes)


def _attributes(node: Any, params: Any, scratch: Any, where: str) -> tuple[tuple[int, tuple[int, int, int]], ...]:
    """Returns attributes that differ from those of a new node with the same parameters, which it adds to graph `scratch`.  Raises
    attribute-refused."""
    plain = _values(check(driver.cuGraphAddKernelNode(scratch, [], 0, params)))
    for number, (reason, read) in REFUSED_ATTRIBUTES.items():
        result = driver.cuGraphKernelNodeGetAttribute(node, driver.CUlaunchAttributeID(number))
        if succeeded(result) and read(result[1]):
            raise ModelError("attribute-refused", f"{where} has launch attribute {number}: {reason}")
    return tuple((number, value) for number, value in _values(node).items() if value != plain.get(number))


def _values(node: Any) -> dict[int, tuple[int, int, int]]:
    values = {}
    for number, read in ATTRIBUTES.items():
        result = driver.cuGraphKernelNodeGetAttribute(node, driver.CUlaunchAttributeID(number))
        if succeeded(result):
            values[number] = read(result[1])
    return values


def _memset(node: Any, where: str, key: IntKey, addresses: AddressMap) -> RawMemset:
    p = check(driver.cuGraphMemsetNodeGetParams(node))
    target = Word(at=0, readings=addresses.readings(int(p.dst), key))
    if not target.readings:
        raise ModelError("node-refused", f"{where} is a memset of {int(p.dst):#x}, which is no live memory of this graph")
    return RawMemset(target=target, shape=(int(p.value), int(p.elementSize), int(p.width), int(p.height), int(p.pitch)))


def _memcpy(node: Any, where: str, key: IntKey, addresses: AddressMap) -> RawMemcpy:
    p = check(driver.cuGraphMemcpyNodeGetParams(node))
    ends = []
    for side in ("src", "dst"):
        kind = getattr(p, side + "MemoryType").name.removeprefix("CU_MEMORYTYPE_")
        if kind not in ("DEVICE", "UNIFIED"):
            raise ModelError("copy-refused", f"{where} copies {'from' if side == 'src' else 'to'} {kind.lower()} memory")
        pitch, rows = getattr(p, side + "Pitch"), getattr(p, side + "Height")
        skipped = getattr(p, side + "XInBytes") + pitch * (getattr(p, side + "Y") + rows * getattr(p, side + "Z"))
        address = int(getattr(p, side + "Device")) + skipped
        word = Word(at=0, readings=addresses.readings(address, key))
        if not word.readings or addresses.ranges[word.readings[0].range].kind == "host":
            memory = "pinned host memory" if word.readings else "no live device memory of this graph"
            raise ModelError("copy-refused", f"{where} copies {'from' if side == 'src' else 'to'} {address:#x}, which is {memory}")
        ends.append(word)
    shape = (p.WidthInBytes, p.Height, p.Depth, p.srcPitch, p.srcHeight, p.dstPitch, p.dstHeight)
    return RawMemcpy(source=ends[0], target=ends[1], shape=tuple(int(x) for x in shape))
