"""The right answers of a golden bundle, from its self-test, and a check whether a changed bundle returns them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import cgbundle
from cgbundle.errors import CgbundleError
from cgbundle.format import archive, file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.self_test import inputs_of
from cgbundle.tensors.comparison import describe, difference
from cgbundle.tensors.tensor import Tensor, from_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Inputs and outputs of one int_key of an entry, as (dtype, shape, bytes), and the tolerance of each output."""

    entry: str
    inputs: tuple[tuple[str, tuple[int, ...], bytes], ...]
    outputs: tuple[tuple[str, tuple[int, ...], bytes], ...]
    bounds: tuple[float, ...]


class Answers:
    """The answers of the unchanged bundle for the inputs of its self-test."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases

    @classmethod
    def of(cls, path: str) -> Answers | None:
        """Returns the answers of the bundle at `path`; None if this machine cannot run it."""
        manifest = archive.read_manifest(path)
        try:
            cgbundle.load(path).close()
        except CgbundleError:
            return None
        self_test = Mapped(os.path.join(path, file_names.SELF_TEST), file_names.SELF_TEST)
        cases = []
        for entry_spec in manifest.entries:
            allowed = entry_spec.self_test.bounds
            for program in entry_spec.programs:
                inputs = [(t.dtype, tuple(t.shape), t.tobytes()) for t in inputs_of(self_test, entry_spec, program.key)]
                outputs = []
                for index in range(len(entry_spec.outputs)):
                    name = file_names.self_test_entry(program.key, "output", index, entry_spec.name)
                    entry = self_test.entries[name]
                    outputs.append((entry.dtype, tuple(entry.shape), bytes(self_test.data(name))))
                cases.append(Case(entry=entry_spec.name, inputs=tuple(inputs), outputs=tuple(outputs), bounds=allowed))
        self_test.close()
        return cls(cases)

    def judge(self, program: Any) -> str:
        """Returns "right", "refused", or "wrong: ..." with the first different answer. State is not compared: it depends on earlier
        calls."""
        verdict = "refused"
        stateful = program.manifest.random is not None or any(row.memory == "state" for row in program.manifest.weights)
        for case in self.cases:
            arguments = [from_bytes(data, dtype, shape) for dtype, shape, data in case.inputs]
            try:
                outputs = program[case.entry].replay(arguments)
            except CgbundleError:
                continue
            verdict = "right"
            for index, ((dtype, shape, data), output) in enumerate(zip(case.outputs, outputs, strict=False)):
                tensor = output if isinstance(output, Tensor) else output.tensor
                if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                    return f"wrong: output {index} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
                got = tensor.tobytes()
                if not stateful and got != data and not difference(dtype, data, got) <= case.bounds[index]:
                    return f"wrong: output {index}: {describe(dtype, shape, data, got)}"
        return verdict
