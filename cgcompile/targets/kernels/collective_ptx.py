"""The text of the kernels of `collectives`.  Pure.

Registers that a whole kernel keeps: %in and %out; %m0 and on, the exchange memories of the ranks, and %mine; %epoch, and the
%half that it uses; %dead, whether this thread waits no longer; %count, %stride, %senders and %rank as in `collectives.params`.
%j is where a thread begins.  All others are of the few lines that use them.
"""

from __future__ import annotations

from .exchange_memory import BLOCKS, FLAGS, LIMIT, LINE, STATUS, ExchangeMemory

HEAD = """.version 7.0
.target sm_80
.address_size 64
"""
"""PTX 7.0 is the first with bfloat16's rounding; ptxas turns it into code for any later architecture."""

_LOOKS = 1024
"""A thread that waits asks for the time whenever it has looked as often."""

_AT_ONCE = 4
"""Pieces that a thread has under way while it copies; while it adds up as many for each of two ranks, or fewer for more."""


def entry(world: int, name: str, body: str) -> str:
    """A kernel: what all begin and end with, around `body`."""
    long = ["input", "output", *[f"memory_{rank}" for rank in range(world)], "stride"]
    params = [f".param .u64 {each}" for each in long] + [f".param .u32 {each}" for each in ("count", "rank", "senders")]
    return f"""
.visible .entry {name}({", ".join(params)})
{{
  .reg .pred %p, %dead, %k<{_AT_ONCE}>;
  .reg .b16 %h<2>;
  .reg .b32 %block, %thread, %threads, %blocks, %epoch, %half, %rank, %count, %senders;
  .reg .b32 %i, %j, %step, %last, %looks, %t, %f, %g, %w<{8 * _AT_ONCE}>;
  .reg .b64 %in, %out, %mine, %stride, %to, %from, %at, %own, %bytes, %start, %now, %limit;
  .reg .b64 %m<{world}>, %a<{_AT_ONCE}>;
  .reg .f32 %s<8>, %v<2>;
{_begin(world)}{body}{_END}}}
"""


def packets(memory: ExchangeMemory, combine: str) -> str:
    """Every thread sends its pieces to all, and then waits for the same pieces of all."""
    world, size = memory.world, 2 * memory.packets
    slots = (memory.packets_at, memory.packets_half, size)
    sent = "".join([_send_packets(target, _slot(f"%m{target}", "%rank", "%to", slots)) for target in range(world)])
    taken = "".join([_take_packet(source, source * size, combine) for source in range(world)])
    stored = "" if combine == "side by side" else f"{_round(combine, 2)}{_STORE_SUM}"
    return f"""
  mad.lo.u32 %j, %block, %threads, %thread;
  mul.lo.u32 %step, %threads, %blocks;
{sent}{_OWN}{_slot("%mine", "0", "%from", slots)}
  mov.u32 %i, %j;
TAKE:
  setp.ge.u32 %p, %i, %count;
  @%p bra TAKEN;
  mul.wide.u32 %at, %i, 8;
{taken}{stored}
  add.u32 %i, %i, %step;
  bra TAKE;
TAKEN:
"""


def buffers(memory: ExchangeMemory, combine: str) -> str:
    """Every block sends its part to all, waits for the same part of all, and combines it."""
    world, slots = memory.world, (memory.buffers_at, memory.buffers_half, memory.buffers)
    sent = "".join([_send_buffer(target, _slot(f"%m{target}", "%rank", "%to", slots)) for target in range(world)])
    sources = "".join([_source(source, _slot("%mine", str(source), f"%m{source}", slots)) for source in range(world)])
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
{_OWN}{sources}{combined}"""


# --- what kernels have in common --------------------------------------------------------------------------------


def _begin(world: int) -> str:
    """The parameters, the epoch of this collective, and whether this rank has given up."""
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
{_choose("%mine", "%rank", world)}
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
"""The epochs of this block, and those of blocks that this launch is without, when all threads have read theirs."""


_OWN = """
  cvt.u64.u32 %own, %rank;
  mul.lo.s64 %own, %own, %stride;
  add.s64 %own, %own, %in;
"""
"""The part of the own input that this rank gets."""


def _choose(to: str, rank: str, world: int) -> str:
    """The exchange memory of the rank in a register."""
    rest = "".join([f"  setp.eq.u32 %p, {rank}, {each};\n  selp.b64 {to}, %m{each}, {to}, %p;\n" for each in range(1, world)])
    return f"  mov.b64 {to}, %m0;\n{rest}"


def _slot(base: str, source: str, to: str, slots: tuple[int, int, int]) -> str:
    """Where in a memory lies what a rank, a register or a number, sends in this epoch.  `slots`: the first one's offset, the bytes
    of a half, those of a slot."""
    first, half, size = slots
    lines = f"  cvt.u64.u32 {to}, %half;\n  mul.lo.s64 {to}, {to}, {half};\n  add.s64 {to}, {to}, {base};\n"
    if not source.startswith("%"):
        return f"{lines}  add.s64 {to}, {to}, {first + int(source) * size};\n"
    return f"{lines}  add.s64 {to}, {to}, {first};\n  mul.wide.u32 %bytes, {source}, {size};\n  add.s64 {to}, {to}, %bytes;\n"


def _wait(label: str, look: str, source: str) -> str:
    """Looks until predicate %p holds, or the time is up."""
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


_STORE_SUM = """  add.s64 %to, %out, %at;
  st.global.v2.u32 [%to], {%w0, %w1};
