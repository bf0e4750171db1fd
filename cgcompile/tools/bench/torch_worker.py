"""Serves the model with PyTorch in a worker: eager, torch.compile, or CUDA graphs captured by hand.

The model is the user's module, or the bundle's program as Python source (`export_program`).  The program starts faster than most
modules, because it does not initialize weights before they are loaded.

Private torch interfaces, in 2.11 and 2.13: `torch._dynamo.config.recompile_limit`, `torch._dynamo.utils.counters`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from .protocol import beside_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cgbundle.format.safetensors_files import Mapped

    from .protocol import Laps

WARMUPS = 3
"""Runs before a capture, as in PyTorch's documentation.

torch.compile with mode="reduce-overhead" also needs three calls of an int_key: a run, a recording, a first replay.
"""


class TorchModel:
    """A `worker.ServedModel`; `how` is eager, compile or manual."""

    def __init__(self, how: str, job: dict[str, Any], laps: Laps) -> None:
        torch.set_grad_enabled(False)
        laps.mark("import")
        if job.get("threads"):
            torch.set_num_threads(job["threads"])
        self._how, self._job = how, job
        self._device = job["target"]
        self._gpu = self._device == "cuda"
        self._free = torch.cuda.mem_get_info()[0] if self._gpu else 0
        self._model = UserModule(job) if job["model"] else ProgramModule(job)
        self._buffers = InitialBuffers(self._model.module) if job["state"] else None
        laps.mark("load")
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Any]] = {}
        self._pool: Any = None
        self._function = self._model.function
        if how == "compile":
            torch._dynamo.config.recompile_limit = max(8, len(job["keys"]) + 1)
            self._function = torch.compile(self._function, mode="reduce-overhead" if self._gpu else None, dynamic=False)
            laps.mark("import")  # importing the compiler
        self._self_test_inputs = [_inputs(job, key) for key in range(len(job["keys"]))]
        laps.skip()

    def call(self, key: int) -> None:
        inputs = self._fresh(key)
        for output in self._model.outputs(self._run(key, inputs)):
            output.to("cpu")

    def settle(self, key: int) -> None:
        needed = WARMUPS if self._how == "compile" and self._gpu else 1
        for _ in range(needed if key else needed - 1):
            if needed > 1:
                torch.compiler.cudagraph_mark_step_begin()
            self._run(key, self._fresh(key))
        self.synchronize()

    def differs(self, key: int) -> dict[str, Any]:
        if self._buffers is not None:
            self._buffers.restore()
        for _ in range(self._job["calls"]):
            inputs = self._fresh(key)
            tensors = [output.to("cpu", copy=True) for output in self._model.outputs(self._run(key, inputs))]
        positions = [("output", index) for index in range(self._job["outputs"])]
        positions += [("mutated", index) for index in self._job["mutated"]]
        tensors += [inputs[index].to("cpu") for index in self._job["mutated"]]
        if len(tensors) != len(positions):
            raise SystemExit(f"the model gave {len(tensors)} tensors, the bundle's self-test has {len(positions)}")
        rows = [self._beside_stored(key, *place, value) for place, value in zip(positions, tensors, strict=True)]
        return {"errors": [error for error, _ in rows], "exact": all(exact for _, exact in rows)}

    def _beside_stored(self, key: int, kind: str, index: int, got: torch.Tensor) -> tuple[float, bool]:
        from cgbundle.format import file_names
        from cgbundle.format.safetensors_files import Mapped

        from ...util.raw_bytes import raw
        from ...util.tolerance import compare

        name = file_names.self_test_entry(self._job["keys"][key], kind, index, self._job["entry"])
        with closing(Mapped(f"{self._job['bundle']}/{file_names.SELF_TEST}", file_names.SELF_TEST)) as self_test:
            if name not in self_test.entries:  # only hashes and samples are stored
                return beside_stored(self_test, name, str(got.dtype).removeprefix("torch."), bytes(raw(got).numpy()))
            expected = _tensor(self_test, name)
            return compare(expected, got).error, torch.equal(expected, got)

    def prepare(self, key: int) -> Callable[[], object]:
        inputs = self._fresh(key)
        if self._how == "manual":
            return lambda: self._run(key, inputs)
        function, (args, kwargs) = self._function, self._model.arrange(inputs)
        return lambda: function(*args, **kwargs)

    def synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def elapsed(self, call: Callable[[], object], count: int) -> float:
        """Measures between two events on the current stream."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def about(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self._gpu:
            facts["device"] = self._free - torch.cuda.mem_get_info()[0]
        if self._how == "compile":
            from torch._dynamo.utils import counters

            facts["hits"] = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        return facts

    def _fresh(self, key: int) -> list[torch.Tensor]:
        """Returns the inputs on the device, copied if the model writes to inputs."""
        return [tensor.to(self._device, copy=bool(self._job["mutated"])) for tensor in self._self_test_inputs[key]]

    def _run(self, key: int, inputs: Sequence[torch.Tensor]) -> Any:
        if self._how == "manual":
            if key not in self._graphs:
                self._capture(key, inputs)
            graph, static, outputs = self._graphs[key]
            for static_input, tensor in zip(static, inputs, strict=True):  # what a user of CUDA graphs does: copy, replay, read
                static_input.copy_(tensor)
            graph.replay()
            for index in self._job["mutated"]:
                inputs[index].copy_(static[index])
            return outputs
        args, kwargs = self._model.arrange(inputs)
        return self._function(*args, **kwargs)

    def _capture(self, key: int, inputs: Sequence[torch.Tensor]) -> None:
        static = [tensor.clone() for tensor in inputs]
        args, kwargs = self._model.arrange(static)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                self._function(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._function(*args, **kwargs)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, static, outputs
        if self._buffers is not None:
            self._buffers.restore()


# --- models -----------------------------------------------------------------------------------------------------------


class InitialBuffers:
    """Copies of a module's buffers, by name, because a call may replace a buffer by another tensor."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._values = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def restore(self) -> None:
        """Restores the values of the buffers."""
        for name, buffer in self._module.named_buffers():
            if name in self._values:
                buffer.copy_(self._values[name])


class ProgramModule:
    """The bundle's program as Python source, with the bundle's weights."""

    def __init__(self, job: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        program_module = _imported(job["program"])
        self.module: Any = program_module.Program()
        self.function: Any = self.module
        tensors = load_file(job["weights"], device=job["target"])
        for name, (dtype, shape) in program_module.ZEROS.items():
            tensors[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=job["target"])
        placed: dict[Any, Any] = {}
        for name, tensor, order, parameter in program_module.WEIGHTS:
            if (tensor, order, parameter) not in placed:
                value = tensors[tensor].permute(sorted(range(len(order)), key=order.__getitem__))
                placed[tensor, order, parameter] = torch.nn.Parameter(value, requires_grad=False) if parameter else value
            if parameter:
                self.module.register_parameter(name, placed[tensor, order, parameter])
            else:
                self.module.register_buffer(name, placed[tensor, order, parameter])

    def arrange(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns (args, kwargs) of a call."""
        return tensors, {}

    def outputs(self, result: Any) -> Sequence[torch.Tensor]:
        """Returns the result's tensors in the signature's order."""
        tensors: Sequence[torch.Tensor] = result
        return tensors


class UserModule:
    """The user's module with its own weights."""

    def __init__(self, job: dict[str, Any]) -> None:
        from ...model.load import load_source, put_into_eval
        from ...model.source import entry_method, written_method

        source = load_source(job["model"])
        if not job["train"]:
            put_into_eval(source)
        self.module: Any = source.model.to(job["target"])
        self.function = entry_method(self.module, job["entry"])
        self._written = written_method(self.module, job["entry"])
        from cgbundle.call.entry import builder

        self._call = [(name, builder(tree)) for name, tree in job["call"]]

    def arrange(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns (args, kwargs) of a call, positional where the module's forward() allows it."""
        import inspect

        remaining = {name: build(tensors) for name, build in self._call}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for position, (name, parameter) in enumerate(inspect.signature(self._written).parameters.items()):
            if parameter.kind is parameter.VAR_POSITIONAL:
                args += [remaining.pop(argument) for argument in list(remaining) if argument.startswith(f"{name}_")]
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs |= remaining
            elif name in remaining and parameter.kind is not parameter.KEYWORD_ONLY and not kwargs and len(args) == position:
                args.append(remaining.pop(name))
            elif name in remaining:
                kwargs[name] = remaining.pop(name)
        return args, kwargs

    def outputs(self, result: Any) -> Sequence[torch.Tensor]:
        """See `ProgramModule`."""
        from ...model.pytree import describe

        leaves: list[tuple[str, torch.Tensor]] = []
        describe(result, "", leaves)
        return [tensor for _, tensor in leaves]


def _inputs(job: dict[str, Any], key: int) -> list[torch.Tensor]:
    """Returns the self-test's inputs at an int_key, on the CPU, in the signature's layout."""
    from cgbundle.format import file_names  # imported here, after the measured start
    from cgbundle.format.safetensors_files import Mapped

    with closing(Mapped(f"{job['bundle']}/{file_names.SELF_TEST}", file_names.SELF_TEST)) as self_test:
        tensors = []
        for index, order in enumerate(job["orders"]):
            value = _tensor(self_test, file_names.self_test_entry(job["keys"][key], "input", index, job["entry"]))
            tensors.append(value.permute(order).contiguous().permute(sorted(range(len(order)), key=order.__getitem__)))
        return tensors


def _tensor(self_test: Mapped, name: str) -> torch.Tensor:
    row, data = self_test.entries[name], bytearray(self_test.data(name))
    dtype = getattr(torch, row.dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(row.shape) if data else torch.empty(row.shape, dtype=dtype)


def _imported(path: str) -> Any:
    """Imports a Python file and registers it in sys.modules, as torch.compile requires."""
    import sys
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("cgcompile_bench_program", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
