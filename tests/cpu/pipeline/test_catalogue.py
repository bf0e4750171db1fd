"""Error codes that no other test without a GPU raises: the recorder with a fake driver, broken folders and compilers.
tests/pure/test_errors.py checks that a test names every code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")

from cgcompile.capture.take import Range, Take  # noqa: E402
from cgcompile.capture.worker.address_map import AddressMap  # noqa: E402
from cgcompile.export.programs import Programs  # noqa: E402
from cgcompile.targets.cuda.elf import Cubin, Symbol  # noqa: E402

MEGA = 1 << 20
KEY = (4,)
CALLS = {KEY: ((torch.ones(2),), {})}


@pytest.fixture(scope="module")
def record() -> SimpleNamespace:
    """Imports the recorder's modules even without cuda-bindings; `drive` gives them a driver."""
    without = importlib.util.find_spec("cuda") is None
    if without:
        sys.modules["cuda"], sys.modules["cuda.bindings"] = ModuleType("cuda"), ModuleType("cuda.bindings")
        sys.modules["cuda.bindings"].driver = ModuleType("cuda.bindings.driver")  # type: ignore[attr-defined]
    names = (
        "worker.driver",
        "worker.cupti",
        "worker.graph_nodes",
        "worker.module_state",
        "worker.loaded_program",
        "processes",
        "recorder",
    )
    modules = {name.rpartition(".")[2]: importlib.import_module(f"cgcompile.capture.{name}") for name in names}
    namespace = SimpleNamespace(**modules)
    if without:
        del sys.modules["cuda"], sys.modules["cuda.bindings"]
    return namespace


