"""The PTX around the body of a kernel of `kernels`: parameters, and the epoch, which is read first and written last.

Registers with a fixed meaning: %in and %out; %m0 and following, the exchange memories of the ranks, and %mine, that of this rank;
%epoch, and %half, which it selects; %dead: this thread no longer waits; %count, %stride, %senders and %rank as in
`kernels.params`; %j: the first index of a thread.  All other registers are temporary.
"""

from __future__ import annotations

from .exchange_memory import BLOCKS, STATUS
from .exchange_text import choose

HEAD = """.version 7.0
.target sm_80
.address_size 64
"""
"""PTX 7.0 is the first version that can round to bfloat16.  ptxas compiles it for sm_80 and any later architecture."""

AT_ONCE = 4
"""The number of pieces that a thread copies at once.  A sum of two ranks loads as many from each rank, with more ranks fewer."""


def entry(world: int, name: str, body: str) -> str:
    """Returns a kernel: `body` between the common beginning and end."""
    long = ["input", "output", *[f"memory_{rank}" for rank in range(world)], "stride"]
    params = [f".param .u64 {param}" for param in long] + [f".param .u32 {param}" for param in ("count", "rank", "senders")]
    return f"""
.visible .entry {name}({", ".join(params)})
{{
  .reg .pred %p, %dead, %k<{AT_ONCE}>;
  .reg .b16 %h<2>;
  .reg .b32 %block, %thread, %threads, %blocks, %epoch, %half, %rank, %count, %senders;
  .reg .b32 %i, %j, %step, %last, %looks, %t, %f, %g, %w<{8 * AT_ONCE}>;
  .reg .b64 %in, %out, %mine, %stride, %to, %from, %at, %own, %bytes, %start, %now, %limit;
  .reg .b64 %m<{world}>, %a<{AT_ONCE}>;
  .reg .f32 %s<8>, %v<2>;
{_begin(world)}{body}{_END}}}
"""


def _begin(world: int) -> str:
    """Returns PTX that loads the parameters and the epoch, and sets %dead if an earlier wait of this rank timed out."""
    names = {"%in": "input", "%out": "output", **{f"%m{rank}": f"memory_{rank}" for rank in range(world)}}
    loaded = "".join([f"  ld.param.u64 {to}, [{name}];\n  cvta.to.global.u64 {to}, {to};\n" for to, name in names.items()])
    return f"""{loaded}
  ld.param.u64 %stride, [stride];
  ld.param.u32 %count, [count];
  ld.param.u32 %rank, [rank];
  ld.param.u32 %senders, [senders];
  mov.u32 %block, %ctaid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %blocks, %nctaid.x;
{choose("%mine", "%rank", world)}
  mul.wide.u32 %at, %block, 4;
  add.s64 %at, %mine, %at;
  ld.volatile.global.u32 %epoch, [%at];
  add.u32 %epoch, %epoch, 1;
  and.b32 %half, %epoch, 1;
  ld.volatile.global.u32 %t, [%mine+{STATUS}];
  setp.ne.u32 %dead, %t, 0;
  mov.u32 %looks, 0;
  mov.u64 %start, 0;
"""


_END = f"""
  bar.sync 0;
  mad.lo.u32 %j, %thread, %blocks, %block;
  mul.lo.u32 %step, %threads, %blocks;
EPOCH:
  setp.ge.u32 %p, %j, {BLOCKS};
  @%p bra DONE;
  mul.wide.u32 %at, %j, 4;
  add.s64 %at, %mine, %at;
  st.global.u32 [%at], %epoch;
  add.u32 %j, %j, %step;
  bra EPOCH;
DONE:
  ret;
"""
"""Stores the epochs of this block, and of blocks that this launch lacks, after all threads of the block have read the epoch."""
