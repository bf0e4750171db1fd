"""Serves the bundle in a worker that does not import torch, like a server with only cgbundle and the standard library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .protocol import difference

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgbundle.cuda.driver import Context
    from cgbundle.tensors.tensor import Tensor

    from .protocol import Laps


class BundleModel:
    """A `worker.ServedModel`.  If the worker `stays` to time calls on a GPU, their inputs are on the GPU, with outputs="view".
    Otherwise inputs and outputs are in host memory, with outputs="copy"."""

    def __init__(self, job: dict[str, Any], laps: Laps, stays: bool) -> None:
        import cgbundle

        load = cgbundle.load
        laps.mark("import")
        self._context: Context | None = None
        self._free = 0
        if stays and job["target"] == "cuda":
            from cgbundle.cuda import driver

            self._context = driver.Context(0)
            with self._context:
                self._free = driver.free_bytes()
        self._loaded = load(job["bundle"], outputs="view" if self._context else "copy", threads=job.get("threads"))
        self._program = self._loaded[job["entry"]]
        laps.mark("load")
        self._keys = [tuple(key) for key in job["keys"]]
        self._resets = job["state"]
        self._gpu = job["target"] == "cuda"
        from cgbundle import self_test
        from cgbundle.format import file_names
        from cgbundle.format.file_names import entry_named
        from cgbundle.format.safetensors_files import Mapped

        self._spec = entry_named(self._loaded.manifest, job["entry"])
        self._self_test = Mapped(f"{job['bundle']}/{file_names.SELF_TEST}", file_names.SELF_TEST)
        self._inputs = [self_test.inputs_of(self._self_test, self._spec, key) for key in self._keys]
        laps.skip()

    def call(self, key: int) -> None:
        for output in self._program.replay(self._inputs[key]):
            _plain(output)

    def settle(self, key: int) -> None:
        """Makes at most one call.  The load has already prepared all recordings."""
        if key:
            self.call(key)

    def differs(self, key: int) -> dict[str, Any]:
        from cgbundle import self_test
        from cgbundle.format import file_names

        if self._resets:
            self._loaded.reset()
        int_key = self._keys[key]
        for _ in range(self._spec.self_test.calls):
            inputs = self_test.inputs_of(self._self_test, self._spec, int_key)
            outputs = [_plain(output) for output in self._program.replay(inputs)]
        tensors = [("output", index, value) for index, value in enumerate(outputs)]
        tensors += [("mutated", index, inputs[index]) for index in self._spec.mutated_inputs]
        names = [file_names.self_test_entry(int_key, kind, index, self._spec.name) for kind, index, _ in tensors]
        rows = zip(names, tensors, strict=True)
        return difference(self._self_test, [(name, value.dtype, value.tobytes()) for name, (_, _, value) in rows])

    def prepare(self, key: int) -> Callable[[], object]:
        inputs = (
            [self._upload(tensor, index) for index, tensor in enumerate(self._inputs[key])] if self._context else self._inputs[key]
        )
        from cgcompile.bundle.arguments import arranged

        args, kwargs = arranged(self._spec, inputs)
        program = self._program
        return lambda: program(*args, **kwargs)

    def synchronize(self) -> None:
        from cgbundle.cuda import driver

        assert self._context is not None
        with self._context:
            driver.check("cuCtxSynchronize", driver.cu.cuCtxSynchronize())

    def elapsed(self, call: Callable[[], object], count: int) -> float:
        """Measures between two events on the legacy default stream, which calls use if the tensors belong to no framework."""
        from cgbundle.cuda import driver
        from cgbundle.tensors.library import LEGACY_STREAM

        cu, check = driver.cu, driver.check
        assert self._context is not None
        with self._context:
            stream = LEGACY_STREAM
            start, end = [check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2)]
            check("cuEventRecord", cu.cuEventRecord(start, stream))
            for _ in range(count):
                call()
            check("cuEventRecord", cu.cuEventRecord(end, stream))
            check("cuEventSynchronize", cu.cuEventSynchronize(end))
            milliseconds = float(check("cuEventElapsedTime", cu.cuEventElapsedTime(start, end)))
            for event in (start, end):
                check("cuEventDestroy", cu.cuEventDestroy(event))
        return milliseconds / 1000

    def about(self) -> dict[str, Any]:
        if not self._gpu:
            return {}
        from cgbundle.cuda import driver

        context = self._context or driver.Context(0)
        facts: dict[str, Any] = {"gpu": context.name, "driver": driver.driver_version()}
        if self._context is not None:
            with context:
                facts["device"] = self._free - driver.free_bytes()
        return facts

    def _upload(self, value: Tensor, index: int) -> Tensor:
        """Copies input number `index` to the GPU, with the signature's axis order, so that the runtime need not rearrange it."""
        from cgbundle.cuda import driver
        from cgbundle.format.shapes import dense
        from cgbundle.tensors import tensor

        order = self._program.inputs[index].order
        arranged_tensor = tensor.empty(value.dtype, value.shape)
        arranged_tensor.strides = dense(value.shape, order)
        tensor.copy(arranged_tensor, value)
        size = max(1, len(value.tobytes()))
        assert self._context is not None
        with self._context:
            address = driver.check("cuMemAlloc", driver.cu.cuMemAlloc(size))
            driver.check("cuMemcpyHtoD", driver.cu.cuMemcpyHtoD(address, arranged_tensor.address, size))
        return tensor.Tensor(int(address), value.dtype, value.shape, arranged_tensor.strides, None, 0)


def _plain(output: Any) -> Tensor:
    """Returns the tensor of an output, which may be a view."""
    tensor: Tensor = getattr(output, "tensor", output)
    return tensor
