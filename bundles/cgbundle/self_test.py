"""Replays the stored self-test from the initial state and compares with the standard library only. `python -m cgbundle.self_test
[--outputs FILE] BUNDLE [KEY ...]` is the fresh process that verifies a build: it prints one JSON object, and writes the results of
failed replays to FILE, named as in exam.safetensors."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any

from .call.locks import during
from .call.outputs import View
from .call.warmup import inputs_of as inputs_of
from .errors import BundleError, CallError, CgbundleError
from .format import safetensors_files
from .format.file_names import FORWARD, SELF_TEST, ComparedTensor, is_exact, self_test_entry, self_test_tensors
from .format.safetensors_files import Mapped, stored
from .format.schema import DTYPES, STATE, Dimension, EntrySpec, Proof
from .format.shapes import span
from .format.variants import variant_name
from .loader import open_program
from .program import Program
from .tensors import comparison
from .tensors.comparison import describe, difference, nearest
from .tensors.tensor import Tensor, copy, empty, from_bytes
from .validate.state import donating_programs

POISON = 0xFF  # fills memory that a replay must write before it reads it: NaN, or -1
BITS = "bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A compared tensor. `error` as in `comparison.difference`; `exact`: equal bits; `text`: the difference, "" for equal bits and
    floats that pass."""

    title: str
    error: float
    bound: float
    exact: bool
    text: str

    def passed(self, compare: str) -> bool:
        return self.exact if compare == BITS else self.error <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result for one int_key of an entry: outputs, mutated inputs and state, in the order of `self_test_tensors`."""

    entry: str
    key: tuple[int, ...]
    tensors: tuple[Compared, ...]

    @property
    def error(self) -> float:
        """The error that is largest in proportion to its bound."""
        return nearest([(tensor.error, tensor.bound) for tensor in self.tensors])[0]

    @property
    def tolerance(self) -> float:
        return nearest([(tensor.error, tensor.bound) for tensor in self.tensors])[1]

    @property
    def exact(self) -> bool:
        return all(tensor.exact for tensor in self.tensors)

    def passed(self, compare: str) -> bool:
        return all(tensor.passed(compare) for tensor in self.tensors)

    def plain(self, compare: str) -> dict[str, Any]:
        """For JSON: all fields, `passed`, and the tensors as objects."""
        fields = {name: getattr(self, name) for name in ("entry", "key", "error", "tolerance", "exact")}
        rows = [{**asdict(tensor), "passed": tensor.passed(compare)} for tensor in self.tensors]
        return {**fields, "passed": self.passed(compare), "tensors": rows}


Outputs = dict[str, safetensors_files.Tensor]
"""Results by their names in the self-test; `8x128/call-0/1` is output 1 of the first of several calls."""


def replay_self_test(
    program: Program, keys: Sequence[tuple[int, ...]] | None = None, failed: Outputs | None = None
) -> list[Result]:
    """Replays the loaded bundle's self-test for `keys` (default: all), in order. Adds the results of failed int_keys to `failed`.
    Raises weights-invalid, self-test-outdated for an updated program."""
    if program.updated:
        text = f"program {program.manifest.name!r} was updated, and its self-test is about the weights that were loaded"
        raise CallError("self-test-outdated", text)
    with closing(program.open_self_test()) as self_test:
        rows = [(entry, proof) for entry in program.manifest.entries for proof in entry.self_test.proofs]
        return [_replay(self_test, program, *row, failed) for row in rows if keys is None or row[1].key in keys]


def name_key(entry: EntrySpec, key: Sequence[int]) -> str:
    """Text: `batch=8, seq=128`; for another entry than forward `decode: batch=8`."""
    return key_text(entry.dimensions, key, entry.name)


def key_text(dimensions: Sequence[Dimension], key: Sequence[int], entry: str = FORWARD) -> str:
    """`batch=8, seq=128`, `decode: batch=8`; without dimensions `()` or `decode`."""
    sizes = ", ".join(f"{dimension.name}={size}" for dimension, size in zip(dimensions, key, strict=True))
    return sizes or "()" if entry == FORWARD else ": ".join(filter(None, [entry, sizes]))


def _replay(self_test: Mapped, program: Program, spec: EntrySpec, proof: Proof, failed: Outputs | None) -> Result:
    manifest, entry = program.manifest, program[spec.name]
    state = [index for index, weight in enumerate(manifest.weights) if weight.memory == STATE]
    if state:
        program.reset()
    if manifest.random is not None:
        program.seed(0)
    # initial state of zeros is not copied: a cache may take most of a GPU's memory
    first = {index: program.state_bytes(index) for index in state if not manifest.weights[index].zeros}
    actual: Outputs = {}
    for call in range(spec.self_test.calls):
        program.poison(POISON)
        inputs = inputs_of(self_test, spec, proof.key)
        outputs = entry.replay_whole(inputs) if spec.data_sizes else entry.replay(inputs)
        if failed is not None and call < spec.self_test.calls - 1:
            for index, output in enumerate(spec.outputs):
                if is_exact(output.dtype):
                    tensor = _tensor(outputs[index])
                    name = self_test_entry(proof.key, f"call-{call}", index, spec.name)
                    actual[name] = (output.dtype, tuple(tensor.shape), partial(bytes, tensor.tobytes()))
    by_kind: Mapping[str, Sequence[Any]] = {"output": outputs, "mutated": inputs}

    def compared(row: ComparedTensor, bound: float) -> Compared:  # one by one: state may be large
        name = self_test_entry(proof.key, row.kind, row.index, spec.name)
        before = b""
        if row.kind == "state":
            weight = manifest.weights[row.index]
            shape: tuple[int, ...] = (prod(weight.shape),)
            before = bytes(span(weight)) if weight.zeros else first[row.index]
            got = program.state_bytes(row.index)
        else:
            tensor = _tensor(by_kind[row.kind][row.index])
            shape, got = tensor.shape, tensor.tobytes()
        if failed is not None:
            actual[name] = (row.dtype, tuple(shape), partial(bytes, got))
        if comparison.stand_in(self_test.entries, name):
            error, text = _compare_condensed(self_test, name, row, got, before)
            row_result = Compared(title=row.title, error=error, bound=bound, exact=not text, text="")
            return row_result if row_result.passed(spec.self_test.compare) else replace(row_result, text=text)
        expected = _changed(self_test, name, before) if row.kind == "state" else bytes(stored(self_test, name))
        exact = expected == got
        error = 0.0 if exact else difference(row.dtype, expected, got)
        row_result = Compared(title=row.title, error=error, bound=bound, exact=exact, text="")
        fine = exact or (row_result.passed(spec.self_test.compare) and not is_exact(row.dtype))
        return row_result if fine else replace(row_result, text=describe(row.dtype, shape, expected, got))

    pairs = zip(self_test_tensors(manifest, spec), spec.self_test.bounds, strict=True)
    result = Result(entry=spec.name, key=proof.key, tensors=tuple([compared(row, bound) for row, bound in pairs]))
    if failed is not None and not result.passed(spec.self_test.compare):
        failed.update(actual)
    return result


def _tensor(value: Any) -> Any:
    return value.tensor if isinstance(value, View) else value


def _changed(self_test: Mapped, name: str, first: bytes) -> bytes:
    """State after the call: the initial bytes with the changed elements of the self-test."""
    expected, elements, done = bytearray(first), stored(self_test, name), 0
    for begin, end in _runs(self_test, name, DTYPES[self_test.entries[name].dtype], len(first)):
        if done + end - begin > len(elements):
            raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r}: has {len(elements)} bytes, and more were changed")
        expected[begin:end] = elements[done : done + end - begin]
        done += end - begin
    return bytes(expected)


def _runs(self_test: Mapped, name: str, width: int, size: int) -> list[tuple[int, int]]:
    """(begin, end) in bytes of every changed run of a state row. Raises weights-invalid."""
    before, _, index = name.rpartition("/state/")
    runs = memoryview(stored(self_test, f"{before}/state-at/{index}")).cast("q")
    spans = [(begin * width, (begin + count) * width) for begin, count in zip(runs[::2], runs[1::2], strict=True)]
    for begin, end in spans:
        if not 0 <= begin <= end <= size:
            raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r}: bytes {begin} to {end} do not fit")
    return spans


def _compare_condensed(self_test: Mapped, name: str, row: ComparedTensor, got: bytes, first: bytes) -> tuple[float, str]:
    """(error, text) of a condensed tensor. For state the self-test has the changed elements; the rest must equal `first`."""
    if row.kind == "state":
        runs, kept = _runs(self_test, name, DTYPES[row.dtype], len(got)), bytearray(got)
        for begin, end in runs:
            kept[begin:end] = first[begin:end]
        if kept != first:
            return math.inf, "elements that the call leaves as they are differ"
        got = b"".join([got[begin:end] for begin, end in runs])
    return comparison.compare_stored(self_test, name, row.dtype, got)


def fresh(path: str, keys: Sequence[str] = (), outputs: str = "") -> dict[str, Any]:
    """Replays the self-test in a fresh process. Returns what `main` prints, with `exit_code`. `keys`: one of them must have signed
    the bundle. `outputs`: file for the results of failed replays."""
    options = ("--outputs", outputs) if outputs else ()
    return run_fresh("cgbundle.self_test", [*options, path, *keys], path)


def run_fresh(module: str, arguments: Sequence[str], path: str) -> dict[str, Any]:
    """Runs a module of the runtime in a fresh process: the JSON object on its last line, with `exit_code`; without one, an error of
    the bundle at `path` ("error", "hint", "code")."""
    import subprocess

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        answer: dict[str, Any] = json.loads(lines[-1])
        return {**answer, "exit_code": done.returncode}
    how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with exit status {done.returncode}"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    text = f"{path}: the process that replays the self-test {how}" + (f": {last}" if last else "")
    error = BundleError("self-test-crashed", text)
    return {"error": str(error), "hint": error.hint, "code": error.code, "exit_code": error.exit_code}


def main(arguments: Sequence[str]) -> int:
    """Prints {"results": [...], "donations": [...], "variant": ..., "torch_imported": false} or {"error": ..., "hint": ..., "code":
    ...}."""
    file = ""
    if arguments[0] == "--outputs":
        file, arguments = arguments[1], arguments[2:]
    path, *keys = arguments
    failed: Outputs | None = {} if file else None
    try:
        with open_program(path, check="full", poison=POISON, key=keys or None) as program:
            results = replay_self_test(program, failed=failed)
            if failed:
                with open(file, "wb") as opened:
                    safetensors_files.write(opened, failed)
            compare = {entry.name: entry.self_test.compare for entry in program.manifest.entries}
            rows = [result.plain(compare[result.entry]) for result in results]
            variant = variant_name(program.manifest.target)
            chains = [asdict(chain) for chain in replay_chained(program)] if program.manifest.donations else []
    except CgbundleError as error:
        print(json.dumps({"error": str(error), "hint": error.hint, "code": error.code}))
        return error.exit_code
    print(json.dumps({"results": rows, "donations": chains, "variant": variant, "torch_imported": "torch" in sys.modules}))
    return 0 if all(row["passed"] for row in (*rows, *chains)) else 1


# --- calls that read donated outputs in place ----------------------------------------------------------------------------


BETWEEN = 3  # maximum number of calls between the source and the reader


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainResult:
    """The result for one int_key: `error` is the largest of its outputs, `text` describes the differences."""

    title: str
    error: float
    passed: bool
    text: str


def replay_chained(program: Program) -> list[ChainResult]:
    """Compares calls that read donated outputs in place with calls on copies, for every int_key that may read donated outputs and
    every entry that provides some (one of its int_keys). A run starts from the initial state, and calls the source, random other
    entries, then the reader, with inputs of the self-test. All other memory is overwritten before the reader."""
    sources_of: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for donation, source, target in donating_programs(program.manifest):
        sources_of.setdefault(target, {}).setdefault(source, []).append((donation.output, donation.input))
    with closing(program.open_self_test()) as self_test:
        calls, generator, results = _ChainedCalls(program, self_test), random.Random(0), []
        for target, sources in sources_of.items():
            by_entry: dict[str, list[int]] = {}
            for source in sources:
                by_entry.setdefault(calls.rows[source][0].name, []).append(source)
            for numbers in by_entry.values():
                source = generator.choice(numbers)
                results.append(calls.compared(source, sources[source], target, generator.random()))
        return results


class _ChainedCalls:
    """Calls of a loaded bundle's programs, by number. `pairs`: (output of the source, input of the target)."""

    def __init__(self, program: Program, self_test: Mapped) -> None:
        self.program, self.backend, self.self_test = program, program._backend, self_test
        self.rows = [(entry, row) for entry in program.manifest.entries for row in entry.programs]

    def compared(self, source: int, pairs: Sequence[tuple[int, int]], target: int, seed: float) -> ChainResult:
        expected, got = [self.run(source, pairs, target, random.Random(seed), chained=chained) for chained in (False, True)]
        entry, worst, texts, names = self.rows[target][0], 0.0, [], []
        for spec, bound, one, other in zip(entry.outputs, entry.self_test.bounds, expected, got, strict=False):
            error = 0.0 if one == other else difference(spec.dtype, one, other)
            exact = entry.self_test.compare == BITS or (is_exact(spec.dtype) and not bound)
            if one != other and (exact or error > bound):
                texts.append(f"output {spec.name}: {describe(spec.dtype, (len(one) // DTYPES[spec.dtype],), one, other)}")
            worst = max(worst, error)
        for entry, row in (self.rows[source], self.rows[target]):
            sizes = [f"{dimension.name}={size}" for dimension, size in zip(entry.dimensions, row.key, strict=True)]
            names.append(f"{entry.name} {', '.join(sizes)}".strip())
        return ChainResult(title=" -> ".join(names), error=worst, passed=not texts, text="; ".join(texts))

    def run(
        self, source: int, pairs: Sequence[tuple[int, int]], target: int, generator: random.Random, *, chained: bool
    ) -> list[bytes]:
        """The outputs of the target, which reads the source's outputs in place (`chained`) or as copies."""
        self.program.reset()
        if self.program.manifest.random is not None:
            self.program.seed(0)
        self.backend.poison(POISON)
        results = self.call(source, {})
        copies = {output: self.read(source, output, results) for output, _ in pairs}
        others = [index for index, (entry, _) in enumerate(self.rows) if entry.name != self.rows[source][0].name]
        for _ in range(generator.randrange(BETWEEN + 1) if others else 0):
            self.call(generator.choice(others), {})
        inputs = {index: results.addresses[output] if chained else copies[output] for output, index in pairs}
        self.backend.poison(POISON, reserved=not chained)
        results = self.call(target, inputs)
        return [self.read(target, output, results) for output in range(len(self.rows[target][0].outputs))]

    def call(self, number: int, inputs: Mapping[int, int | bytes]) -> Any:
        """Replays a program. `inputs`: addresses or bytes by position; the self-test has the other inputs."""
        (entry, program), backend = self.rows[number], self.backend

        def replayed(stream: Any) -> Any:
            addresses = []
            for index, buffer in enumerate(backend.buffers(number)[0]):
                data = inputs.get(index)
                if data is None:
                    name, value = self_test_entry(program.key, "input", index, entry.name), program.values[program.inputs[index]]
                    source = from_bytes(stored(self.self_test, name), value.dtype, value.shape)
                    memory = empty("uint8", (len(source.tobytes()),))  # dense, with the value's order of axes
                    copy(Tensor(memory.address, value.dtype, value.shape, value.strides, memory), source)
                    data = memory.tobytes()
                if isinstance(data, bytes):
                    backend.write(buffer, data, stream)
                addresses.append(data if isinstance(data, int) else buffer)
            return backend.run(number, addresses, backend.device, stream)

        return during(backend, None, replayed)

    def read(self, number: int, output: int, results: Any) -> bytes:
        _, program = self.rows[number]
        size = span(program.values[program.outputs[output]])
        return during(self.backend, None, lambda stream: self.backend.read(results.addresses[output], size, stream))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
