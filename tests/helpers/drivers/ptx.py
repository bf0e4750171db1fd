"""An interpreter of the PTX that the kernels of collectives use: several GPUs with weak memory order, run on the CPU.

A random generator chooses which thread runs its next instructions. The threads of a block see its stores at once. Other threads see
them later, in any order, except that stores to the same bytes keep their order. A vector store of 16 bytes arrives in two halves. A
fence, and the end of a block, publish all earlier stores of the block. Loads are never reordered.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import Any

U32, U64 = (1 << 32) - 1, (1 << 64) - 1

UNDEFINED = 0x7FC00BAD
"""Initial value of a register: a NaN as float32."""

Run = Callable[["Thread"], "int | None"]
"""One instruction. Returns the index of the next one, or None for the following one."""


@dataclass(eq=False)
class Memory:
    """Memory that all GPUs share, in regions by their start addresses."""

    regions: dict[int, bytearray] = field(default_factory=dict)

    def allocate(self, size: int) -> int:
        """Allocates `size` zero bytes and returns their address."""
        address = (max(self.regions, default=0) >> 32) + 1 << 32
        self.regions[address] = bytearray(size)
        return address

    def read(self, address: int, size: int) -> bytes:
        region, offset = self.regions[address >> 32 << 32], address & U32
        assert offset + size <= len(region), "outside of memory"
        return bytes(region[offset : offset + size])

    def write(self, address: int, data: bytes) -> None:
        region, offset = self.regions[address >> 32 << 32], address & U32
        assert offset + len(data) <= len(region), "outside of memory"
        region[offset : offset + len(data)] = data


@dataclass(eq=False)
class Block:
    """A thread block: its threads, its stores that other blocks do not see yet, and the number of threads at the barrier."""

    threads: list[Thread] = field(default_factory=list)
    stored: list[tuple[int, bytes]] = field(default_factory=list)
    waiting: int = 0

    def send(self, memory: Memory, which: int | None = None) -> None:
        """Publishes all stores. With `which`, publishes one store: the first one that overlaps store `which`."""
        if which is None:
            for address, data in self.stored:
                memory.write(address, data)
            self.stored.clear()
            return
        begin, end = self.stored[which][0], self.stored[which][0] + len(self.stored[which][1])
        same = [place for place, (at, data) in enumerate(self.stored[: which + 1]) if at < end and begin < at + len(data)]
        memory.write(*self.stored.pop(same[0]))


@dataclass(eq=False)
class Thread:
    """A thread. `registers` hold the bits of values of any type."""

    block: Block
    memory: Memory
    params: dict[str, int]
    registers: dict[str, int]
    place: int = 0
    state: str = "running"

    def load(self, address: int, size: int) -> bytes:
        buffer = bytearray(self.memory.read(address, size))
        for at, data in self.block.stored:
            for place, byte in enumerate(data, at - address):
                if 0 <= place < size:
                    buffer[place] = byte
        return bytes(buffer)

    def store(self, address: int, data: bytes) -> None:
        self.memory.read(address, len(data))
        assert address % len(data) == 0, "not aligned"
        self.block.stored += [(address + at, data[at : at + 8]) for at in range(0, len(data), 8)]


@dataclass(frozen=True)
class Launch:
    """A kernel launch on one GPU: its program, the number of blocks and threads, and its parameters."""

    program: Program
    blocks: int
    threads: int
    params: Sequence[int]


Program = tuple[tuple[str, ...], tuple[Run, ...]]
"""The parameter names of a kernel, and its instructions."""


def run(memory: Memory, gpus: Sequence[Sequence[Launch]], random: Random, clock: Callable[[], int] = lambda: 0) -> None:
    """Runs the launches of each GPU in order; GPUs run concurrently. Raises AssertionError if the launches do not end within 50,000
    steps."""
    pending = [list(launches) for launches in gpus]
    running: list[list[Block]] = [[] for _ in gpus]
    for _ in range(50_000):
        for gpu, launches in enumerate(pending):
            if not running[gpu] and launches:
                running[gpu] = _blocks(memory, launches.pop(0), clock)
        blocks = [(gpu, block) for gpu, resident in enumerate(running) for block in resident]
        if not blocks:
            return
        gpu, block = random.choice(blocks)
        for _ in range(random.randrange(2)):
            if block.stored:
                block.send(memory, random.randrange(len(block.stored)))
        ready = [thread for thread in block.threads if thread.state == "running"]
        if ready:
            thread = random.choice(ready)
            for _ in range(random.choice((1, 3, 30, 100))):
                if thread.state == "running":
                    _step(thread)
        if all(thread.state == "done" for thread in block.threads):
            block.send(memory)
            running[gpu].remove(block)
    raise AssertionError("it goes on for ever")


def _blocks(memory: Memory, launch: Launch, clock: Callable[[], int]) -> list[Block]:
    names, instructions = launch.program
    grid = []
    for number in range(launch.blocks):
        block = Block()
        for thread in range(launch.threads):
            special = {"%ctaid.x": number, "%tid.x": thread, "%ntid.x": launch.threads, "%nctaid.x": launch.blocks}
            block.threads.append(Thread(block, memory, dict(zip(names, launch.params, strict=True)), special))
            block.threads[-1].registers["instructions"] = instructions  # type: ignore[assignment]
            block.threads[-1].registers["clock"] = clock  # type: ignore[assignment]
        grid.append(block)
    return grid


def _step(thread: Thread) -> None:
    instructions: Any = thread.registers["instructions"]
    next_place = instructions[thread.place](thread)
    thread.place = thread.place + 1 if next_place is None else next_place


# --- parser ---------------------------------------------------------------------------------------------------------


def parse(text: str) -> dict[str, Program]:
    """Returns every kernel of a PTX module by its name."""
    kernels = {}
    for name, head, body in re.findall(r"\.visible \.entry (\w+)\((.*?)\)\s*\{(.*?)\n\}", text, re.DOTALL):
        names = tuple(re.findall(r"\.param \.\w+ (\w+)", head))
        kernels[name] = (names, tuple(_instructions(body)))
    return kernels


def _instructions(body: str) -> Iterator[Run]:
    lines, labels = [], {}
    for line in re.sub(r"\s*\.reg [^;]*;", "", body).splitlines():
        if line.strip().endswith(":"):
            labels[line.strip()[:-1]] = len(lines)
        elif line.strip():
            lines.append(line.strip().rstrip(";"))
    for line in lines:
        guard, _, rest = line.rpartition("} ") if line.startswith("@{") else ("", "", line)
        assert not guard
        condition, rest = rest.split(" ", 1) if rest.startswith("@") else ("", rest)
        instruction = _instruction(rest, labels)
        yield partial(_guarded, condition[1:], instruction) if condition else instruction


def _guarded(predicate: str, instruction: Run, thread: Thread) -> int | None:
    return instruction(thread) if thread.registers[predicate] else None


def _instruction(text: str, labels: dict[str, int]) -> Run:
    name, _, rest = text.partition(" ")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    kind, *parts = name.split(".")
    if kind == "bra":
        target = labels[operands[0]]
        return lambda thread: target
    if kind == "ret":
        return partial(_state, "done")
    if kind == "bar":
        return _barrier
    if kind == "fence":
        assert parts == ["acq_rel", "sys"]
        return lambda thread: thread.block.send(thread.memory)
    if kind == "ld":
        return (
            partial(_param, *operands) if "param" in parts else partial(_load, _width(parts), *_registers(operands[0]), operands[1])
        )
    if kind == "st":
        return partial(_store, _width(parts), operands[0], _registers(operands[1])[0])
    if kind == "mov" and operands[0].startswith("{"):
        return partial(_split, *_registers(operands[0]), operands[1])
    if kind == "setp":
        return partial(_compare, parts, *operands, *[""] * (4 - len(operands)))
    return partial(_assign, _ARITHMETIC[name], operands[0], operands[1:])


def _width(parts: Sequence[str]) -> int:
    return {"u32": 4, "u64": 8}[parts[-1]]


def _registers(text: str) -> tuple[list[str]]:
    return ([register.strip() for register in text.strip("{}").split(",")],)


def _value(thread: Thread, operand: str) -> int:
    if operand == "%globaltimer":
        clock: Any = thread.registers["clock"]
        return int(clock())
    return thread.registers.get(operand, UNDEFINED) if operand.startswith("%") else int(operand, 0)


def _address(thread: Thread, operand: str) -> int:
    register, _, offset = operand.strip("[]").partition("+")
    return thread.registers[register] + int(offset or 0)


def _state(state: str, thread: Thread) -> int:
    thread.state = state
    return thread.place


def _barrier(thread: Thread) -> int:
    block = thread.block
    block.waiting += 1
    thread.state = "waiting"
    if block.waiting == len(block.threads):
        block.waiting = 0
        for peer in block.threads:
            assert peer.state == "waiting", "a barrier that a thread never reaches"
            peer.state = "running"
    return thread.place + 1


def _param(register: str, name: str, thread: Thread) -> None:
    thread.registers[register] = thread.params[name.strip("[]")]


def _load(width: int, registers: list[str], address: str, thread: Thread) -> None:
    at = _address(thread, address)
    assert at % (width * len(registers)) == 0, "not aligned"
    data = thread.load(at, width * len(registers))
    for place, register in enumerate(registers):
        thread.registers[register] = int.from_bytes(data[width * place : width * (place + 1)], "little")


def _store(width: int, address: str, registers: list[str], thread: Thread) -> None:
    data = b"".join([_value(thread, register).to_bytes(width, "little") for register in registers])
    thread.store(_address(thread, address), data)


def _split(registers: list[str], source: str, thread: Thread) -> None:
    value = _value(thread, source)
    thread.registers[registers[0]], thread.registers[registers[1]] = value & 0xFFFF, value >> 16


def _compare(parts: list[str], target: str, first: str, second: str, third: str, thread: Thread) -> None:
    a, b = _value(thread, first), _value(thread, second)
    if parts[-1] == "s32":
        a, b = [value - (1 << 32) if value >> 31 else value for value in (a, b)]
    holds = {"eq": a == b, "ne": a != b, "ge": a >= b, "lt": a < b}[parts[0]]
    thread.registers[target] = int(holds and (not third or bool(thread.registers[third])))


def _assign(compute: Callable[..., int], target: str, operands: Sequence[str], thread: Thread) -> None:
    thread.registers[target] = compute(*[_value(thread, operand) for operand in operands])


# --- arithmetic -----------------------------------------------------------------------------------------------------


def float_of(bits: int) -> float:
    """Returns the float32 with these 32 bits."""
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def bits_of(value: float) -> int:
    """Rounds a number to float32 and returns its 32 bits."""
    return int.from_bytes(struct.pack("<f", value), "little")


def bfloat16(bits: int) -> int:
    """Rounds the float32 with these bits to bfloat16, ties to even, and returns its 16 bits."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@cache
