"""PTX of collectives by packets: 8 bytes of data with the epoch twice, so that a receiver polls the data itself."""

from __future__ import annotations

from .exchange_memory import ExchangeMemory
from .exchange_text import OWN, slot_address, wait
from .sums import add, rounded

_STORE_SUM = """  add.s64 %to, %out, %at;
  st.global.v2.u32 [%to], {%w0, %w1};
"""
"""Stores the two words of a sum."""


def packets(memory: ExchangeMemory, combine: str) -> str:
    """Returns the PTX: each thread sends its pieces to all ranks, then waits for the same pieces from all ranks."""
    world, size = memory.world, 2 * memory.packets
    slots = (memory.packets_at, memory.packets_half, size)
    sent = "".join([_send_packets(target, slot_address(f"%m{target}", "%rank", "%to", slots)) for target in range(world)])
    received = "".join([_take_packet(source, source * size, combine) for source in range(world)])
    stored = "" if combine == "side by side" else f"{rounded(combine, 2)}{_STORE_SUM}"
    return f"""
  mad.lo.u32 %j, %block, %threads, %thread;
  mul.lo.u32 %step, %threads, %blocks;
{sent}{OWN}{slot_address("%mine", "0", "%from", slots)}
  mov.u32 %i, %j;
TAKE:
  setp.ge.u32 %p, %i, %count;
  @%p bra TAKEN;
  mul.wide.u32 %at, %i, 8;
{received}{stored}
  add.u32 %i, %i, %step;
  bra TAKE;
TAKEN:
"""


def _send_packets(target: int, slot: str) -> str:
    return f"""
  setp.eq.u32 %p, %rank, {target};
  @%p bra SENT_{target};
{slot}
  mul.lo.s64 %from, %stride, {target};
  add.s64 %from, %from, %in;
  mov.u32 %i, %j;
SEND_{target}:
  setp.ge.u32 %p, %i, %count;
  @%p bra SENT_{target};
  mul.wide.u32 %at, %i, 8;
  add.s64 %a0, %from, %at;
  ld.global.v2.u32 {{%w0, %w1}}, [%a0];
  shl.b64 %at, %at, 1;
  add.s64 %a0, %to, %at;
  st.volatile.global.v4.u32 [%a0], {{%w0, %epoch, %w1, %epoch}};
  add.u32 %i, %i, %step;
  bra SEND_{target};
SENT_{target}:
"""


def _take_packet(source: int, offset: int, combine: str) -> str:
    """Returns the PTX that waits for one piece from rank `source`, and adds or stores it."""
    look = """  ld.volatile.global.v4.u32 {%w0, %f, %w1, %g}, [%to];
  setp.eq.u32 %p, %f, %epoch;
  setp.eq.and.u32 %p, %g, %epoch, %p;"""
    placed = f"""  mul.wide.u32 %to, %count, 8;
  mul.lo.s64 %to, %to, {source};
  add.s64 %to, %to, %at;
  add.s64 %to, %to, %out;
  st.global.v2.u32 [%to], {{%w0, %w1}};
"""
    return f"""
  setp.eq.u32 %p, %rank, {source};
  @%p bra OWN_{source};
  shl.b64 %to, %at, 1;
  add.s64 %to, %to, %from;
  add.s64 %to, %to, {offset};
{wait(f"WAIT_{source}", look, str(source))}
  bra COMBINE_{source};
OWN_{source}:
  add.s64 %to, %own, %at;
  ld.global.v2.u32 {{%w0, %w1}}, [%to];
COMBINE_{source}:
{placed if combine == "side by side" else add(combine, 2, first=source == 0)}"""
