"""Serves the model with ONNX Runtime in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .protocol import Laps, difference

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxModel:
    """A `worker.ServedModel`.  On a GPU, inputs and outputs of timed calls are bound to memory of the GPU.  Kernels run on a stream
    of the session, so the GPU time is the time of complete calls."""

    def __init__(self, job: dict[str, Any], laps: Laps) -> None:
        import numpy
        import onnxruntime  # type: ignore[import-not-found, unused-ignore]

        laps.mark("import")
        provider = PROVIDERS[job["target"]]
        if provider not in onnxruntime.get_available_providers():
            raise SystemExit(f"the onnxruntime that is installed has no {provider}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = job.get("threads") or 0  # 0: the default
        self._session = onnxruntime.InferenceSession(job["onnx"], options, providers=[provider])
        laps.mark("load")
        from cgbundle.format import archive, file_names
        from cgbundle.format.file_names import entry_named
        from cgbundle.format.safetensors_files import Mapped
        from cgbundle.self_test import inputs_of

        self._job, self._gpu = job, job["target"] == "cuda"
        self._value = onnxruntime.OrtValue
        self._self_test = Mapped(f"{job['bundle']}/{file_names.SELF_TEST}", file_names.SELF_TEST)
        entry = entry_named(archive.read_manifest(job["bundle"]), job["entry"])
        self._dtypes = [output.dtype for output in entry.outputs]
        names = [node_arg.name for node_arg in self._session.get_inputs()]
        self._feeds = [
            dict(zip(names, [numpy.asarray(value) for value in inputs_of(self._self_test, entry, tuple(key))], strict=True))
            for key in job["keys"]
        ]
        laps.skip()

    def call(self, key: int) -> None:
        self._session.run(None, self._feeds[key])

    def settle(self, key: int) -> None:
        if key:
            self.call(key)

    def differs(self, key: int) -> dict[str, Any]:
        from cgbundle.format import file_names

        outputs = []
        for index, value in enumerate(self._session.run(None, self._feeds[key])):
            name = file_names.self_test_entry(self._job["keys"][key], "output", index, self._job["entry"])
            outputs.append((name, self._dtypes[index], value.tobytes()))
        return difference(self._self_test, outputs)

    def prepare(self, key: int) -> Callable[[], object]:
        session, input_feed = self._session, self._feeds[key]
        if not self._gpu:
            return lambda: session.run(None, input_feed)
        binding = session.io_binding()
        for name, value in input_feed.items():
            binding.bind_ortvalue_input(name, self._value.ortvalue_from_numpy(value, "cuda", 0))
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda")
        return lambda: session.run_with_iobinding(binding)

    def synchronize(self) -> None:
        """Does nothing: `run` of a session waits for the GPU."""

    def elapsed(self, call: Callable[[], object], count: int) -> float:
        """Measures with the CPU's clock: every call waits for the GPU."""
        from time import perf_counter

        start = perf_counter()
        for _ in range(count):
            call()
        return perf_counter() - start

    def about(self) -> dict[str, Any]:
        return {}
