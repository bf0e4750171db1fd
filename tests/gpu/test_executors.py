"""The CUDA backend on a GPU: a small handmade bundle, compiled with NVRTC."""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from cgbundle.cuda import driver, memory
from cgbundle.cuda.driver import Context, check, cu
from cgbundle.cuda.graph_executor import GraphExecutor
from cgbundle.cuda.kernels import Modules
from cgbundle.cuda.memory import Memories
from cgbundle.cuda.stream_executor import StreamExecutor
from cgbundle.errors import CgbundleError
from cgbundle.format.schema import Manifest
from cgbundle.format.table import Table
from cgbundle.program.opening import MODES
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Function, MemsetNode, Recording
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import ARENA_AT, FLOATS, KEYS, edge, expected, inputs, launch, relocations
from tests.helpers.drivers.cuda_calls import allocate, call, opened, run, to_host
from tests.helpers.raising import raises


def missing() -> str:
    """Returns why these tests cannot run here, or ""."""
    try:
        driver.require()
    except CgbundleError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no GPU: {missing()}")


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    """Keeps the context alive during these tests, so that its free memory can be compared."""
    device_context = Context(0)
    yield device_context
    device_context.release()


@pytest.fixture(scope="module")
def image(context: Context) -> bytes:
    """Compiles the source of `cuda_bundles` for this GPU."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

    def ask(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) == 2 else None

    program = ask(nvrtc.nvrtcCreateProgram(cuda_bundles.SOURCE.encode(), b"tiny.cu", 0, [], []))
    options = [f"--gpu-architecture={context.arch}".encode()]
    error = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(error):
        log = bytes(ask(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        pytest.fail(log.decode())
    cubin = bytes(ask(nvrtc.nvrtcGetCUBINSize(program)))
    ask(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


@pytest.fixture
def bundle(context: Context, image: bytes, tmp_path: Path) -> tuple[Manifest, Path]:
    folder = tmp_path / "tiny.cgb"
    return cuda_bundles.write(folder, image, arch=context.arch), folder


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [None, 0xFF, 0xA5])
def test_both_modes_replay_what_was_recorded(bundle: tuple[Manifest, Path], mode: str, poison: int | None) -> None:
    manifest, folder = bundle
    backend = opened(manifest, folder, mode=mode, poison=poison)
    try:
        for seed in range(3):
            for number, key in enumerate(KEYS):
                values = inputs(key, seed)
                assert call(backend, number, values) == expected(values)
                if poison is not None:
                    backend.poison(poison)
    finally:
        backend.close()


@pytest.mark.alone
def test_close_gives_every_byte_back(context: Context, bundle: tuple[Manifest, Path]) -> None:
    free = []
    for number in range(100):
        backend = opened(*bundle, mode=MODES[number % 2])
        values = inputs(KEYS[0], number)
        assert call(backend, 0, values) == expected(values)
        kept = backend.copy_out(run(backend, 1, [None])[0], 4 * KEYS[1] * FLOATS, None)
        backend.close()
        backend.close()
        kept.free()
        with context:
            check("cuCtxSynchronize", cu.cuCtxSynchronize())
            free.append(driver.free_bytes())
    print("\nfree bytes:", sorted(set(free)), "first rounds:", free[:6])
    assert len(set(free[10:])) == 1  # in the first rounds the driver allocates memory that it keeps


def test_the_last_share_ends_the_context(bundle: tuple[Manifest, Path]) -> None:
    """Runs in another process, because this one holds the context."""
    import pickle
    import subprocess
    import sys

    code = (
        "import pickle, sys\n"
        "from cgbundle.gpu.backend import CudaBackend\n"
        "from cgbundle.cuda.memory import Output\n"
        "from tests.helpers.bundles.archives import ArchiveOf\n"
        "manifest, folder = pickle.loads(sys.stdin.buffer.read())\n"
        "backend = CudaBackend(ArchiveOf(folder, manifest))\n"
        "with backend.locked(None) as stream: kept = Output(backend._context, 100, stream)\n"
        "from ctypes import CDLL, byref, c_int\n"
        "flags, state, asked = c_int(), c_int(), CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState\n"
        "active = lambda: asked(0, byref(flags), byref(state)) or state.value\n"
        "backend.close(); assert active() == 1; kept.free(); assert active() == 0\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('torch', 'numpy', 'triton', 'cuda')]\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(bundle), capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode()


def test_device_inputs_and_callers_streams(context: Context, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    values = inputs(KEYS[1])
    size = 4 * len(values)
    with context:
        mine = check("cuStreamCreate", cu.cuStreamCreate(1))
    for stream in (None, 0, int(mine), None, int(mine), 0):
        source = allocate(backend, size, stream)
        with backend.locked(stream) as handle:
            memory.copy(source.address, values.buffer_info()[0], size, handle, source_on_device=False)
        (output,) = run(backend, 1, [(source.address, True, size)], stream)
        kept = backend.copy_out(output, size, stream)
        backend.poison(0xFF)  # runs on another stream, but after the copy
        result = array("f", bytes(size))
        to_host(backend, result.buffer_info()[0], kept.address, size, stream)
        assert result == expected(values)
        source.free()
        kept.free()
    backend.close()
    with context:
        check("cuStreamDestroy", cu.cuStreamDestroy(mine))


def test_the_wrong_machine(bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    other = replace(manifest, target=replace(manifest.target, arch="sm_70"))
    with raises("wrong-architecture", match="the bundle is for sm_70, device 0"):
        opened(other, folder)
    other = replace(manifest, target=replace(manifest.target, driver=99000))
    with raises("driver-too-old", match=r"a driver for CUDA 99\.0"):
        opened(other, folder)
    with raises("wrong-machine", match="device 1000"):
        opened(manifest, folder, device=1000)


def test_too_little_memory(bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    memories = (*manifest.memories[:3], ("arena", 1 << 50))
    with raises("out-of-memory", match=r"memory arena: needs 1,125,899,906,842,624 bytes, the GPU has .* free"):
        opened(replace(manifest, memories=memories), folder)


def test_an_invalid_image(bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    for path in (folder / "kernels").iterdir():
        path.write_bytes(b"nonsense")
    with raises("driver-failed", match=r"cuModuleLoadData \(kernels/.*CUDA_ERROR"):
        opened(manifest, folder)


def test_parameters_are_those_of_the_image(bundle: tuple[Manifest, Path]) -> None:
    manifest, folder = bundle
    recording = tables.decode((folder / "graphs/g0-4.bin").read_bytes())
    functions = (replace(recording.functions[0], params=((0, 8), (8, 8))), recording.functions[1])
    (folder / "graphs/g0-4.bin").write_bytes(tables.encode(replace(recording, functions=functions)))
    with raises("table-invalid", match=r"add of .*the image takes parameters"):
        opened(manifest, folder)


# --- kinds of nodes that are not in the bundle ----------------------------------------------------------------


class Bench:
    """Runs recordings over an arena, in a mode."""

    def __init__(self, context: Context, manifest: Manifest, folder: Path, image: str) -> None:
        from contextlib import ExitStack

        self.context, self.image = context, image
        self.cleanup = ExitStack()
        self.memories = Memories({"arena": cuda_bundles.ARENA}, {}, self.cleanup, context.stream)
        self.modules = Modules(ArchiveOf(folder, manifest), (), self.memories)
        self.cleanup.callback(self.modules.close)

    def words(self, recording: Recording, mode: str, count: int) -> list[int]:
        """Returns the first `count` words of an arena after a run; before it, all bits of the arena are 1."""
        table = Table(tables.encode(recording), "bench")
        check_recording(table, {"arena": cuda_bundles.ARENA}, {self.image})
        bases, stream = self.memories.bases, self.context.stream
        executor: Any = (
            GraphExecutor(self.context, table, self.modules, bases, stream)
            if mode == "graph"
            else StreamExecutor(table, self.modules, bases)
        )
        self.memories.poison(0xFF, stream)
        executor.launch(stream)
        buffer = (ctypes.c_uint32 * count)()
        check("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(ctypes.addressof(buffer), bases[ARENA_AT], 4 * count, stream))
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
        executor.close()
        return list(buffer)


@pytest.fixture
def bench(context: Context, bundle: tuple[Manifest, Path]) -> Iterator[Bench]:
    manifest, folder = bundle
    (file,) = [file for file in manifest.files if file.path.startswith("kernels/")]
    with context:
        harness = Bench(context, manifest, folder, file.path.rpartition("/")[2])
        with harness.cleanup:
            yield harness


@pytest.mark.parametrize("mode", MODES)
def test_clusters_and_priorities(bench: Bench, mode: str) -> None:
    function = Function(image=bench.image, symbol="cluster_size", params=((0, 8),), attributes=())
    node = launch(0, bytes(8), relocations((0, ARENA_AT, 0)))
    pair = replace(node, attributes=((4, (2, 1, 1)), (8, (-1, 0, 0))))
    for kernel, size in ((node, 1), (pair, 2)):
        recording = Recording(key=(), functions=(function,), nodes=(kernel,), edges=())
        assert bench.words(recording, mode, 5) == [size] * 4 + [0xFFFFFFFF]


@pytest.mark.parametrize("mode", MODES)
def test_large_shared_memory(bench: Bench, mode: str) -> None:
    size = 96 << 10
    function = Function(image=bench.image, symbol="large_shared", params=((0, 8), (8, 4)), attributes=((8, size),))
    node = replace(launch(0, bytes(8) + pack("<I", size // 4), relocations((0, ARENA_AT, 0))), shared=size)
    recording = Recording(key=(), functions=(function,), nodes=(node,), edges=())
    assert bench.words(recording, mode, 1) == [size // 4 - 1]


@pytest.mark.parametrize("mode", MODES)
def test_programmatic_edges(bench: Bench, mode: str) -> None:
    function = Function(image=bench.image, symbol="add", params=cuda_bundles.ADD, attributes=())

    def add(out: int, a: int, b: int) -> Any:
        return launch(0, bytes(24) + pack("<i", 8), relocations((0, ARENA_AT, out), (8, ARENA_AT, a), (16, ARENA_AT, b)))

    ones = cuda_bundles.recording(bench.image, 4).nodes[3]
    nodes = (ones, add(512, 0, 0), add(0, 0, 0))
    recording = Recording(key=(), functions=(function,), nodes=nodes, edges=(edge(0, 1), edge(1, 2, from_port=1, type=1)))
    assert bench.words(recording, mode, 1) == [0x40000000]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", [1, 2, 4])
def test_memsets_of_every_element(bench: Bench, mode: str, element: int) -> None:
    flat = MemsetNode(
        target=cuda_bundles.address(ARENA_AT, 0),
        value=0xA1B2C3D4 % (1 << 8 * element),
        element=element,
        width=8 // element,
        height=1,
        pitch=0,
    )
    rows = replace(flat, width=4 // element, height=3, pitch=512)
    word = int.from_bytes(flat.value.to_bytes(element, "little") * (4 // element), "little")
    untouched = 0xFFFFFFFF
    for node, places in ((flat, (0, 1)), (rows, (0, 128, 256))):
        contents = bench.words(Recording(key=(), functions=(), nodes=(node,), edges=()), mode, 300)
        assert [index for index, value in enumerate(contents) if value != untouched] == list(places)
        assert {contents[index] for index in places} == {word}


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_recording(bench: Bench, mode: str) -> None:
    assert bench.words(Recording(key=(), functions=(), nodes=(), edges=()), mode, 1) == [0xFFFFFFFF]


def test_time_of_a_long_chain(bench: Bench, context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the time to build and launch 500 nodes; asserts only that a launch runs no Python per node."""
    function = Function(image=bench.image, symbol="add", params=cuda_bundles.ADD, attributes=())
    node = launch(0, bytes(24) + pack("<i", 8), relocations((0, ARENA_AT, 0), (8, ARENA_AT, 512), (16, ARENA_AT, 1024)))
    recording = Recording(key=(), functions=(function,), nodes=(node,) * 500, edges=tuple(edge(i, i + 1) for i in range(499)))
    data = tables.encode(recording)
    times = [time.perf_counter()]
    table = Table(data, "chain")
    times.append(time.perf_counter())
    check_recording(table, {"arena": cuda_bundles.ARENA}, {bench.image})
    times.append(time.perf_counter())
    executor = GraphExecutor(context, table, bench.modules, bench.memories.bases, context.stream)
    times.append(time.perf_counter())
    executor.launch(context.stream)
    check("cuStreamSynchronize", cu.cuStreamSynchronize(context.stream))
    start = time.perf_counter()
    for _ in range(20):
        executor.launch(context.stream)
    launched = (time.perf_counter() - start) / 20
    check("cuStreamSynchronize", cu.cuStreamSynchronize(context.stream))
    executor.close()
    with capsys.disabled():
        spans = zip(("table", "check", "build"), pairwise(times), strict=True)
        parts = [f"{name} {1e3 * (b - a):.2f} ms" for name, (a, b) in spans]
        print("\n500 nodes:", ", ".join(parts), f"launch {1e6 * launched:.0f} us")
