"""The stored self-test: inputs and expected outputs of every int_key, and what a call leaves in inputs and in state.

It is replayed from the first state and compared with nothing but the standard library.
`python -m cgbundle.self_test BUNDLE [KEY ...]` is the fresh process that a build proves itself in; it prints one JSON object.  With
`--outputs FILE` before them it writes what a failed replay gave to that file, as exam.safetensors names it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from .call.outputs import View
from .errors import BundleError, CallError, CgbundleError
from .format import safetensors_writer
from .format.file_names import FORWARD, SELF_TEST, self_test_entry
from .format.safetensors import Mapped
from .format.schema import DTYPES, STATE, Dimension, EntrySpec, Proof
from .format.spans import span
from .format.variants import variant_name
from .loader import open_program
from .program import Program
from .tensors import condensed
from .tensors.comparison import describe, difference, nearest
from .tensors.self_test_tensors import ComparedTensor, is_exact, self_test_tensors, stored
from .tensors.self_test_tensors import inputs_of as inputs_of

if TYPE_CHECKING:
    from .program.chained_calls import ChainResult

POISON = 0xFF
"""Fills memory that no replay may read before it writes it: NaN as a float, -1 as an integer."""

BITS = "bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A tensor of the self-test beside what a replay gave: `error` as in `comparison.difference`, `bound` the
    largest that is allowed.

    `exact`: it had the expected bits.  `text` says what differs, "" where floats are allowed to.
    """

    title: str
    error: float
    bound: float
    exact: bool
    text: str

    def passed(self, compare: str) -> bool:
        """Whether the bundle keeps its promise for this tensor."""
        return self.exact if compare == BITS else self.error <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one int_key of an entry gave: outputs, mutated inputs and state, in the order of `self_test_tensors`."""

    entry: str
    key: tuple[int, ...]
    tensors: tuple[Compared, ...]

    @property
    def error(self) -> float:
        """The error that came nearest to its bound, or went furthest beyond."""
        return self._nearest()[0]

    @property
    def tolerance(self) -> float:
        """The bound of this error."""
        return self._nearest()[1]

    @property
    def exact(self) -> bool:
        """Whether all had the expected bits."""
        return all(tensor.exact for tensor in self.tensors)

    def passed(self, compare: str) -> bool:
        """Whether the bundle keeps its promise for this key."""
        return all(tensor.passed(compare) for tensor in self.tensors)

    def plain(self, compare: str) -> dict[str, Any]:
        """For JSON: {"entry", "key", "error", "tolerance", "exact", "passed", "tensors": [{"title", "error", "bound", "exact",
        "text", "passed"}]}."""
        fields = {"entry": self.entry, "key": self.key, "error": self.error, "tolerance": self.tolerance, "exact": self.exact}
        rows = [{**asdict(tensor), "passed": tensor.passed(compare)} for tensor in self.tensors]
        return {**fields, "passed": self.passed(compare), "tensors": rows}

    def _nearest(self) -> tuple[float, float]:
        return nearest([(tensor.error, tensor.bound) for tensor in self.tensors])


Outputs = dict[str, safetensors_writer.Tensor]
"""What replays gave, by the name of the self-test's tensor; `8x128/call-0/1` is output 1 of the first of several calls."""


def replay_self_test(
    program: Program, keys: Sequence[tuple[int, ...]] | None = None, failed: Outputs | None = None
) -> list[Result]:
    """Replays the self-test of the bundle that was loaded, whatever stands in its place by now, for `keys` (default: all), entry by
    entry, in order.  What int_keys that fail gave is added to `failed`.

    Raises weights-invalid when the self-test is damaged, and self-test-outdated for a program that was updated.
    """
    if program.updated:
        text = f"program {program.manifest.name!r} was updated, and its self-test is about the weights that were loaded"
        raise CallError("self-test-outdated", text)
    self_test = program.open_self_test()
    try:
        return [
            _replay(self_test, program, entry, proof, failed)
            for entry in program.manifest.entries
            for proof in entry.self_test.proofs
            if keys is None or proof.key in keys
        ]
    finally:
        self_test.close()


def replay_chained(program: Program) -> list[ChainResult]:
    """Calls that take outputs where they lie beside the same calls of copies: see `session.chained_calls`."""
    from .program.chained_calls import replay_chains  # few bundles have any

    self_test = program.open_self_test()
    try:
        return replay_chains(program.manifest, program._backend, self_test, POISON)
    finally:
        self_test.close()


def name_key(entry: EntrySpec, key: Sequence[int]) -> str:
    """`batch=8, seq=128`; of another entry than forward `decode: batch=8`."""
    return key_text(entry.dimensions, key, entry.name)


def key_text(dimensions: Sequence[Dimension], key: Sequence[int], entry: str = FORWARD) -> str:
    """`batch=8, seq=128`, `decode: batch=8`, and for no dimension `()` or `decode`."""
    sizes = ", ".join(f"{dimension.name}={size}" for dimension, size in zip(dimensions, key, strict=True))
    return sizes or "()" if entry == FORWARD else ": ".join(filter(None, [entry, sizes]))