class Calls:
    """A fake CUDA driver: calls without a replacement return 0."""

    CUgraph = CUmodule = CUdeviceptr = CUfunction_attribute = CUlaunchAttributeID = staticmethod(lambda value: value)

    def __init__(self, **calls: Callable[..., tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        return self.calls.get(name, lambda *_: (0, 0))


@pytest.fixture
def drive(record: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Returns a function that gives the recorder a driver with these calls."""

    def set_calls(**calls: Callable[..., tuple[Any, ...]]) -> SimpleNamespace:
        for module in (record.driver, record.graph_nodes, record.cupti, record.module_state):
            monkeypatch.setattr(module, "driver", Calls(**calls))
        return record

    return set_calls


def addresses() -> AddressMap:
    """Returns a map with 1 MiB of weights; the driver knows no other address."""
    return AddressMap([Range(kind="weights", start=MEGA, size=MEGA)], [], lambda address: None)


# --- the environment ----------------------------------------------------------------------------------------------


def test_cupti_is_nowhere(record: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.cupti.glob, "glob", lambda *_, **__: [])
    with raises("cupti-unavailable", match="found neither beside torch nor in the CUDA toolkit"):
        record.cupti.ImageLog()


def test_cupti_refuses(record: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.cupti, "_find_cupti", lambda: "libcupti.so")
    monkeypatch.setattr(record.cupti.ctypes, "CDLL", lambda _: SimpleNamespace(cuptiSubscribe=lambda *_: 39))
    with raises("cupti-unavailable", match="cuptiSubscribe failed with CUPTI error 39"):
        record.cupti.ImageLog()


def test_a_driver_call_fails(drive: Callable[..., SimpleNamespace]) -> None:
    record = drive(cuGetErrorName=lambda _: (0, b"CUDA_ERROR_ILLEGAL_ADDRESS"))
    with raises("driver-call-failed", match=r"failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        record.driver.check((700,))


def test_a_recorder_dies(record: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record.processes, "WORKER", "tests.helpers.dying_worker")
    messages: list[str] = []
    with (
        raises("recorder-failed", match=r"ended with status 9: No more memory \(log: .*record0.log\)"),
        record.processes.recorder_processes(tmp_path) as processes,
    ):
        processes.run([SimpleNamespace(role=record.processes.RECORD)], messages.append, 1)
    assert messages == ["record0: lowering"]


# --- lowering and capture -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes the functions of torch.cuda that a capture uses."""
    for name in ("Stream", "current_stream", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


def fails(error: Exception) -> Callable[[], Any]:
    """Returns a function that raises the error."""

    def call() -> Any:
        raise error

    return call


def test_the_compiler_fails(record: SimpleNamespace, gpu: None) -> None:
    class OutOfResources(Exception):
        """Has the name of Triton's exception."""

    where = "int_key (4,), inductor"
    with raises("lowering-failed", match=r"int_key \(4,\), inductor: cannot be lowered: a kernel needs more registers"):
        record.loaded_program.run_warm(fails(OutOfResources("out of resource: shared memory")), where, "inductor")
    with raises("lowering-failed", match=r"int_key \(4,\), inductor: cannot be lowered: ValueError: no such thing"):
        record.loaded_program.run_warm(fails(ValueError("no such thing\nand more")), where, "inductor")


def test_the_capture_breaks(record: SimpleNamespace, gpu: None) -> None:
    with raises("not-capturable", match=r"int_key \(4,\): RuntimeError: operation not permitted"):
        record.loaded_program.capture_call(fails(RuntimeError("operation not permitted when stream is capturing")), "int_key (4,)")


class Counter(torch.nn.Module):
    """A buffer, and a second one that shares a part of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.whole.sum() + self.part.sum()


@pytest.fixture
def exported() -> Any:
    program = torch.export.export(Counter(), (torch.ones(2),))
    return Programs(by_key={KEY: program}, dynamic=True)


def test_state_that_shares_memory_is_not_torn_apart(record: SimpleNamespace, exported: Any, tmp_path: Path) -> None:
    with raises("state-shared", match="whole"):
        record.recorder.record(exported, CALLS, self_test=CALLS, folder=tmp_path, state=("whole",))


def test_a_weight_that_a_replay_changes(
    record: SimpleNamespace, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: dict[str, Any] = {name: () for name in ("ranges", "graphs", "states", "self_tests")}
    take = Take(**nothing, images={}, mutated=("whole",), arch="", driver=0)
    monkeypatch.setattr(record.recorder, "fitting", lambda wanted, need: wanted)
    processes = SimpleNamespace(run=lambda *_: [take, take], end=lambda role: None, cache=tmp_path)
    with raises("weight-mutated", match="a replay changes whole"):
        record.recorder.record(exported, CALLS, self_test=CALLS, folder=tmp_path, level="eager", processes=processes)


def test_fresh_inputs_of_another_size(record: SimpleNamespace, exported: Any, tmp_path: Path) -> None:
    calls = {KEY: ((torch.ones(2),), {})}
    for fresh, message in (({}, "no fresh inputs"), ({KEY: ((torch.ones(3),), {})}, "other shapes than the example's")):
        with raises("inputs-unlike", match=message):
            record.recorder.record(exported, calls, folder=tmp_path, self_test=fresh)


# --- nodes that a graph may have ----------------------------------------------------------------------------------


def test_a_node_of_another_kind(drive: Callable[..., SimpleNamespace]) -> None:
    kind = SimpleNamespace(name="CU_GRAPH_NODE_TYPE_HOST")
    record = drive(cuGraphGetNodes=lambda _, count: (0, [7], 1), cuGraphNodeGetType=lambda _: (0, kind))
    with raises("node-refused", match=r"int_key \(4,\), node 0 is a node of kind HOST: it calls a function of the recording"):
        record.graph_nodes.walk(1, KEY, addresses(), {}, lambda _: frozenset())


def copy_params(**changes: Any) -> Callable[..., tuple[Any, ...]]:
    """Fakes cuGraphMemcpyNodeGetParams: a copy of 8 bytes within the weights."""
    device = SimpleNamespace(name="CU_MEMORYTYPE_DEVICE")
    sides = {f"{side}{field}": 0 for side in ("src", "dst") for field in ("Pitch", "Height", "XInBytes", "Y", "Z")}
    sides |= {"srcMemoryType": device, "dstMemoryType": device, "srcDevice": MEGA, "dstDevice": MEGA + 64}
    params = SimpleNamespace(**sides | {"WidthInBytes": 8, "Height": 1, "Depth": 1} | changes)
    return lambda _: (0, params)


def test_copies_of_the_host(drive: Callable[..., SimpleNamespace]) -> None:
    record = drive(cuGraphMemcpyNodeGetParams=copy_params(srcMemoryType=SimpleNamespace(name="CU_MEMORYTYPE_HOST")))
    with raises("copy-refused", match="node 3 copies from host memory"):
        record.graph_nodes._memcpy(0, "node 3", KEY, addresses())
    record = drive(cuGraphMemcpyNodeGetParams=copy_params(dstDevice=64 * MEGA))
    with raises("copy-refused", match="node 3 copies to 0x4000000, which is no live device memory"):
        record.graph_nodes._memcpy(0, "node 3", KEY, addresses())
    drive(cuGraphMemcpyNodeGetParams=copy_params())
    assert record.graph_nodes._memcpy(0, "node 3", KEY, addresses()).target.readings[0].offset == 64


def test_an_attribute_that_holds_an_address(drive: Callable[..., SimpleNamespace]) -> None:
    window = SimpleNamespace(accessPolicyWindow=SimpleNamespace(num_bytes=4096))
    record = drive(cuGraphKernelNodeGetAttribute=lambda _, number: (0, window) if number == 1 else (1, None))
    with raises("attribute-refused", match=r"node 3 \(add\) has launch attribute 1: an access policy window"):
        record.graph_nodes._attributes(0, None, 0, "node 3 (add)")


@pytest.mark.parametrize("extra", [0, 1])
def test_parameters_of_an_unknown_form(record: SimpleNamespace, extra: int) -> None:
    import ctypes

    words = (ctypes.c_size_t * 5)(3, 0, 4, 0, 0)
    params = SimpleNamespace(kernelParams=0, extra=ctypes.addressof(words) if extra else 0)
    with raises("parameters-unreadable", match="its `extra` list starts with" if extra else "neither kernelParams nor extra"):
        record.graph_nodes._parameters(params, ((0, 8),), "node 3 (add)")


# --- images and their variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("modules", "seen"), [({}, "no image was seen"), ({9: ("a", "b")}, "2 images were seen")])
def test_a_kernel_whose_image_is_not_known(drive: Callable[..., SimpleNamespace], modules: dict, seen: str) -> None:
    record = drive(
        cuGraphKernelNodeGetParams=lambda _: (0, SimpleNamespace(func=5)),
        cuFuncGetName=lambda _: (0, b"add"),
        cuFuncGetModule=lambda _: (0, 9),
    )
    with raises("image-unseen", match=rf"node 3 \(add\): {seen} for its module \(0x9\)"):
        record.graph_nodes._kernel(0, "node 3", KEY, addresses(), modules, lambda _: frozenset({"add"}), {}, 0)


def test_an_image_loaded_by_an_unknown_call(record: SimpleNamespace) -> None:
    log = object.__new__(record.cupti.ImageLog)
    log._loads = [record.cupti.Load(serial=0, call="cuNewLoader", kind="", handle=0, image="ab")]
    with raises("loader-unknown", match="inside cuNewLoader"):
        log.modules()


def test_a_variable_without_a_handle(drive: Callable[..., SimpleNamespace]) -> None:
    record = drive(cuModuleGetGlobal=lambda *_: (500, 0, 0))
    lost = Symbol(name="counter", section=".nv.global", value=0, local=True, initial=bytes(4))
    cubins = {"ab" * 32: Cubin(data=(lost,), functions=frozenset())}
    with raises("module-state-unreadable", match="the driver gives no address of 1 variables that kernels can write: counter"):
        record.module_state.find_module_state({"ab" * 32: 9}, cubins, addresses())


def test_a_variable_that_kernels_write_is_kept_though_it_looks_unchanged(
    drive: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = drive(cuModuleGetGlobal=lambda _, name: (0, {b"counter": 0x1000, b"text": 0x2000}.get(name, 0x3000), 4))
    monkeypatch.setattr(record.module_state, "allocation", lambda address: (address, 4))
    monkeypatch.setattr(record.module_state, "read_device", lambda at, size: bytes(4) if at == 0x1000 else b"text")
    counter = Symbol(name="counter", section=".nv.global", value=0, local=False, initial=bytes(4))
    text = Symbol(name="text", section=".nv.global.init", value=0, local=False, initial=b"text")
    empty = Symbol(name="_ZN3abc4cuda3std6ranges5__cpo4swapE", section=".nv.global", value=8, local=False, initial=bytes(1))
    cubins = {"ab" * 32: Cubin(data=(counter, text, empty), functions=frozenset())}
    (kept,) = record.module_state.find_module_state({"ab" * 32: 9}, cubins, addresses())
    assert kept.symbol == "counter"


# --- building -----------------------------------------------------------------------------------------------------


def test_an_output_whose_size_depends_on_data() -> None:
    from cgcompile.export.signature.signature import size_of

    class Ragged(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    program = torch.export.export(Ragged(), (torch.ones(2),))
    (output,) = [node for node in program.graph.nodes if node.op == "output"]
    size = output.args[0][0].meta["val"].shape[0]
    with raises("data-dependent-output", match="m.py: output 'y', axis 0: its size .* depends on data"):
        size_of(SimpleNamespace(label="m.py"), "y", 0, size, {})


def test_a_dtype_that_no_bundle_holds() -> None:
    from cgcompile.model.pytree import describe

    with raises("dtype-unsupported", match="cannot be held in a bundle|expected a dense tensor"):
        describe({"x": torch.ones(2, 2).to_sparse()}, "inputs", [])


def test_a_constant_that_is_no_weight(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgcompile.targets.cpu import layouts

    region = SimpleNamespace(constants=lambda: [("own_1", "module.folded")], close=lambda: None)
    monkeypatch.setattr(layouts, "HostRegion", lambda *_: region)
    (tmp_path / "model.so").touch()
    with raises("constant-unknown", match="the constant 'own_1' .*, not a weight of the model"):
        layouts.bind_constants(tmp_path / "model.so", exported.first, ())


def test_no_compiler(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgcompile.targets.cpu.aoti import compile_cpu

    monkeypatch.setattr("cgcompile.targets.requirements.compiler", lambda: "no-such-compiler")
    with raises("compiler-failed", match="no C\\+\\+ compiler: 'no-such-compiler'") as caught:
        compile_cpu(exported, tmp_path, lambda text: None)
    assert "g++" in caught.value.hint


def test_a_cache_that_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgcompile.util.content_cache import cache_folder

    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path))
    os.chmod(tmp_path, 0o777)
    with raises("cache-unsafe", match="others can write"):
        cache_folder()


def test_a_gpu_where_none_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from cgcompile.offline.lower.fake_device import fake_device
    from cgcompile.targets.architectures import ARCHES

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with raises("gpu-visible", match="already sees a GPU"), fake_device(ARCHES[0]):
        pass


def test_a_tensor_that_is_no_weight() -> None:
    from cgcompile.offline.decompose.retrace import _check

    module = torch.fx.symbolic_trace(torch.nn.ReLU())
    module.register_buffer("own", torch.ones(2))
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.get_attr("own")
    with raises("constant-unknown", match="contains constant tensors: own"):
        _check(module)
