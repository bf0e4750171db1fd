"""The self-test of a bundle: inputs and expected outputs per int_key, what the call leaves in written inputs, and in state.

Of state the self-test holds the elements that changed, as runs: a cache of a few hundred MB changes in a few rows per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cgbundle.format import file_names, safetensors, safetensors_writer
from cgbundle.format.schema import EntrySpec, IntKey, Manifest, Program, Value, Weight

from ..model.flat_module import PREFIX, run_eager
from ..model.pytree import dtype_name
from ..model.source import SELF_TEST_SEED, Source, all_keys, sample
from ..transforms.prepared import Prepared
from ..util.raw_bytes import changes, raw

Changed = tuple[int, torch.Tensor, torch.Tensor]
"""Position of a weight; pairs [first element, number of elements] in memory order, int64 [runs, 2]; these elements, [elements]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySelfTest:
    """The self-test at one int_key.  `written`: what inputs that the model writes to hold after the call, by their position."""

    key: IntKey
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    written: tuple[tuple[int, torch.Tensor], ...] = ()
    state: tuple[Changed, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedBytes:
    """A replay as bytes: tensors of the call, row-major, in its order; `written` holds the inputs that it writes to.

    `state`: what it changed in state, by the weights' names in the program: int64 pairs and elements as in `Changed`, as bytes.
    """

    inputs: tuple[bytes, ...]
    outputs: tuple[bytes, ...]
    written: tuple[bytes, ...]
    state: tuple[tuple[str, bytes, bytes], ...]


def eager_self_test(
    source: Source, prepared: Prepared, sizes: Mapping[str, tuple[int, ...]], weights: Sequence[Weight]
) -> list[KeySelfTest]:
    """What eager PyTorch gives at every int_key, on inputs that the export has not seen, from the model's first state.

    `weights`: the manifest's rows.
    """
    self_tests = []
    before = _first_state(prepared)
    rows = [row for row in weights if row.memory == "state"]
    for key in all_keys(sizes):
        inputs = sample(source, dict(zip(sizes, key, strict=True)), SELF_TEST_SEED).tensors
        ran = run_eager(prepared.reference, inputs, prepared.self_test_calls)
        written = tuple([(index, ran.inputs[index]) for index in prepared.written])
        # of the random numbers' state an entry that draws none knows nothing
        after = {row.name: flat(ran.state.get(row.name, before[row.name]), row) for row in rows}
        state = _changed(weights, before, after)
        self_tests.append(KeySelfTest(key=key, inputs=inputs, outputs=ran.outputs, written=written, state=state))
    return self_tests


def on_cpu(self_test: KeySelfTest) -> KeySelfTest:
    """The self-test with all tensors on the CPU, wherever the model ran."""
    written = tuple([(index, value.cpu()) for index, value in self_test.written])
    inputs, outputs = (tuple([value.cpu() for value in side]) for side in (self_test.inputs, self_test.outputs))
    return replace(self_test, inputs=inputs, outputs=outputs, written=written)


def replayed_self_test(
    programs: Sequence[Program], replays: Mapping[IntKey, ReplayedBytes], prepared: Prepared, weights: Sequence[Weight]
) -> list[KeySelfTest]:
    """What replays gave at every int_key, as tensors of the dtypes and shapes that the manifest's `programs` say."""
    self_tests = []
    for program in programs:
        replay = replays[program.key]
        sources, targets = [[program.values[index] for index in side] for side in (program.inputs, program.outputs)]
        changed = {name.removeprefix(PREFIX): (from_bytes(runs, "int64"), elements) for name, runs, elements in replay.state}
        state = [(index, row) for index, row in enumerate(weights) if row.memory == "state"]
        self_tests.append(
            KeySelfTest(
                key=program.key,
                inputs=_tensors(sources, replay.inputs),
                outputs=_tensors(targets, replay.outputs),
                written=tuple(zip(prepared.written, _tensors([sources[i] for i in prepared.written], replay.written), strict=True)),
                state=tuple(
                    [
                        (index, changed[row.name][0].reshape(-1, 2), from_bytes(changed[row.name][1], row.dtype))
                        for index, row in state
                    ]
                ),
            )
        )
    return self_tests


def state_after(self_test: KeySelfTest, prepared: Prepared, weights: Sequence[Weight]) -> list[tuple[Weight, torch.Tensor]]:
    """What the self-test says of state after its calls: the rows of memory state, each with all elements, flat, in memory order."""
    first = _first_state(prepared)
    states = []
    for index, runs, changed in self_test.state:
        row = weights[index]
        value = flat(first[row.name], row).clone()
        places = [torch.arange(begin, begin + count) for begin, count in runs.tolist()]
        if places:
            value[torch.cat(places)] = changed
        states.append((row, value))
    return states


def with_left(self_test: KeySelfTest, left: Sequence[torch.Tensor], prepared: Prepared, weights: Sequence[Weight]) -> KeySelfTest:
    """The self-test that expects what is `left` after its calls, as `self_test_tensors` has it; of state all elements in memory
    order."""
    count, written = len(self_test.outputs), len(self_test.written)
    rows = [row for row in weights if row.memory == "state"]
    first = _first_state(prepared)
    after = {row.name: value.cpu() for row, value in zip(rows, left[count + written :], strict=True)}
    return replace(
        self_test, outputs=tuple([value.cpu() for value in left[:count]]),
        written=tuple([(at, value.cpu()) for (at, _), value in zip(self_test.written, left[count : count + written], strict=True)]),
        state=_changed(weights, {row.name: first[row.name] for row in rows}, after),
    )  # fmt: skip


def write_self_test(path: Path, self_tests: Mapping[str, Sequence[KeySelfTest]]) -> None:
    """exam.safetensors: `8x128/input/0`, `8x128/output/0`, ..., `8x128/mutated/0`, `8x128/state/3`, `8x128/state-at/3` of entry
    `forward`, `decode/8x128/input/0`, ... of others.  `self_tests` by entry."""
    with open(path, "wb") as file:
        safetensors_writer.write(file, _tensors_by_name(self_tests))


def replace_self_tests(path: Path, self_tests: Mapping[str, Sequence[KeySelfTest]]) -> None:
    """Writes the self-tests of some int_keys over those in the file."""
    known = safetensors.Mapped(str(path), path.name)
    new = path.with_name(f"{path.name}.new")
    try:
        kept = {name: (row.dtype, row.shape, partial(known.data, name)) for name, row in known.entries.items()}
        with open(new, "wb") as file:
            safetensors_writer.write(file, {**kept, **_tensors_by_name(self_tests)})
    finally:
        known.close()
    new.replace(path)


def read_self_test(path: Path, manifest: Manifest, entry: EntrySpec, key: IntKey) -> KeySelfTest:
    """The self-test of an int_key of an entry from the file."""
    stored = safetensors.Mapped(str(path), path.name)
    try:

        def tensor(kind: str, index: int) -> torch.Tensor:
            name = file_names.self_test_entry(key, kind, index, entry.name)
            row = stored.entries[name]
            return from_bytes(bytes(stored.data(name)), row.dtype).reshape(row.shape)

        state = [index for index, row in enumerate(manifest.weights) if row.memory == "state"]
        return KeySelfTest(
            key=key,
            inputs=tuple([tensor("input", index) for index in range(len(entry.inputs))]),
            outputs=tuple([tensor("output", index) for index in range(len(entry.outputs))]),
            written=tuple([(index, tensor("mutated", index)) for index in entry.mutated_inputs]),
            state=tuple([(index, tensor("state-at", index), tensor("state", index)) for index in state]),
        )
    finally:
        stored.close()


def _tensors_by_name(self_tests: Mapping[str, Sequence[KeySelfTest]]) -> dict[str, safetensors_writer.Tensor]:
    """The tensors of self-tests by their names in the file."""
    tensors: dict[str, safetensors_writer.Tensor] = {}
    for entry, self_test in [(entry, self_test) for entry, entry_tests in self_tests.items() for self_test in entry_tests]:
        for kind, values in (
            ("input", enumerate(self_test.inputs)),
            ("output", enumerate(self_test.outputs)),
            ("mutated", self_test.written),
            ("state-at", [(index, runs) for index, runs, _ in self_test.state]),
            ("state", [(index, changed) for index, _, changed in self_test.state]),
        ):
            for index, value in values:
                tensors[file_names.self_test_entry(self_test.key, kind, index, entry)] = _stored(value)
    return tensors


def _first_state(prepared: Prepared) -> dict[str, torch.Tensor]:
    return {name.removeprefix(PREFIX): value for name, value in prepared.weights.items()}


def _changed(rows: Sequence[Weight], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> tuple[Changed, ...]:
    """The runs of every row of memory state.  `before`: what the weights held, by name; `after`: flat, in memory order."""
    return tuple(
        [(index, *changes(flat(before[row.name], row), after[row.name])) for index, row in enumerate(rows) if row.memory == "state"]
    )


def flat(value: torch.Tensor, row: Weight) -> torch.Tensor:
    """The elements in the order of memory that the row's strides say."""
    order = sorted(range(value.dim()), key=lambda axis: (-row.strides[axis], axis))
    return value.detach().cpu().permute(order).contiguous().reshape(-1)


def _tensors(values: Sequence[Value], data: Sequence[bytes]) -> tuple[torch.Tensor, ...]:
    return tuple([from_bytes(raw, value.dtype).reshape(value.shape) for value, raw in zip(values, data, strict=True)])


def from_bytes(data: bytes, dtype: str) -> torch.Tensor:
    """The elements of a dtype, flat."""
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def _stored(value: torch.Tensor) -> safetensors_writer.Tensor:
    return dtype_name(value.dtype), tuple(value.shape), lambda: raw(value).numpy()
