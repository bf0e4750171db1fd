"""Replaces memset nodes of a recording by launches of a fill kernel.

The driver launches a graph in nearly constant time if it is a chain of kernels only.  A single memset node prevents this: on an
H200 (driver 580) `cuGraphLaunch` took 3.5 us of CPU time for 100 kernels, and 24 us for 110 kernels and 12 memsets.  Memsets of
several rows with a pitch stay memset nodes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import replace

from cgbundle.validate.module_state import Relocation
from cgcompile.bundle.recordings import Function, KernelNode, MemsetNode, Node, Recording

from .ptxas import assemble

THREADS = 256
"""Threads of a block.  Each thread writes one piece."""

PIECES = (16, 4, 2, 1)
"""Sizes of a piece in bytes, widest first.  There is a kernel for each size."""

PARAMS = ((0, 8), (8, 8), (16, 4))
"""(offset, size) of the parameters: the first address, the number of pieces, the pattern of four bytes."""

_BLOCK = struct.Struct("<QQI")

_ENTRY = """
.visible .entry cgcompile_fill_{piece}(.param .u64 target, .param .u64 count, .param .u32 pattern)
{{
  .reg .pred %done;
  .reg .b16 %half;
  .reg .b32 %word, %block, %threads, %thread;
  .reg .b64 %at, %count, %index, %own;
  ld.param.u64 %at, [target];
  ld.param.u64 %count, [count];
  ld.param.u32 %word, [pattern];
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %index, %block, %threads;
  cvt.u64.u32 %own, %thread;
  add.s64 %index, %index, %own;
  setp.ge.u64 %done, %index, %count;
  @%done bra END;
  cvta.to.global.u64 %at, %at;
  mul.lo.s64 %index, %index, {piece};
  add.s64 %at, %at, %index;
  cvt.u16.u32 %half, %word;
  {store}
END:
  ret;
}}
"""

_STORES = {
    16: "st.global.v4.u32 [%at], {%word, %word, %word, %word};",
    4: "st.global.u32 [%at], %word;",
    2: "st.global.u16 [%at], %half;",
    1: "st.global.u8 [%at], %half;",
}

_HEAD = """.version 7.0
.target sm_80
.address_size 64
"""
"""PTX 7.0 comes with CUDA 11, the first version that supports sm_80.  ptxas compiles it for sm_80 and any later architecture."""


def source() -> str:
    """Returns the PTX.  Kernel `cgcompile_fill_N` writes `count` pieces of N bytes."""
    return _HEAD + "".join(_ENTRY.format(piece=piece, store=_STORES[piece]) for piece in PIECES)


def fill_image(name: str) -> bytes:
    """Returns the kernels' image for an architecture ("sm_90").  Raises extra-missing, kernel-failed."""
    return assemble(source(), int(name.removeprefix("sm_")))


def has_memsets(recordings: Iterable[Recording]) -> bool:
    """Whether `without_memsets` would replace a node."""
    return any(_flat(node) for recording in recordings for node in recording.nodes)


def without_memsets(recording: Recording, image: bytes) -> Recording:
    """Returns the recording with kernel launches in place of memsets of one row.  `image`: the result of `fill_image`."""
    name = hashlib.sha256(image).hexdigest()
    functions = {function: number for number, function in enumerate(recording.functions)}
    nodes: list[Node] = []
    for node in recording.nodes:
        if isinstance(node, MemsetNode) and _flat(node):
            piece = _piece(node)
            function = Function(image=name, symbol=f"cgcompile_fill_{piece}", params=PARAMS, attributes=())
            nodes.append(_launch(node, piece, functions.setdefault(function, len(functions))))
        else:
            nodes.append(node)
    return replace(recording, functions=tuple(functions), nodes=tuple(nodes))


def memset_of(function: Function, node: KernelNode) -> MemsetNode | None:
    """Returns the memset that a launch of `without_memsets` replaces, or None for any other kernel."""
    symbol, _, piece = function.symbol.rpartition("_")
    if symbol != "cgcompile_fill" or function.params != PARAMS:
        return None
    _, count, pattern = _BLOCK.unpack(node.block)
    target = node.relocations[0].target
    size = int(piece) * count
    element = 4 if int(piece) >= 4 else int(piece)
    value = pattern & ((1 << 8 * element) - 1)
    return MemsetNode(target=target, value=value, element=element, width=size // element, height=1, pitch=0)


def _flat(node: Node) -> bool:
    return isinstance(node, MemsetNode) and node.height == 1 and node.width > 0


def _piece(node: MemsetNode) -> int:
    """Returns the size of the widest piece to which both ends of the memset are aligned."""
    ends = node.target.offset | (node.width * node.element)
    return next(piece for piece in PIECES if not ends % piece)


def _launch(node: MemsetNode, piece: int, function: int) -> KernelNode:
    count = node.width * node.element // piece
    element_bytes = (node.value % (1 << 8 * node.element)).to_bytes(node.element, "little")
    pattern = int.from_bytes(element_bytes * (4 // node.element), "little")
    return KernelNode(
        function=function,
        grid=(-(-count // THREADS), 1, 1),
        threads=(THREADS, 1, 1),
        shared=0,
        block=_BLOCK.pack(0, count, pattern),
        relocations=(Relocation(at=0, target=node.target),),
        undefined=(),
        attributes=(),
    )
