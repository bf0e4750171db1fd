"""ONNX Runtime in a measured process.

    python -m cgcompile.tools.bench.ort_child JOB

writes the bundle's program with its weights as `job["onnx"]`, for `child` to serve.  Needs the packages onnx and onnxscript.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from .clock import Laps

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class Onnx:
    """`child.Served` with a session of ONNX Runtime.  On a GPU calls are timed with inputs and outputs bound there; its kernels run
    on a stream of its own, so the GPU's time of a call is that of whole calls."""

    def __init__(self, job: dict[str, Any], laps: Laps) -> None:
        import numpy
        import onnxruntime  # type: ignore[import-not-found, unused-ignore]

        laps.mark("import")
        wanted = PROVIDERS[job["target"]]
        if wanted not in onnxruntime.get_available_providers():
            raise SystemExit(f"the onnxruntime that is installed has no {wanted}")
        self._session = onnxruntime.InferenceSession(job["onnx"], providers=[wanted])
        laps.mark("load")
        from cgbundle.exam import inputs_of
        from cgbundle.format import archive
        from cgbundle.format.safetensors import Mapped

        self._job, self._gpu = job, job["target"] == "cuda"
        self._value = onnxruntime.OrtValue
        self._exam = Mapped(f"{job['bundle']}/{archive.EXAM}", archive.EXAM)
        manifest = archive.read_manifest(job["bundle"])
        names = [each.name for each in self._session.get_inputs()]
        self._given = [
            dict(zip(names, [numpy.asarray(value) for value in inputs_of(self._exam, manifest, tuple(key))], strict=True))
            for key in job["keys"]
        ]
        laps.skip()

    def call(self, key: int) -> None:
        """See `child.Served`."""
        self._session.run(None, self._given[key])

    def settle(self, key: int) -> None:
        """See `child.Served`."""
        if key:
            self.call(key)

    def differs(self, key: int) -> dict[str, Any]:
        """As `cgbundle.exam` compares."""
        from cgbundle.exam import relative_error
        from cgbundle.format import archive

        worst, exact = 0.0, True
        for index, value in enumerate(self._session.run(None, self._given[key])):
            name = archive.exam_entry(self._job["keys"][key], "output", index)
            expected, got = bytes(self._exam.data(name)), value.tobytes()
            if expected != got:
                exact, worst = False, max(worst, relative_error(self._exam.entries[name].dtype, expected, got))
        return {"error": worst, "exact": exact}

    def prepare(self, key: int) -> Callable[[], object]:
        """See `child.Served`."""
        session, given = self._session, self._given[key]
        if not self._gpu:
            return lambda: session.run(None, given)
        binding = session.io_binding()
        for name, value in given.items():
            binding.bind_ortvalue_input(name, self._value.ortvalue_from_numpy(value, "cuda", 0))
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda")
        return lambda: session.run_with_iobinding(binding)

    def synchronize(self) -> None:
        """Nothing: a session's run has waited."""

    def elapsed(self, call: Callable[[], object], count: int) -> float:
        """By the CPU's clock: every call waits for the GPU."""
        from time import perf_counter

        start = perf_counter()
        for _ in range(count):
            call()
        return perf_counter() - start

    def about(self) -> dict[str, Any]:
        """See `child.Served`."""
        return {}


def main(path: str) -> None:
    """Exports the program, or says why not."""
    import warnings

    import torch

    from cgbundle.format import archive

    from .child import fail
    from .written import filled, load

    sys.excepthook = fail
    warnings.filterwarnings("ignore")
    with open(path) as file:
        job = json.load(file)
    manifest = archive.read_manifest(job["bundle"])
    program = filled(load(f"{job['bundle']}/{archive.PROGRAM}", "cpu"), {row.name: row for row in manifest.weights}, job["weights"])
    torch.onnx.export(program, f=job["onnx"], dynamo=True, verbose=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
