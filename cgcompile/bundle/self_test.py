"""The self-test of a bundle, per int_key: inputs, expected outputs, and expected contents of mutated inputs and state.

For state it holds only the elements that a call changes, as runs of consecutive elements.  For example, a call changes a few rows
of a cache of several 100 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import EntrySpec, IntKey, Manifest, Program, Value, Weight

from ..model.flat_module import PREFIX, run_eager
from ..model.pytree import dtype_name
from ..model.source import SELF_TEST_SEED
from ..transforms.prepared import Prepared
from ..util.raw_bytes import changes, raw

Changed = tuple[int, torch.Tensor, torch.Tensor]
"""Changes of a state tensor.  The first item is the position of its row in the manifest's weights.  The second is an int64 tensor
of shape [runs, 2], with the first element of each run and their number, in memory order.  The third has the new elements, flat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySelfTest:
    """The self-test at one int_key.  `mutated`: the position of each mutated input, and its expected contents after the calls."""

    key: IntKey
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    mutated: tuple[tuple[int, torch.Tensor], ...] = ()
    state: tuple[Changed, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedBytes:
    """The results of a replay as bytes, row-major, in the order of the signature.  `mutated`: the mutated inputs.  `state`: for
    each state tensor its name in the program, then the runs and the elements of `Changed` as bytes."""

    inputs: tuple[bytes, ...]
    outputs: tuple[bytes, ...]
    mutated: tuple[bytes, ...]
    state: tuple[tuple[str, bytes, bytes], ...]


def eager_self_test(prepared: Prepared, weights: Sequence[Weight]) -> list[KeySelfTest]:
    """Runs eager PyTorch at every int_key, from the model's initial state, on inputs that the export has not used.  `weights` are
    the manifest's rows of weights."""
    self_tests = []
    before = _initial_weights(prepared)
    rows = [row for row in weights if row.memory == "state"]
    for key in prepared.keys:
        inputs = prepared.exported.inputs_at(key, SELF_TEST_SEED)
        result = run_eager(prepared.reference, inputs, prepared.self_test_calls)
        mutated = tuple([(index, result.inputs[index]) for index in prepared.written])
        # an entry that draws no random numbers has no tensor for the random state, which then does not change
        after = {row.name: flat(result.state.get(row.name, before[row.name]), row) for row in rows}
        state = _changed(weights, before, after)
        self_tests.append(KeySelfTest(key=key, inputs=inputs, outputs=result.outputs, mutated=mutated, state=state))
    return self_tests


def on_cpu(self_test: KeySelfTest) -> KeySelfTest:
    """Moves all tensors of the self-test to the CPU."""
    mutated = tuple([(index, value.cpu()) for index, value in self_test.mutated])
    inputs, outputs = (tuple([value.cpu() for value in side]) for side in (self_test.inputs, self_test.outputs))
    return replace(self_test, inputs=inputs, outputs=outputs, mutated=mutated)


def replayed_self_test(
    programs: Sequence[Program], replays: Mapping[IntKey, ReplayedBytes], prepared: Prepared, weights: Sequence[Weight]
) -> list[KeySelfTest]:
    """Returns the self-tests with the results of replays.  `programs` of the manifest give dtypes and shapes."""
    self_tests = []
    for program in programs:
        replay = replays[program.key]
        inputs, outputs = [[program.values[index] for index in side] for side in (program.inputs, program.outputs)]
        changed = {name.removeprefix(PREFIX): (from_bytes(runs, "int64"), elements) for name, runs, elements in replay.state}
        state = [(index, row) for index, row in enumerate(weights) if row.memory == "state"]
        self_tests.append(
            KeySelfTest(
                key=program.key,
                inputs=_tensors(inputs, replay.inputs),
                outputs=_tensors(outputs, replay.outputs),
                mutated=tuple(zip(prepared.written, _tensors([inputs[i] for i in prepared.written], replay.mutated), strict=True)),
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
    """Returns the manifest's rows of state.  Each has all elements of the tensor after the calls: flat, in memory order."""
    first = _initial_weights(prepared)
    states = []
    for index, runs, changed in self_test.state:
        row = weights[index]
        value = flat(first[row.name], row).clone()
        places = [torch.arange(begin, begin + count) for begin, count in runs.tolist()]
        if places:
            value[torch.cat(places)] = changed
        states.append((row, value))
    return states


def with_expected(
    self_test: KeySelfTest, expected: Sequence[torch.Tensor], prepared: Prepared, weights: Sequence[Weight]
) -> KeySelfTest:
    """Returns the self-test with other expected values.  `expected`: outputs, mutated inputs and state, in the order of
    `self_test_tensors`.  State tensors have all elements, in memory order."""
    count, mutated = len(self_test.outputs), len(self_test.mutated)
    rows = [row for row in weights if row.memory == "state"]
    first = _initial_weights(prepared)
    after = {row.name: value.cpu() for row, value in zip(rows, expected[count + mutated :], strict=True)}
    return replace(
        self_test, outputs=tuple([value.cpu() for value in expected[:count]]),
        mutated=tuple([
            (at, value.cpu()) for (at, _), value in zip(self_test.mutated, expected[count : count + mutated], strict=True)
        ]),
        state=_changed(weights, {row.name: first[row.name] for row in rows}, after),
    )  # fmt: skip


def write_self_test(path: Path, self_tests: Mapping[str, Sequence[KeySelfTest]]) -> None:
    """Writes exam.safetensors.  `self_tests` maps entry names to self-tests.  Names for entry `forward`: `8x128/input/0`,
    `8x128/output/0`, `8x128/mutated/0`, `8x128/state/3`, `8x128/state-at/3`.  Names of other entries begin with the entry:
    `decode/8x128/input/0`."""
    with open(path, "wb") as file:
        safetensors_files.write(file, _tensors_by_name(self_tests))


def replace_self_tests(path: Path, self_tests: Mapping[str, Sequence[KeySelfTest]]) -> None:
    """Replaces the self-tests of some int_keys in the file."""
    stored = safetensors_files.Mapped(str(path), path.name)
    new = path.with_name(f"{path.name}.new")
    try:
        old_tensors = {name: (row.dtype, row.shape, partial(stored.data, name)) for name, row in stored.entries.items()}
        with open(new, "wb") as file:
            safetensors_files.write(file, {**old_tensors, **_tensors_by_name(self_tests)})
    finally:
        stored.close()
    new.replace(path)


def read_self_test(path: Path, manifest: Manifest, entry: EntrySpec, key: IntKey) -> KeySelfTest:
    """Reads the self-test of an int_key of an entry from the file."""
    stored = safetensors_files.Mapped(str(path), path.name)
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
            mutated=tuple([(index, tensor("mutated", index)) for index in entry.mutated_inputs]),
            state=tuple([(index, tensor("state-at", index), tensor("state", index)) for index in state]),
        )
    finally:
        stored.close()


def _tensors_by_name(self_tests: Mapping[str, Sequence[KeySelfTest]]) -> dict[str, safetensors_files.Tensor]:
    tensors: dict[str, safetensors_files.Tensor] = {}
    for entry, self_test in [(entry, self_test) for entry, entry_tests in self_tests.items() for self_test in entry_tests]:
        for kind, values in (
            ("input", enumerate(self_test.inputs)),
            ("output", enumerate(self_test.outputs)),
            ("mutated", self_test.mutated),
            ("state-at", [(index, runs) for index, runs, _ in self_test.state]),
            ("state", [(index, changed) for index, _, changed in self_test.state]),
        ):
            for index, value in values:
                tensors[file_names.self_test_entry(self_test.key, kind, index, entry)] = _stored(value)
    return tensors


def _initial_weights(prepared: Prepared) -> dict[str, torch.Tensor]:
    """Returns the weights of the export by their names in the manifest.  For state these are the initial values."""
    return {name.removeprefix(PREFIX): value for name, value in prepared.weights.items()}


def _changed(rows: Sequence[Weight], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> tuple[Changed, ...]:
    """Returns the changes of every tensor in memory `state`.  `before` and `after` have tensors by name; those of `after` are
    flat."""
    return tuple(
        [(index, *changes(flat(before[row.name], row), after[row.name])) for index, row in enumerate(rows) if row.memory == "state"]
    )


def flat(value: torch.Tensor, row: Weight) -> torch.Tensor:
    """Returns the elements on the CPU, flat, in the memory order of the row's strides."""
    order = sorted(range(value.dim()), key=lambda axis: (-row.strides[axis], axis))
    return value.detach().cpu().permute(order).contiguous().reshape(-1)


def _tensors(values: Sequence[Value], data: Sequence[bytes]) -> tuple[torch.Tensor, ...]:
    return tuple([from_bytes(raw, value.dtype).reshape(value.shape) for value, raw in zip(values, data, strict=True)])


def from_bytes(data: bytes, dtype: str) -> torch.Tensor:
    """Returns the elements of this dtype in `data` as a flat tensor."""
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def _stored(value: torch.Tensor) -> safetensors_files.Tensor:
    return dtype_name(value.dtype), tuple(value.shape), lambda: raw(value).numpy()
