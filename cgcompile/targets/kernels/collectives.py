"""Kernels for collectives between the GPUs of one host, as PTX: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast.

All of them are one exchange: every rank writes a part of its input to the memory of every other one (`exchange_memory`), waits for
what the others send to it, and then either adds up what came, in the order of the ranks, or puts it side by side.  Adding in the
order of the ranks, in float32, gives the same bits on every rank and in every run.

There are two ways to send.  Packets carry 8 bytes of data and twice their epoch: whoever waits for them looks at the data itself, so
that an exchange takes one way through the link, and twice the bytes.  Buffers are written as they are, then a flag per block.

Nothing but memory changes from launch to launch, so a graph with these kernels can be stored and replayed.  All ranks have to launch
the same collectives in the same order, each with the same blocks and threads on all ranks, and all blocks of one must fit on the GPU at
once.  A kernel that has waited too long writes down for whom and no longer waits; neither does any after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from .exchange_memory import BLOCKS, FLAGS, LIMIT, LINE, STATUS, ExchangeMemory
from .ptxas import assemble

Combine = Literal["bfloat16", "float16", "float32", "side by side"]
"""Adding up numbers of a dtype, or putting bytes side by side."""

Way = Literal["packets", "buffers"]

PIECE = {"packets": 8, "buffers": 16}
"""Bytes of data that a thread handles at once."""

_HEAD = """.version 7.0
.target sm_80
.address_size 64
"""

_LOOKS = 1023
"""A waiting thread asks for the time whenever it has looked as often as this, plus one."""


def symbol(way: Way, combine: Combine) -> str:
    """The name of a kernel in the image of `collective_image`."""
    return f"cgcompile_{way}_{combine.replace(' ', '_')}"


def params(world: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) of a kernel's parameters: the input, the output, the exchange memories of all ranks in order, the own one among
    them; the bytes from what is sent to one rank to what is sent to the next, 0 where all get the same; how many pieces each rank gets;
    the own rank; and the ranks that send, as bits: the others only say that they were there."""
    return tuple([(8 * place, 8) for place in range(world + 3)] + [(8 * (world + 3) + 4 * place, 4) for place in range(3)])


def collective_image(name: str, memory: ExchangeMemory) -> bytes:
    """The image of all kernels for an architecture ("sm_90").  Raises extra-missing, kernel-failed."""
    return assemble(source(memory), int(name.removeprefix("sm_")))


def source(memory: ExchangeMemory) -> str:
    """The kernels as PTX."""
    combines: tuple[Combine, ...] = ("bfloat16", "float16", "float32", "side by side")
    bodies = [("packets", combine, _packets(memory, combine)) for combine in combines]
    bodies += [("buffers", combine, _buffers(memory, combine)) for combine in combines]
    return _HEAD + "".join(_entry(memory.world, symbol(way, combine), body) for way, combine, body in bodies)  # type: ignore[arg-type]


def _entry(world: int, name: str, body: Iterator[str]) -> str:
    listed = ["input", "output", *[f"memory_{rank}" for rank in range(world)], "stride"]
    head = ", ".join([f".param .u64 {each}" for each in listed] + [f".param .u32 {each}" for each in ("count", "rank", "senders")])
    return "\n".join([f".visible .entry {name}({head})", "{", _REGISTERS, *_begin(world), *body, *_end(), "}", ""])


_REGISTERS = """  .reg .pred %p, %q, %dead, %sum, %k<8>;
  .reg .b16 %h<2>;
  .reg .b32 %block, %thread, %threads, %blocks, %epoch, %half, %rank, %count, %senders, %i, %j, %step, %last, %looks, %t, %w<32>, %f, %g;
  .reg .b64 %in, %out, %mine, %to, %from, %at, %own, %stride, %bytes, %start, %now, %limit, %m<8>, %a<8>;
  .reg .f32 %s<16>, %v<2>;"""


def _begin(world: int) -> Iterator[str]:
    """The parameters, the epoch of this collective, and whether this rank has given up."""
    pointers = [("%in", "input"), ("%out", "output"), *[(f"%m{rank}", f"memory_{rank}") for rank in range(world)]]
    for register, name in pointers:
        yield f"  ld.param.u64 {register}, [{name}];"
        yield f"  cvta.to.global.u64 {register}, {register};"
    yield "  ld.param.u64 %stride, [stride];"
    for name in ("count", "rank", "senders"):
        yield f"  ld.param.u32 %{name}, [{name}];"
    yield from (
        "  mov.u32 %block, %ctaid.x;",
        "  mov.u32 %thread, %tid.x;",
        "  mov.u32 %threads, %ntid.x;",
        "  mov.u32 %blocks, %nctaid.x;",
    )
    yield "  mov.b64 %mine, %m0;"
    for rank in range(1, world):
        yield f"  setp.eq.u32 %p, %rank, {rank};"
        yield f"  selp.b64 %mine, %m{rank}, %mine, %p;"
    yield "  mul.wide.u32 %at, %block, 4;"
    yield "  add.s64 %at, %mine, %at;"
    yield "  ld.volatile.global.u32 %epoch, [%at];"
    yield "  add.u32 %epoch, %epoch, 1;"
    yield "  and.b32 %half, %epoch, 1;"
    yield f"  ld.volatile.global.u32 %t, [%mine+{STATUS}];"
    yield "  setp.ne.u32 %dead, %t, 0;"
    yield "  mov.u32 %looks, 0;"
    yield "  mov.u64 %start, 0;"


