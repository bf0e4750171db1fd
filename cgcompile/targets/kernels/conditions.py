"""The kernel that sets the condition of a conditional node: a few lines of PTX, compiled for the architecture.

A CUDA graph's branches and loops ask a value that only a kernel can set, by calling `cudaGraphSetConditional`.  That is an external
function of the PTX, which the driver resolves when the image is loaded (driver 580, H200; ptxas of triton 3.6 and 3.7).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cgbundle.tables.recording import Address, ConditionalNode, Function, Handle, KernelNode, Recording, Relocation
from cgbundle.tables.table import SET_CONDITION
from cgbundle.validate.conditionals import PARAMS

from .ptxas import assemble

SOURCE = f"""
.version 8.3
.target sm_80
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry {SET_CONDITION}(.param .u64 byte, .param .u64 handle)
{{
  .reg .b32 %value;
  .reg .b64 %at, %handle;
  ld.param.u64 %at, [byte];
  ld.param.u64 %handle, [handle];
  cvta.to.global.u64 %at, %at;
  ld.global.u8 %value, [%at];
  {{
    .param .b64 first;
    st.param.b64 [first], %handle;
    .param .b32 second;
    st.param.b32 [second], %value;
    call.uni cudaGraphSetConditional, (first, second);
  }}
  ret;
}}
"""
"""PTX 8.3 is CUDA 12.3's, the first with conditional nodes."""

LOOPS, BRANCHES = 12040, 12080
"""The lowest drivers that take a loop, or an "if" with one body in a body, and an "if" with two bodies or a "switch" (12040 =
12.4)."""


def condition_image(name: str) -> bytes:
    """The kernel's image for an architecture ("sm_90").  Raises extra-missing, kernel-failed."""
    return assemble(SOURCE, int(name.removeprefix("sm_")))


def conditional_driver(recordings: Iterable[Recording]) -> int:
    """The lowest driver that takes the conditional nodes of the recordings, 0 without any."""
    found = [node for recording in recordings for node in recording.nodes if isinstance(node, ConditionalNode)]
    return max([BRANCHES if node.type == "switch" or len(node.bodies) > 1 else LOOPS for node in found], default=0)


def condition_function(image: bytes) -> Function:
    """The kernel in an image of `condition_image`."""
    return Function(image=hashlib.sha256(image).hexdigest(), symbol=SET_CONDITION, params=tuple(PARAMS), attributes=())


def set_condition(function: int, byte: Address, conditional: int) -> KernelNode:
    """The launch that sets the condition of conditional node number `conditional` to a byte."""
    return KernelNode(
        function=function,
        grid=(1, 1, 1),
        threads=(1, 1, 1),
        shared=0,
        block=bytes(16),
        relocations=(Relocation(at=PARAMS[0][0], target=byte),),
        undefined=(),
        attributes=(),
        handles=(Handle(at=PARAMS[1][0], conditional=conditional),),
    )