def half_of(bits: int) -> int:
    """Rounds the float32 with these bits to float16, ties to even, and returns its 16 bits."""
    return int.from_bytes(struct.pack("<e", float_of(bits)), "little")


_ARITHMETIC: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mov.u32", "mov.u64", "mov.b32", "mov.b64", "cvta.to.global.u64", "cvt.u64.u32"), lambda a: a),
    "selp.b64": lambda a, b, p: a if p else b,
    "add.u32": lambda a, b: a + b & U32,
    "sub.u32": lambda a, b: a - b & U32,
    "add.s64": lambda a, b: a + b & U64,
    "sub.u64": lambda a, b: a - b & U64,
    "mul.lo.u32": lambda a, b: a * b & U32,
    "mul.lo.s64": lambda a, b: a * b & U64,
    "mul.wide.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c & U32,
    "div.u32": lambda a, b: a // b,
    "min.u32": min,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & U32,
    "shl.b64": lambda a, b: a << b & U64,
    "shr.u32": lambda a, b: a >> b,
    "add.rn.f32": lambda a, b: bits_of(float_of(a) + float_of(b)),
    "cvt.f32.f16": lambda a: bits_of(struct.unpack("<e", a.to_bytes(2, "little"))[0]),
    "cvt.rn.bf16x2.f32": lambda a, b: bfloat16(a) << 16 | bfloat16(b),
    "cvt.rn.f16x2.f32": lambda a, b: half_of(a) << 16 | half_of(b),
}