def _end() -> Iterator[str]:
    """The epochs of this block, and of those that this launch is without, when all threads have read theirs."""
    yield "  bar.sync 0;"
    yield "  mad.lo.u32 %j, %thread, %blocks, %block;"
    yield "  mul.lo.u32 %step, %threads, %blocks;"
    yield "EPOCH:"
    yield f"  setp.ge.u32 %p, %j, {BLOCKS};"
    yield "  @%p bra DONE;"
    yield "  mul.wide.u32 %at, %j, 4;"
    yield "  add.s64 %at, %mine, %at;"
    yield "  st.global.u32 [%at], %epoch;"
    yield "  add.u32 %j, %j, %step;"
    yield "  bra EPOCH;"
    yield "DONE:"
    yield "  ret;"


def _slot(way: str, memory: ExchangeMemory, base: str, source: str, to: str) -> Iterator[str]:
    """The address in memory `base` of what rank `source`, a register or a number, sends in this epoch."""
    first, half, size = {
        "packets": (memory.packets_at, memory.packets_half, 2 * memory.packets),
        "buffers": (memory.buffers_at, memory.buffers_half, memory.buffers),
    }[way]
    yield (
        f"  mul.wide.u32 {to}, %half, {half};"
        if half < 1 << 32
        else f"  cvt.u64.u32 {to}, %half;\n  mul.lo.s64 {to}, {to}, {half};"
    )
    yield f"  add.s64 {to}, {to}, {base};"
    if source.startswith("%"):
        yield f"  mul.wide.u32 %bytes, {source}, {size};"
        yield f"  add.s64 {to}, {to}, %bytes;"
        yield f"  add.s64 {to}, {to}, {first};"
    else:
        yield f"  add.s64 {to}, {to}, {first + int(source) * size};"


def _wait(label: str, look: Sequence[str], source: str) -> Iterator[str]:
    """Looks until predicate %p holds, or the time is up."""
    yield f"{label}:"
    yield from look
    yield f"  @%p bra {label}_THERE;"
    yield f"  @%dead bra {label}_THERE;"
    yield "  add.u32 %looks, %looks, 1;"
    yield f"  and.b32 %t, %looks, {_LOOKS};"
    yield "  setp.ne.u32 %p, %t, 0;"
    yield f"  @%p bra {label};"
    yield f"  ld.volatile.global.u64 %limit, [%mine+{LIMIT}];"
    yield "  setp.eq.u64 %p, %limit, 0;"
    yield f"  @%p bra {label};"
    yield "  mov.u64 %now, %globaltimer;"
    yield "  setp.eq.u64 %p, %start, 0;"
    yield "  selp.b64 %start, %now, %start, %p;"
    yield "  sub.u64 %now, %now, %start;"
    yield "  setp.lt.u64 %p, %now, %limit;"
    yield f"  @%p bra {label};"
    yield f"  add.u32 %t, {source}, 1;" if source.startswith("%") else f"  mov.u32 %t, {int(source) + 1};"
    yield f"  st.volatile.global.u32 [%mine+{STATUS}], %t;"
    yield "  setp.eq.u32 %dead, 0, 0;"
    yield f"{label}_THERE:"


