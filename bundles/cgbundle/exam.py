"""The stored exam: inputs and expected outputs of every int_key, and what a call leaves in inputs and in state.

It is replayed from the first state and compared with nothing but the standard library.
`python -m cgbundle.exam BUNDLE [KEY ...]` is the fresh process that a build proves itself in; it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .call.views import View
from .errors import BundleError, CgbundleError
from .format.archive import EXAM, exam_entry
from .format.safetensors import Mapped
from .format.schema import DTYPES, Manifest, Proof
from .loader import open_program
from .program import Program
from .tensors.tensor import Tensor, decode, from_bytes
from .validate.state import STATE

POISON = 0xFF
"""Fills memory that no replay may read before it writes it: NaN as a float, -1 as an integer."""

BITS = "bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one int_key gave: `error` as in `schema.Proof`; `exact` when every output, and every input that the call writes to, had
    the expected bits."""

    key: tuple[int, ...]
    error: float
    tolerance: float
    exact: bool

    def passed(self, compare: str) -> bool:
        """Whether the bundle keeps its promise for this key."""
        return self.exact if compare == BITS else self.error <= self.tolerance


def replay_exam(path: str, program: Program, keys: Sequence[tuple[int, ...]] | None = None) -> list[Result]:
    """Replays the exam of the loaded bundle for `keys` (default: all), in order.

    Raises weights-invalid when the exam is damaged.
    """
    exam = Mapped(os.path.join(path, EXAM), EXAM)
    try:
        return [_replay(exam, program, proof) for proof in program.manifest.exam.proofs if keys is None or proof.key in keys]
    finally:
        exam.close()


def name_key(manifest: Manifest, key: Sequence[int]) -> str:
    """`batch=8, seq=128`."""
    pairs = zip(manifest.dimensions, key, strict=True)
    return ", ".join(f"{dimension.name}={size}" for dimension, size in pairs) or "()"


def inputs_of(exam: Mapped, manifest: Manifest, key: tuple[int, ...]) -> list[Tensor]:
    """The exam's inputs for `key`, copied."""
    names = [exam_entry(key, "input", index) for index in range(len(manifest.inputs))]
    return [from_bytes(_data(exam, name), exam.entries[name].dtype, exam.entries[name].shape) for name in names]


def _replay(exam: Mapped, program: Program, proof: Proof) -> Result:
    manifest = program.manifest
    state = [index for index, weight in enumerate(manifest.weights) if weight.memory == STATE]
    if state:
        program.reset()
    if manifest.random >= 0:
        program.seed(0)
    first = {index: program.state_bytes(index) for index in state}
    for _ in range(manifest.exam.calls):
        program.poison(POISON)
        inputs = inputs_of(exam, manifest, proof.key)
        outputs = program.replay(inputs)
    found = [(exam_entry(proof.key, "output", index), output) for index, output in enumerate(outputs)]
    found += [(exam_entry(proof.key, "written", index), inputs[index]) for index in manifest.written]

    def compared() -> Iterator[tuple[str, bytes, bytes]]:  # one by one: state may be large
        for name, value in found:
            tensor = value.tensor if isinstance(value, View) else value
            yield tensor.dtype, bytes(_data(exam, name)), tensor.tobytes()
        for index, before in first.items():
            yield manifest.weights[index].dtype, _changed(exam, proof.key, index, before), program.state_bytes(index)

    errors = [relative_error(dtype, expected, got) for dtype, expected, got in compared() if expected != got]
    return Result(key=proof.key, error=max(errors, default=0.0), tolerance=proof.tolerance, exact=not errors)


def _changed(exam: Mapped, key: tuple[int, ...], index: int, first: bytes) -> bytes:
    """What a row of state has to hold after the call: its `first` bytes, but for the runs of elements that the exam names."""
    made, runs = bytearray(first), memoryview(_data(exam, exam_entry(key, "state-at", index))).cast("q")
    name = exam_entry(key, "state", index)
    elements, width, taken = _data(exam, name), DTYPES[exam.entries[name].dtype], 0
    for begin, count in zip(runs[::2], runs[1::2], strict=True):
        if begin < 0 or count < 0 or (begin + count) * width > len(made) or (taken + count) * width > len(elements):
            raise BundleError("weights-invalid", f"{EXAM}: tensor {name!r}: {count} elements from {begin} on do not fit")
        made[begin * width : (begin + count) * width] = elements[taken * width : (taken + count) * width]
        taken += count
    return bytes(made)


def _data(exam: Mapped, name: str) -> memoryview:
    if name not in exam.entries:
        raise BundleError("weights-invalid", f"{EXAM}: tensor {name!r} is missing")
    return exam.data(name)


def relative_error(dtype: str, expected: bytes, got: bytes) -> float:
    """The largest |got - expected| divided by the largest finite |expected|; infinite where one is NaN or infinite and the other
    is not the same."""
    if len(expected) != len(got):
        return float("inf")
    wanted, found = decode(dtype, expected), decode(dtype, got)
    largest = max((abs(x) for x in wanted if x - x == 0), default=0) or 1
    worst = 0.0
    for x, y in zip(wanted, found, strict=True):
        if x == y or (x != x and y != y):
            continue
        difference = abs(x - y)
        if not difference < float("inf"):
            return float("inf")
        worst = max(worst, difference / largest)
    return worst


def fresh(path: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Replays the exam in a fresh process that has the runtime alone: what `main` prints, with `exit_code`.  Where `keys`
    are given, one of them must have signed what it loads.

    {"results": [{"key", "error", "tolerance", "exact", "passed"}], "torch_imported"}, or {"error", "hint"}.
    """
    import subprocess

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "cgbundle.exam", path, *keys], env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        answer: dict[str, Any] = json.loads(lines[-1])
        return {**answer, "exit_code": done.returncode}
    how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with exit status {done.returncode}"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {"error": f"{path}: the process that replays the exam {how}", "hint": last, "exit_code": 1}


def main(arguments: Sequence[str]) -> int:
    """Loads the bundle, replays the exam, prints {"results": [...], "torch_imported": false} or {"error": ..., "hint": ...}."""
    path, *keys = arguments
    try:
        with open_program(path, check="full", poison=POISON, key=keys or None) as program:
            results = replay_exam(path, program)
            compare = program.manifest.exam.compare
            rows = [{**asdict(result), "passed": result.passed(compare)} for result in results]
    except CgbundleError as error:
        print(json.dumps({"error": str(error), "hint": error.hint, "kind": error.kind}))
        return error.exit_code
    print(json.dumps({"results": rows, "torch_imported": "torch" in sys.modules}))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
