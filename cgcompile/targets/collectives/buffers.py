"""PTX of collectives by buffers: plain data, followed by one flag per block."""

from __future__ import annotations

from .exchange_memory import BLOCKS, FLAGS, LINE, ExchangeMemory
from .exchange_text import OWN, choose, slot_address, wait
from .kernel_text import AT_ONCE
from .sums import add, rounded


def buffers(memory: ExchangeMemory, combine: str) -> str:
    """Returns the PTX: each block sends its part to all ranks, waits for that part from all ranks, and combines it."""
    world, slots = memory.world, (memory.buffers_at, memory.buffers_half, memory.buffers)
    sent = "".join([_send_buffer(target, slot_address(f"%m{target}", "%rank", "%to", slots)) for target in range(world)])
    sources = "".join([_source(source, slot_address("%mine", str(source), f"%m{source}", slots)) for source in range(world)])
    combined = _placed(world) if combine == "side by side" else _summed(world, combine)
    return f"""
  add.u32 %t, %count, %blocks;
  sub.u32 %t, %t, 1;
  div.u32 %t, %t, %blocks;
  mul.lo.u32 %j, %t, %block;
  add.u32 %last, %j, %t;
  min.u32 %last, %last, %count;
  add.u32 %j, %j, %thread;
  shr.u32 %t, %senders, %rank;
  and.b32 %t, %t, 1;
  setp.eq.u32 %p, %t, 0;
  @%p bra SENT;
{sent}
SENT:
  bar.sync 0;
{_flags(world)}
  bar.sync 0;
{OWN}{sources}{combined}"""


def _send_buffer(target: int, slot: str) -> str:
    return f"""
  setp.eq.u32 %p, %rank, {target};
  @%p bra SENT_{target};
{slot}
  mul.lo.s64 %from, %stride, {target};
  add.s64 %from, %from, %in;
{_copy(f"SEND_{target}", "%from", "%to")}
SENT_{target}:
"""


def _flags(world: int) -> str:
    """Returns the PTX in which thread n sets the flag of this block on rank n, and waits for the flag that rank n sets here.  The
    fence makes the stores of all threads before the barrier visible before the flag."""
    look = f"""  ld.acquire.sys.global.u32 %f, [%a1+{FLAGS}];
  sub.u32 %g, %f, %epoch;
  setp.ge.s32 %p, %g, 0;"""
    return f"""
  setp.ge.u32 %p, %thread, {world};
  @%p bra HEARD;
  setp.eq.u32 %p, %thread, %rank;
  @%p bra HEARD;
{choose("%to", "%thread", world)}
  mad.lo.u32 %t, %rank, {BLOCKS}, %block;
  mul.wide.u32 %at, %t, {LINE};
  add.s64 %a0, %to, %at;
  mad.lo.u32 %t, %thread, {BLOCKS}, %block;
  mul.wide.u32 %at, %t, {LINE};
  add.s64 %a1, %mine, %at;
  fence.acq_rel.sys;
  st.relaxed.sys.global.u32 [%a0+{FLAGS}], %epoch;
{wait("WAIT", look, "%thread")}
HEARD:
"""


def _source(source: int, slot: str) -> str:
    """Returns PTX that sets the %m register of rank `source` to the address of the rank's data: in the buffers or, for this rank,
    in its input."""
    return f"{slot}  setp.eq.u32 %p, %rank, {source};\n  selp.b64 %m{source}, %own, %m{source}, %p;\n"


def _placed(world: int) -> str:
    copies = [
        f"""
  shr.u32 %t, %senders, {source};
  and.b32 %t, %t, 1;
  setp.eq.u32 %p, %t, 0;
  @%p bra PLACED_{source};
{_copy(f"PLACE_{source}", f"%m{source}", "%out")}
  add.s64 %out, %out, %bytes;
PLACED_{source}:
"""
        for source in range(world)
    ]
    return "  mul.wide.u32 %bytes, %count, 16;\n" + "".join(copies)


def _summed(world: int, combine: str) -> str:
    at_once = max(1, 2 * AT_ONCE // world)
    loads = stores = ""
    for piece in range(at_once):
        loads += f"  setp.lt.u32 %k{piece}, %t, %last;\n  mul.wide.u32 %a{piece}, %t, 16;\n  add.u32 %t, %t, %threads;\n"
        for rank in range(world):
            words = _words(piece * world + rank)
            loads += f"  add.s64 %at, %m{rank}, %a{piece};\n  @%k{piece} ld.global.cg.v4.u32 {words}, [%at];\n"
            stores += add(combine, 4, first=rank == 0, word=4 * (piece * world + rank))
        stores += f"{rounded(combine, 4)}  add.s64 %at, %out, %a{piece};\n  @%k{piece} st.global.v4.u32 [%at], {_words(0)};\n"
    return f"""
  mov.u32 %i, %j;
TAKE:
  setp.ge.u32 %p, %i, %last;
  @%p bra TAKEN;
  mov.u32 %t, %i;
{loads}  mov.u32 %i, %t;
{stores}  bra TAKE;
TAKEN:
"""


def _copy(label: str, source: str, target: str) -> str:
    """Returns the PTX that copies the block's part from one address to another."""
    loads = [
        f"""
  setp.lt.u32 %k{piece}, %t, %last;
  mul.wide.u32 %a{piece}, %t, 16;
  add.s64 %at, %a{piece}, {source};
  @%k{piece} ld.global.cg.v4.u32 {_words(piece)}, [%at];
  add.u32 %t, %t, %threads;"""
        for piece in range(AT_ONCE)
    ]
    stores = [
        f"\n  add.s64 %at, %a{piece}, {target};\n  @%k{piece} st.global.v4.u32 [%at], {_words(piece)};" for piece in range(AT_ONCE)
    ]
    return f"""
  mov.u32 %i, %j;
{label}:
  setp.ge.u32 %p, %i, %last;
  @%p bra {label}_DONE;
  mov.u32 %t, %i;
{"".join(loads + stores)}
  mov.u32 %i, %t;
  bra {label};
{label}_DONE:
"""


def _words(number: int) -> str:
    """Returns the vector operand of piece `number`: four registers."""
    return "{" + ", ".join([f"%w{4 * number + place}" for place in range(4)]) + "}"
