"""The self-test of chains: calls that take outputs where they lie give what the same calls give of copies.

For every int_key that may take an output of another entry there are two runs, from the first state on.  Each calls the output's
entry, others at random, and then the taker, all with the inputs of the stored self-test.  In the first one the outputs are copied
in, in the second one they are taken where they lie, after what is not reserved for them was overwritten.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..call.backend import Backend
from ..call.locks import during
from ..format.file_names import donating_programs, self_test_entry
from ..format.safetensors import Mapped
from ..format.schema import DTYPES, Manifest, Value
from ..format.spans import span
from ..tensors.comparison import describe, difference
from ..tensors.self_test_tensors import is_exact, stored
from ..tensors.tensor import Tensor, copy, empty, from_bytes
from .state import State

BETWEEN = 3
"""Other calls between the one that gives an output and the one that takes it, at the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainResult:
    """What one int_key gave: `title` names the calls, `error` is the largest of its outputs, `text` says what differs, or ""."""

    title: str
    error: float
    passed: bool
    text: str


def replay_chains(manifest: Manifest, backend: Backend, self_test: Mapped, poison: int) -> list[ChainResult]:
    """A result for every int_key that may take outputs of another call, and every entry that gives some: of one of its int_keys.

    `poison`: the byte that overwrites what is not reserved.  Raises what calls raise.
    """
    takers: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for donation, source, target in donating_programs(manifest):
        takers.setdefault(target, {}).setdefault(source, []).append((donation.output, donation.input))
    calls, drawn, results = _Calls(manifest, backend, self_test, poison), random.Random(0), []
    for target, sources in takers.items():
        by_entry: dict[str, list[int]] = {}
        for source in sources:
            by_entry.setdefault(calls.rows[source][0].name, []).append(source)
        for numbers in by_entry.values():
            source = drawn.choice(numbers)
            results.append(calls.compared((source, sources[source]), target, drawn.random()))
    return results


class _Calls:
    """Calls of the programs of a loaded bundle, by number, over the memory of their device."""

    def __init__(self, manifest: Manifest, backend: Backend, self_test: Mapped, poison: int) -> None:
        self.self_test, self.backend, self.byte, self.state = self_test, backend, poison, State(manifest, backend)
        self.draws = manifest.random is not None
        self.rows = [(entry, program) for entry in manifest.entries for program in entry.programs]

    def compared(self, source: tuple[int, Sequence[tuple[int, int]]], target: int, seed: float) -> ChainResult:
        """The calls of program `source[0]` and of `target`, which takes the (output, input) pairs of `source[1]`."""
        expected, got = [self.run(source, target, random.Random(seed), chained=chained) for chained in (False, True)]
        entry, _ = self.rows[target]
        title = f"{self.name(source[0])} -> {self.name(target)}"
        worst, texts = 0.0, []
        for spec, bound, one, other in zip(entry.outputs, entry.self_test.bounds, expected, got, strict=False):
            error = 0.0 if one == other else difference(spec.dtype, one, other)
            exact = entry.self_test.compare == "bits" or (is_exact(spec.dtype) and not bound)
            if one != other and (exact or error > bound):
                texts.append(f"output {spec.name}: {describe(spec.dtype, (len(one) // DTYPES[spec.dtype],), one, other)}")
            worst = max(worst, error)
        return ChainResult(title=title, error=worst, passed=not texts, text="; ".join(texts))

    def run(
        self, source: tuple[int, Sequence[tuple[int, int]]], target: int, drawn: random.Random, *, chained: bool
    ) -> list[bytes]:
        """The outputs of the target."""
        number, pairs = source
        self.state.reset()
        if self.draws:
            self.state.seed(0)
        self.backend.poison(self.byte)
        source_results = self.call(number, {})
        copies = {output: self.read(number, output, source_results) for output, _ in pairs}
        source_entry = self.rows[number][0].name
        others = [index for index, (entry, _) in enumerate(self.rows) if entry.name != source_entry]
        for _ in range(drawn.randrange(BETWEEN + 1) if others else 0):
            self.call(drawn.choice(others), {})
        inputs: dict[int, Any] = {}
        for output, taken in pairs:
            inputs[taken] = source_results.addresses[output] if chained else copies[output]
        self.backend.poison(self.byte, reserved=not chained)
        results = self.call(target, inputs)
        return [self.read(target, output, results) for output in range(len(self.rows[target][0].outputs))]

    def call(self, number: int, inputs: dict[int, int | bytes]) -> Any:
        """Replays a program; what is not given, as an address or as bytes, is of the self-test."""
        entry, program = self.rows[number]
        backend = self.backend
        buffers, _ = backend.buffers(number)

        def replayed(stream: Any) -> Any:
            addresses = []
            for index, buffer in enumerate(buffers):
                data = inputs.get(index)
                if data is None:
                    data = bytes(stored(self.self_test, self_test_entry(program.key, "input", index, entry.name)))
                    data = _ordered(data, program.values[program.inputs[index]])
                if isinstance(data, bytes):
                    backend.write(buffer, data, stream)
                addresses.append(data if isinstance(data, int) else buffer)
            return backend.run(number, addresses, backend.device, stream)

        return during(backend, None, replayed)

    def read(self, number: int, output: int, results: Any) -> bytes:
        """The bytes of an output, from its first element to the last."""
        _, program = self.rows[number]
        size = span(program.values[program.outputs[output]])
        return during(self.backend, None, lambda stream: self.backend.read(results.addresses[output], size, stream))

    def name(self, number: int) -> str:
        """`decode batch=8`."""
        entry, program = self.rows[number]
        sizes = [f"{row.name}={size}" for row, size in zip(entry.dimensions, program.key, strict=True)]
        return f"{entry.name} {', '.join(sizes)}".strip()


def _ordered(data: bytes, value: Value) -> bytes:
    """A row-major tensor's bytes in the order of a value, which is dense."""
    source = from_bytes(data, value.dtype, value.shape)
    memory = empty("uint8", (len(data),))
    copy(Tensor(memory.address, value.dtype, value.shape, value.strides, memory), source)
    return memory.tobytes()
