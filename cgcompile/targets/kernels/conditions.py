"""The kernel that sets the condition of a conditional node: a few lines of PTX, compiled for the architecture.

Only a kernel can set the condition of a conditional node, by calling `cudaGraphSetConditional`.  That is an external function of
the PTX, which the driver resolves when it loads the image (driver 580, H200; ptxas of triton 3.6 and 3.7).  From sm_90 on the
previous kernel may let this kernel start early, so this kernel waits for it.
"""

from __future__ import annotations

import hashlib

from cgbundle.format.table import SET_CONDITION
from cgbundle.validate.module_state import Address, Relocation
from cgbundle.validate.special_kernels import PARAMS
from cgcompile.bundle.recordings import Function, Handle, KernelNode

from .ptxas import assemble

WAITING = 90
"""The first capability with programmatic dependent launch: a kernel may start before the previous one has ended."""


def condition_source(capability: int) -> str:
    """Returns the PTX for a capability (90 for sm_90).  PTX 8.3 comes with CUDA 12.3, the first version with conditional nodes."""
    lowest, wait = (WAITING, "griddepcontrol.wait;") if capability >= WAITING else (80, "")
    return f"""
.version 8.3
.target sm_{lowest}
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry {SET_CONDITION}(.param .u64 byte, .param .u64 handle)
{{
  .reg .b32 %value;
  .reg .b64 %at, %handle;
  {wait}
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


def condition_image(name: str) -> bytes:
    """Returns the kernel's image for an architecture ("sm_90").  Raises extra-missing, kernel-failed."""
    capability = int(name.removeprefix("sm_"))
    return assemble(condition_source(capability), capability)


def condition_function(image: bytes) -> Function:
    """Returns the kernel in an image of `condition_image`."""
    return Function(image=hashlib.sha256(image).hexdigest(), symbol=SET_CONDITION, params=tuple(PARAMS), attributes=())


def set_condition(function: int, byte: Address, conditional: int) -> KernelNode:
    """Returns the launch that sets the condition of conditional node number `conditional` to a byte of memory."""
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