def _replay(self_test: Mapped, program: Program, spec: EntrySpec, proof: Proof, failed: Outputs | None) -> Result:
    manifest, entry = program.manifest, program[spec.name]
    state = [index for index, weight in enumerate(manifest.weights) if weight.memory == STATE]
    if state:
        program.reset()
    if manifest.random is not None:
        program.seed(0)
    # a cache of zeros may be most of a GPU's memory: nothing of it is held here before it is compared
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
        if condensed.stand_in(self_test.entries, name):
            error, text = _beside_condensed(self_test, name, row, got, before)
            comparison = Compared(title=row.title, error=error, bound=bound, exact=not text, text="")
            return comparison if comparison.passed(spec.self_test.compare) else replace(comparison, text=text)
        expected = _changed(self_test, name, before) if row.kind == "state" else bytes(stored(self_test, name))
        exact = expected == got
        error = 0.0 if exact else difference(row.dtype, expected, got)
        comparison = Compared(title=row.title, error=error, bound=bound, exact=exact, text="")
        fine = exact or (comparison.passed(spec.self_test.compare) and not is_exact(row.dtype))
        return comparison if fine else replace(comparison, text=describe(row.dtype, shape, expected, got))

    pairs = zip(self_test_tensors(manifest, spec), spec.self_test.bounds, strict=True)
    result = Result(entry=spec.name, key=proof.key, tensors=tuple([compared(row, bound) for row, bound in pairs]))
    if failed is not None and not result.passed(spec.self_test.compare):
        failed.update(actual)
    return result


def _tensor(value: Any) -> Any:
    return value.tensor if isinstance(value, View) else value


def _changed(self_test: Mapped, name: str, first: bytes) -> bytes:
    """What a row of state has to hold after the call: its `first` bytes, but for the runs of elements that the self-test names."""
    expected, elements, taken = bytearray(first), stored(self_test, name), 0
    for begin, end in _runs(self_test, name, DTYPES[self_test.entries[name].dtype], len(first)):
        if taken + end - begin > len(elements):
            raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r}: has {len(elements)} bytes, and more were changed")
        expected[begin:end] = elements[taken : taken + end - begin]
        taken += end - begin
    return bytes(expected)


def _runs(self_test: Mapped, name: str, width: int, size: int) -> list[tuple[int, int]]:
    """The first byte of every run of a row of state that the call changes, and the one behind its last.  Raises weights-invalid."""
    before, _, index = name.rpartition("/state/")
    runs = memoryview(stored(self_test, f"{before}/state-at/{index}")).cast("q")
    spans = [(begin * width, (begin + count) * width) for begin, count in zip(runs[::2], runs[1::2], strict=True)]
    for begin, end in spans:
        if not 0 <= begin <= end <= size:
            raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r}: bytes {begin} to {end} do not fit")
    return spans


def _beside_condensed(self_test: Mapped, name: str, row: ComparedTensor, got: bytes, first: bytes) -> tuple[float, str]:
    """(error, text) of a tensor that is condensed.  Of state the self-test holds what the call changes; the rest has to be as it
    was `first`."""
    if row.kind == "state":
        runs, kept = _runs(self_test, name, DTYPES[row.dtype], len(got)), bytearray(got)
        for begin, end in runs:
            kept[begin:end] = first[begin:end]
        if kept != first:
            return math.inf, "elements that the call leaves as they are differ"
        got = b"".join([got[begin:end] for begin, end in runs])
    return condensed.compare_stored(self_test, name, row.dtype, got)


def fresh(path: str, keys: Sequence[str] = (), outputs: str = "") -> dict[str, Any]:
    """Replays the self-test in a fresh process that has the runtime alone: what `main` prints, with `exit_code`.  Where `keys`
    are given, one of them must have signed what it loads.  What failed replays gave is written to the file `outputs`, if named.

    {"results": [as `Result.plain`], "donations": [as `chained_calls.ChainResult`], "variant": the one that ran, "torch_imported"},
    or {"error", "hint", "code"}.
    """
    options = ("--outputs", outputs) if outputs else ()
    return run_fresh("cgbundle.self_test", [*options, path, *keys], path)


def run_fresh(module: str, arguments: Sequence[str], path: str) -> dict[str, Any]:
    """Runs a module of the runtime as a program in a fresh process: the object of JSON that is the last line it prints, with
    `exit_code`.  One that ends without is reported as an error of the bundle at `path`, with `error`, `hint` and `code`."""
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
    return {**_plain_error(error), "exit_code": error.exit_code}


def _plain_error(error: CgbundleError) -> dict[str, str]:
    return {"error": str(error), "hint": error.hint, "code": error.code}


def main(arguments: Sequence[str]) -> int:
    """Loads the bundle, replays the self-test and prints {"results": [...], "donations": [...], "variant": ..., "torch_imported":
    false} or {"error": ..., "hint": ..., "code": ...}."""
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
                    safetensors_writer.write(opened, failed)
            compare = {entry.name: entry.self_test.compare for entry in program.manifest.entries}
            rows = [result.plain(compare[result.entry]) for result in results]
            variant = variant_name(program.manifest.target)
            chains: list[dict[str, Any]] = []
            if program.manifest.donations:
                chains = [asdict(chain) for chain in replay_chained(program)]
    except CgbundleError as error:
        print(json.dumps(_plain_error(error)))
        return error.exit_code
    print(json.dumps({"results": rows, "donations": chains, "variant": variant, "torch_imported": "torch" in sys.modules}))
    return 0 if all(row["passed"] for row in (*rows, *chains)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