def _packets(memory: ExchangeMemory, combine: Combine) -> Iterator[str]:
    """Every thread sends its pieces to all, and then waits for the same pieces of all.  Of side by side, all ranks are senders."""
    yield "  mad.lo.u32 %j, %block, %threads, %thread;"
    yield "  mul.lo.u32 %step, %threads, %blocks;"
    for target in range(memory.world):
        yield from (f"  setp.eq.u32 %p, %rank, {target};", f"  @%p bra SENT_{target};")
        yield from _slot("packets", memory, f"%m{target}", "%rank", "%to")
        yield from (
            f"  mul.lo.s64 %from, %stride, {target};",
            "  add.s64 %from, %from, %in;",
            "  mov.u32 %i, %j;",
            f"SEND_{target}:",
        )
        yield from ("  setp.ge.u32 %p, %i, %count;", f"  @%p bra SENT_{target};")
        yield from ("  mul.wide.u32 %at, %i, 8;", "  add.s64 %a0, %from, %at;", "  ld.global.v2.u32 {%w0, %w1}, [%a0];")
        yield from ("  shl.b64 %at, %at, 1;", "  add.s64 %a0, %to, %at;")
        yield "  st.volatile.global.v4.u32 [%a0], {%w0, %epoch, %w1, %epoch};"
        yield from ("  add.u32 %i, %i, %step;", f"  bra SEND_{target};", f"SENT_{target}:")
    yield from ("  cvt.u64.u32 %own, %rank;", "  mul.lo.s64 %own, %own, %stride;", "  add.s64 %own, %own, %in;")
    yield from _slot("packets", memory, "%mine", "0", "%from")
    yield from ("  mov.u32 %i, %j;", "TAKE:", "  setp.ge.u32 %p, %i, %count;", "  @%p bra TAKEN;", "  mul.wide.u32 %at, %i, 8;")
    for source in range(memory.world):
        yield from (f"  setp.eq.u32 %p, %rank, {source};", f"  @%p bra OWN_{source};")
        yield from ("  shl.b64 %to, %at, 1;", "  add.s64 %to, %to, %from;", f"  add.s64 %to, %to, {source * 2 * memory.packets};")
        look = [
            "  ld.volatile.global.v4.u32 {%w0, %f, %w1, %g}, [%to];",
            "  setp.eq.u32 %p, %f, %epoch;",
            "  setp.eq.and.u32 %p, %g, %epoch, %p;",
        ]
        yield from _wait(f"WAIT_{source}", look, str(source))
        yield f"  bra COMBINE_{source};"
        yield from (f"OWN_{source}:", "  add.s64 %to, %own, %at;", "  ld.global.v2.u32 {%w0, %w1}, [%to];", f"COMBINE_{source}:")
        if combine == "side by side":
            yield from ("  mul.wide.u32 %to, %count, 8;", f"  mul.lo.s64 %to, %to, {source};", "  add.s64 %to, %to, %at;")
            yield from ("  add.s64 %to, %to, %out;", "  st.global.v2.u32 [%to], {%w0, %w1};")
        else:
            yield from _add(combine, 2, first=source == 0)
    if combine != "side by side":
        yield from _rounded(combine, 2)
        yield from ("  add.s64 %to, %out, %at;", "  st.global.v2.u32 [%to], {%w0, %w1};")
    yield from ("  add.u32 %i, %i, %step;", "  bra TAKE;", "TAKEN:")


def _buffers(memory: ExchangeMemory, combine: Combine) -> Iterator[str]:
    """Every block sends its part to all, waits for the same part of all, and combines it."""
    world = memory.world
    yield from (
        "  add.u32 %t, %count, %blocks;",
        "  sub.u32 %t, %t, 1;",
        "  div.u32 %t, %t, %blocks;",
        "  mul.lo.u32 %j, %t, %block;",
    )
    yield from ("  add.u32 %last, %j, %t;", "  min.u32 %last, %last, %count;", "  add.u32 %j, %j, %thread;")
    yield from ("  shr.u32 %t, %senders, %rank;", "  and.b32 %t, %t, 1;", "  setp.eq.u32 %p, %t, 0;", "  @%p bra SENT;")
    for target in range(world):
        yield from (f"  setp.eq.u32 %p, %rank, {target};", f"  @%p bra SENT_{target};")
        yield from _slot("buffers", memory, f"%m{target}", "%rank", "%to")
        yield from (f"  mul.lo.s64 %from, %stride, {target};", "  add.s64 %from, %from, %in;")
        yield from _copied(f"SEND_{target}", "%from", "%to")
        yield f"SENT_{target}:"
    yield from ("SENT:", "  bar.sync 0;", f"  setp.ge.u32 %p, %thread, {world};", "  @%p bra HEARD;")
    yield from ("  setp.eq.u32 %p, %thread, %rank;", "  @%p bra HEARD;", "  mov.b64 %to, %m0;")
    for rank in range(1, world):
        yield from (f"  setp.eq.u32 %p, %thread, {rank};", f"  selp.b64 %to, %m{rank}, %to, %p;")
    for base, source in (("%to", "%rank"), ("%mine", "%thread")):
        register = "%a0" if base == "%to" else "%a1"
        yield from (
            f"  mad.lo.u32 %t, {source}, {BLOCKS}, %block;",
            f"  mul.wide.u32 %at, %t, {LINE};",
            f"  add.s64 {register}, {base}, %at;",
        )
    yield from ("  fence.acq_rel.sys;", f"  st.relaxed.sys.global.u32 [%a0+{FLAGS}], %epoch;")
    look = [f"  ld.acquire.sys.global.u32 %f, [%a1+{FLAGS}];", "  sub.u32 %g, %f, %epoch;", "  setp.ge.s32 %p, %g, 0;"]
    yield from _wait("WAIT", look, "%thread")
    yield from ("HEARD:", "  bar.sync 0;")
    yield from ("  cvt.u64.u32 %own, %rank;", "  mul.lo.s64 %own, %own, %stride;", "  add.s64 %own, %own, %in;")
    for source in range(world):
        yield from _slot("buffers", memory, "%mine", str(source), f"%m{source}")
        yield from (f"  setp.eq.u32 %p, %rank, {source};", f"  selp.b64 %m{source}, %own, %m{source}, %p;")
    if combine == "side by side":
        yield "  mul.wide.u32 %bytes, %count, 16;"
        for source in range(world):
            yield from (
                f"  shr.u32 %t, %senders, {source};",
                "  and.b32 %t, %t, 1;",
                "  setp.eq.u32 %p, %t, 0;",
                f"  @%p bra PLACED_{source};",
            )
            yield from _copied(f"PLACE_{source}", f"%m{source}", "%out")
            yield from ("  add.s64 %out, %out, %bytes;", f"PLACED_{source}:")
    else:
        yield from ("  mov.u32 %i, %j;", "TAKE:", "  setp.ge.u32 %p, %i, %last;", "  @%p bra TAKEN;", "  mul.wide.u32 %at, %i, 16;")
        for source in range(world):
            words = ", ".join([f"%w{4 * source + place}" for place in range(4)])
            yield from (f"  add.s64 %a{source}, %m{source}, %at;", f"  ld.global.cg.v4.u32 {{{words}}}, [%a{source}];")
        for source in range(world):
            yield from _add(combine, 4, first=source == 0, word=4 * source)
        yield from _rounded(combine, 4)
        yield from ("  add.s64 %to, %out, %at;", "  st.global.v4.u32 [%to], {%w0, %w1, %w2, %w3};")
        yield from ("  add.u32 %i, %i, %threads;", "  bra TAKE;", "TAKEN:")


