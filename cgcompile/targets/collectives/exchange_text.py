"""PTX that computes addresses in the exchange memories, and that waits with a time limit."""

from __future__ import annotations

from .exchange_memory import LIMIT, STATUS

_LOOKS = 1024
"""A waiting thread reads the clock after this many polls."""

OWN = """
  cvt.u64.u32 %own, %rank;
  mul.lo.s64 %own, %own, %stride;
  add.s64 %own, %own, %in;
"""
"""Computes %own, the address of the part of this rank's input that stays on this rank."""


def choose(to: str, rank: str, world: int) -> str:
    """Returns PTX that selects the exchange memory of the rank in register `rank`."""
    rest = "".join([f"  setp.eq.u32 %p, {rank}, {peer};\n  selp.b64 {to}, %m{peer}, {to}, %p;\n" for peer in range(1, world)])
    return f"  mov.b64 {to}, %m0;\n{rest}"


def slot_address(base: str, source: str, to: str, slots: tuple[int, int, int]) -> str:
    """Returns PTX that computes the address of the data that rank `source`, a register or a number, sends in this epoch.  `slots`:
    the offset of the first slot, the bytes of a half, and the bytes of a slot."""
    first, half, size = slots
    lines = f"  cvt.u64.u32 {to}, %half;\n  mul.lo.s64 {to}, {to}, {half};\n  add.s64 {to}, {to}, {base};\n"
    if not source.startswith("%"):
        return f"{lines}  add.s64 {to}, {to}, {first + int(source) * size};\n"
    return f"{lines}  add.s64 {to}, {to}, {first};\n  mul.wide.u32 %bytes, {source}, {size};\n  add.s64 {to}, {to}, %bytes;\n"


def wait(label: str, look: str, source: str) -> str:
    """Returns PTX that repeats `look` until predicate %p holds.  After the time limit it sets the status to 1 + rank `source`, and
    sets %dead (`kernel_text`)."""
    return f"""
{label}:
{look}
  @%p bra {label}_THERE;
  @%dead bra {label}_THERE;
  add.u32 %looks, %looks, 1;
  and.b32 %t, %looks, {_LOOKS - 1};
  setp.ne.u32 %p, %t, 0;
  @%p bra {label};
  ld.volatile.global.u64 %limit, [%mine+{LIMIT}];
  setp.eq.u64 %p, %limit, 0;
  @%p bra {label};
  mov.u64 %now, %globaltimer;
  setp.eq.u64 %p, %start, 0;
  selp.b64 %start, %now, %start, %p;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %p, %now, %limit;
  @%p bra {label};
  mov.u32 %t, {source};
  add.u32 %t, %t, 1;
  st.volatile.global.u32 [%mine+{STATUS}], %t;
  setp.eq.u32 %dead, 0, 0;
{label}_THERE:
"""
