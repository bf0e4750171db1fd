"""Compares a bundle with eager PyTorch that selects the same indices where floats are nearly equal (near ties)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.file_names import self_test_tensors
from cgbundle.format.schema import EntrySpec, IntKey, Manifest, Weight

from ..model.flat_module import PREFIX, ProgramModule, traced_per_size
from ..transforms.error_bounds import ErrorBound, selection_floor
from ..transforms.near_ties.judge import Run, Seen, Verdict, judged_beside, near_ties
from ..transforms.prepared import Prepared
from ..util.raw_bytes import copied
from .self_test import KeySelfTest, flat, from_bytes, state_after


def verdict(
    prepared: Prepared, self_test: KeySelfTest, got: Seen, bounds: Sequence[ErrorBound], weights: Sequence[Weight]
) -> Verdict | None:
    """Compares the outputs `got` of a bundle with eager PyTorch that selects the same indices.  Returns None if no selection
    explains the outputs.  `self_test` has the results of eager PyTorch's own selections.  `weights` are the manifest's rows of
    weights.
    """
    expected = [
        *self_test.outputs,
        *[value for _, value in self_test.mutated],
        *[value for _, value in state_after(self_test, prepared, weights)],
    ]
    return judged_beside(_run(prepared, self_test, weights), expected, got, bounds, selection_floor(prepared, bounds))


def with_near_ties(
    current_bounds: Sequence[float],
    prepared: Prepared,
    self_tests: Sequence[KeySelfTest],
    bounds: Sequence[ErrorBound],
    weights: Sequence[Weight],
) -> tuple[float, ...]:
    """Returns the bounds of a bundle.  The bound of an index tensor is at least its largest share of near ties.  Another processor
    rounds differently and may select the other element of a near tie."""
    if not any(bound.exact and bound.rounded for bound in bounds):
        return tuple(current_bounds)
    floor = selection_floor(prepared, bounds)
    shares = [near_ties(_run(prepared, self_test, weights), floor) for self_test in self_tests]
    largest = [max(tensor_shares) for tensor_shares in zip(*shares, strict=True)]
    pairs = zip(current_bounds, largest, bounds, strict=True)
    return tuple([max(bound, share) if error_bound.exact else bound for bound, share, error_bound in pairs])


def _run(prepared: Prepared, self_test: KeySelfTest, weights: Sequence[Weight]) -> Run:
    """Returns a function that runs the self-test with the exported program in eager PyTorch."""
    module = ProgramModule([prepared.programs.at(self_test.key)])
    device = next((value.device for value in prepared.weights.values()), torch.device("cpu"))
    rows = [row for row in weights if row.memory == "state"]

    def content(row: Weight) -> torch.Tensor:
        """Returns the current contents of a state tensor, flat.  Clones integers with an operator, because GuidedRun records
        operators."""
        value = module.snapshot.buffers().get(row.name)
        if value is None:
            value = prepared.weights[PREFIX + row.name]  # state of another entry
        return flat(copied(value) if value.is_floating_point() else value.clone(), row)

    def run() -> Seen:
        calls = []
        try:
            for _ in range(prepared.self_test_calls):
                device_inputs = [value.to(device, copy=True) for value in self_test.inputs]
                with traced_per_size():
                    calls.append(tuple([value.clone() for value in module(*device_inputs)]))  # an output may be state
            state = [content(row) for row in rows]
        finally:
            module.snapshot.restore()
        return Seen(calls=tuple(calls), compared=(*calls[-1], *[device_inputs[index] for index in prepared.written], *state))

    return run


def read_outputs(path: Path, manifest: Manifest, entry: EntrySpec, key: IntKey) -> Seen | None:
    """Reads the results of a failed replay of an int_key from the file that `cgbundle.self_test` wrote.  Returns None if the replay
    did not fail."""
    if not path.exists():
        return None
    stored = safetensors_files.Mapped(str(path), path.name)
    try:

        def tensor(kind: str, index: int) -> torch.Tensor:
            name = file_names.self_test_entry(key, kind, index, entry.name)
            if name not in stored.entries:
                return torch.empty(0)  # the file has no floats of earlier calls
            row = stored.entries[name]
            return from_bytes(bytes(stored.data(name)), row.dtype).reshape(row.shape)

        compared = self_test_tensors(manifest, entry)
        if file_names.self_test_entry(key, compared[0].kind, compared[0].index, entry.name) not in stored.entries:
            return None
        earlier = [
            tuple([tensor(f"call-{call}", index) for index in range(len(entry.outputs))])
            for call in range(entry.self_test.calls - 1)
        ]
        compared_tensors = tuple([tensor(row.kind, row.index) for row in compared])
        return Seen(calls=(*earlier, compared_tensors[: len(entry.outputs)]), compared=compared_tensors)
    finally:
        stored.close()