_AT_ONCE = 4
"""Pieces that a thread has under way while it copies."""


def _copied(label: str, source: str, target: str) -> Iterator[str]:
    """The block's part from one address to another."""
    yield from ("  mov.u32 %i, %j;", f"{label}:", "  setp.ge.u32 %p, %i, %last;", f"  @%p bra {label}_DONE;", "  mov.u32 %t, %i;")
    for place in range(_AT_ONCE):
        words = ", ".join([f"%w{4 * place + each}" for each in range(4)])
        yield from (
            f"  setp.lt.u32 %k{place}, %t, %last;",
            f"  mul.wide.u32 %a{place}, %t, 16;",
            f"  add.s64 %at, %a{place}, {source};",
        )
        yield from (f"  @%k{place} ld.global.cg.v4.u32 {{{words}}}, [%at];", "  add.u32 %t, %t, %threads;")
    for place in range(_AT_ONCE):
        words = ", ".join([f"%w{4 * place + each}" for each in range(4)])
        yield from (f"  add.s64 %at, %a{place}, {target};", f"  @%k{place} st.global.v4.u32 [%at], {{{words}}};")
    yield from ("  mov.u32 %i, %t;", f"  bra {label};", f"{label}_DONE:")


def _add(combine: Combine, words: int, *, first: bool, word: int = 0) -> Iterator[str]:
    """Adds the numbers in registers %w to the sums in %s; the first ones become the sums as they are, so that -0 stays."""
    for place in range(words):
        into = [f"%s{2 * place}", f"%s{2 * place + 1}"] if combine != "float32" else [f"%s{place}"]
        values = into if first else ["%v0", "%v1"][: len(into)]
        given = f"%w{word + place}"
        if combine == "bfloat16":
            yield from (f"  shl.b32 %t, {given}, 16;", f"  mov.b32 {values[0]}, %t;")
            yield from (f"  and.b32 %t, {given}, 0xffff0000;", f"  mov.b32 {values[1]}, %t;")
        elif combine == "float16":
            yield from (f"  mov.b32 {{%h0, %h1}}, {given};", f"  cvt.f32.f16 {values[0]}, %h0;", f"  cvt.f32.f16 {values[1]}, %h1;")
        else:
            yield f"  mov.b32 {values[0]}, {given};"
        if not first:
            yield from [f"  add.rn.f32 {sum_}, {sum_}, {value};" for sum_, value in zip(into, values, strict=True)]


def _rounded(combine: Combine, words: int) -> Iterator[str]:
    """The sums as words of the dtype, in %w0 and on."""
    for place in range(words):
        if combine == "float32":
            yield f"  mov.b32 %w{place}, %s{place};"
        else:
            short = "bf16x2" if combine == "bfloat16" else "f16x2"
            yield f"  cvt.rn.{short}.f32 %w{place}, %s{2 * place + 1}, %s{2 * place};"