"""
"""Of a sum of packets."""


# --- packets ----------------------------------------------------------------------------------------------------


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
    """One piece of a rank, waited for and combined."""
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
{_wait(f"WAIT_{source}", look, str(source))}
  bra COMBINE_{source};
OWN_{source}:
  add.s64 %to, %own, %at;
  ld.global.v2.u32 {{%w0, %w1}}, [%to];
COMBINE_{source}:
{placed if combine == "side by side" else _add(combine, 2, first=source == 0)}"""


# --- buffers ----------------------------------------------------------------------------------------------------


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
    """Thread n tells rank n that the block's part is there, and waits until that one says so.  The fence is for what all threads of
    the block have written before the barrier."""
    look = f"""  ld.acquire.sys.global.u32 %f, [%a1+{FLAGS}];
  sub.u32 %g, %f, %epoch;
  setp.ge.s32 %p, %g, 0;"""
    return f"""
  setp.ge.u32 %p, %thread, {world};
  @%p bra HEARD;
  setp.eq.u32 %p, %thread, %rank;
  @%p bra HEARD;
{_choose("%to", "%thread", world)}
  mad.lo.u32 %t, %rank, {BLOCKS}, %block;
  mul.wide.u32 %at, %t, {LINE};
  add.s64 %a0, %to, %at;
  mad.lo.u32 %t, %thread, {BLOCKS}, %block;
  mul.wide.u32 %at, %t, {LINE};
  add.s64 %a1, %mine, %at;
  fence.acq_rel.sys;
  st.relaxed.sys.global.u32 [%a0+{FLAGS}], %epoch;
{_wait("WAIT", look, "%thread")}
HEARD:
"""


def _source(source: int, slot: str) -> str:
    """From now on %m of a rank is where its part lies."""
    return f"{slot}  setp.eq.u32 %p, %rank, {source};\n  selp.b64 %m{source}, %own, %m{source}, %p;\n"


def _placed(world: int) -> str:
    each = [
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
    return "  mul.wide.u32 %bytes, %count, 16;\n" + "".join(each)


def _summed(world: int, combine: str) -> str:
    at_once = max(1, 2 * _AT_ONCE // world)
    loads = stores = ""
    for piece in range(at_once):
        loads += f"  setp.lt.u32 %k{piece}, %t, %last;\n  mul.wide.u32 %a{piece}, %t, 16;\n  add.u32 %t, %t, %threads;\n"
        for each in range(world):
            words = _words(piece * world + each)
            loads += f"  add.s64 %at, %m{each}, %a{piece};\n  @%k{piece} ld.global.cg.v4.u32 {words}, [%at];\n"
            stores += _add(combine, 4, first=each == 0, word=4 * (piece * world + each))
        stores += f"{_round(combine, 4)}  add.s64 %at, %out, %a{piece};\n  @%k{piece} st.global.v4.u32 [%at], {_words(0)};\n"
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
    """The block's part from one address to another."""
    loads = [
        f"""
  setp.lt.u32 %k{each}, %t, %last;
  mul.wide.u32 %a{each}, %t, 16;
  add.s64 %at, %a{each}, {source};
  @%k{each} ld.global.cg.v4.u32 {_words(each)}, [%at];
  add.u32 %t, %t, %threads;"""
        for each in range(_AT_ONCE)
    ]
    stores = [
        f"\n  add.s64 %at, %a{each}, {target};\n  @%k{each} st.global.v4.u32 [%at], {_words(each)};" for each in range(_AT_ONCE)
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
    """The four registers of a piece."""
    return "{" + ", ".join([f"%w{4 * number + place}" for place in range(4)]) + "}"


# --- sums -------------------------------------------------------------------------------------------------------

_NUMBERS = {
    "bfloat16": """  shl.b32 %t, {word}, 16;
  mov.b32 {low}, %t;
  and.b32 %t, {word}, 0xffff0000;
  mov.b32 {high}, %t;
""",
    "float16": """  mov.b32 {{%h0, %h1}}, {word};
  cvt.f32.f16 {low}, %h0;
  cvt.f32.f16 {high}, %h1;
""",
    "float32": "  mov.b32 {low}, {word};\n",
}
"""The numbers in a word."""

_ROUNDED = {
    "bfloat16": "  cvt.rn.bf16x2.f32 {word}, {high}, {low};\n",
    "float16": "  cvt.rn.f16x2.f32 {word}, {high}, {low};\n",
    "float32": "  mov.b32 {word}, {low};\n",
}


def _add(combine: str, words: int, *, first: bool, word: int = 0) -> str:
    """Adds the numbers in registers %w to the sums in %s.  The first ones become the sums as they are, so that -0 stays."""
    lines = ""
    for place in range(words):
        sums = (f"%s{2 * place}", f"%s{2 * place + 1}")
        low, high = sums if first else ("%v0", "%v1")
        lines += _NUMBERS[combine].format(word=f"%w{word + place}", low=low, high=high)
        if not first:
            pairs = zip(sums[:1] if combine == "float32" else sums, ("%v0", "%v1"), strict=False)
            lines += "".join([f"  add.rn.f32 {total}, {total}, {value};\n" for total, value in pairs])
    return lines


def _round(combine: str, words: int) -> str:
    """The sums as words of the dtype, in %w0 and on."""
    line = _ROUNDED[combine]
    return "".join([line.format(word=f"%w{place}", low=f"%s{2 * place}", high=f"%s{2 * place + 1}") for place in range(words)])
