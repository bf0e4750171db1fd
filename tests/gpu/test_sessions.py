"""Sessions, state, static inputs and captures by the caller on a GPU equal eager PyTorch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.errors import SessionBusy  # noqa: E402
from tests.helpers.drivers.cuda_calls import planned  # noqa: E402

SIZES = (1, 4, 16)
WIDTH = 256
SPIN = 1000
"""Calls of every thread."""


class Cell(torch.nn.Module):
    """A recurrent cell: `memory` decays and adds the mean of the rows; `steps` counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.register_buffer("memory", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("steps", torch.arange(10, 14))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.tanh(x @ self.weight + self.memory)
        self.memory.mul_(0.5).add_(output.mean(0))
        self.steps.add_(1)
        return output


class Plain(torch.nn.Module):
    """A model without state: a graph of the caller may contain several calls of it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight) + x


def example(batch: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, WIDTH),)


def build(folder: Path, model: Any) -> Path:
    path = folder / f"{type(model).__name__.lower()}.cgb"
    return cgcompile.build(model, inputs, sizes=list(SIZES), out=path, target="cuda", record="capture").path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sessions")
    return {"cell": build(folder, Cell()), "plain": build(folder, Plain())}


@pytest.fixture(params=["graph", "stream"])
def cell(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Iterator[cgbundle.Program]:
    with cgbundle.load(paths["cell"], mode=request.param) as program:
        yield program


@pytest.fixture(params=["graph", "stream"])
def plain(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Iterator[cgbundle.Program]:
    with cgbundle.load(paths["plain"], mode=request.param) as program:
        yield program


def close(got: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got).cpu(), want.cpu(), rtol=1e-3, atol=1e-3)


def on_host(program: cgbundle.Program, name: str) -> torch.Tensor:
    return torch.from_dlpack(program.state[name])


# --- state ---------------------------------------------------------------------------------------------------------


def test_state_goes_from_call_to_call_and_key_to_key_as_in_eager(cell: cgbundle.Program) -> None:
    model = Cell().cuda()
    with torch.no_grad():
        for number, batch in enumerate((1, 16, 4, 4, 1)):
            x = example(batch, number)
            close(cell(x), model(x))
            close(on_host(cell, "memory"), model.memory)
            assert torch.equal(on_host(cell, "steps"), model.steps.cpu())
    cell.reset()
    assert torch.equal(on_host(cell, "memory"), Cell().memory) and cell.state["steps"].tolist() == [10, 11, 12, 13]
    for value in (torch.ones(WIDTH), torch.full((WIDTH,), 2.0, device="cuda"), torch.arange(2.0 * WIDTH, device="cuda")[::2]):
        cell.state["memory"] = value
        assert torch.equal(on_host(cell, "memory"), value.cpu())
    live = torch.from_dlpack(cell.state.view("memory"))
    live.zero_()
    torch.cuda.synchronize()
    assert not on_host(cell, "memory").any()


def test_calls_on_many_streams_keep_the_order_of_state(cell: cgbundle.Program) -> None:
    model, streams = Cell().cuda(), [torch.cuda.current_stream(), *[torch.cuda.Stream() for _ in range(3)]]
    rows = [example(4, number) for number in range(64)]
    torch.cuda.synchronize()
    outputs = []
    for number, x in enumerate(rows):
        with torch.cuda.stream(streams[number * 7 % 4]):
            outputs.append(cell(x))
    torch.cuda.synchronize()
    with torch.no_grad():
        for x, got in zip(rows, outputs, strict=True):
            close(got, model(x))


# --- sessions ------------------------------------------------------------------------------------------------------


def calls_of(seed: int) -> list[torch.Tensor]:
    return [example(SIZES[(seed + number) % 3], 1000 * seed + number % 50) for number in range(SPIN)]


def run(program: cgbundle.Program, calls: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [program(x) for x in calls]
    torch.cuda.current_stream().synchronize()
    return outputs


@pytest.mark.parametrize("own_streams", [False, True])
def test_eight_sessions_in_eight_threads_equal_one_after_the_other_bit_for_bit(paths: dict[str, Path], own_streams: bool) -> None:
    with cgbundle.load(paths["cell"]) as loaded:
        wanted = []
        for seed in range(8):
            loaded.reset()
            wanted.append((run(loaded, calls_of(seed)), on_host(loaded, "memory")))
        results: dict[int, Any] = {}
        ready = threading.Barrier(8)

        def work(seed: int, session: cgbundle.Program) -> None:
            calls = calls_of(seed)
            torch.cuda.synchronize()
            ready.wait(60)
            with torch.cuda.stream(torch.cuda.Stream() if own_streams else torch.cuda.default_stream()):
                results[seed] = (run(session, calls), on_host(session, "memory"))

        sessions = [loaded.session() for _ in range(8)]
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        for seed, (outputs, state) in enumerate(wanted):
            assert all(torch.equal(got, want) for got, want in zip(results[seed][0], outputs, strict=True)), seed
            assert torch.equal(results[seed][1], state), seed


@pytest.mark.alone
def test_the_memory_of_sessions_is_the_prediction_and_they_give_every_byte_back(paths: dict[str, Path]) -> None:
    with cgbundle.load(paths["cell"]) as loaded:
        sessions = [loaded.session() for _ in range(3)]
        torch.cuda.synchronize()
        sizes = loaded.session_memory
        assert (
            set(sizes) <= {"state", "inputs", "arena", "host", "code"} and sizes["state"] == dict(loaded.manifest.memories)["state"]
        )
        for session in sessions:
            assert session._backend._memories.sizes.items() <= sizes.items()
        free, _ = torch.cuda.mem_get_info()
        more = [loaded.session() for _ in range(8)]
        taken = free - torch.cuda.mem_get_info()[0]
        graphs = 8 * len(SIZES) * (1 << 20)  # room for the executable graphs and streams of the driver
        assert taken <= 8 * planned(sizes) + graphs
        for session in more:
            session.close()
        del session
        gc.collect()
        assert torch.cuda.mem_get_info()[0] >= free - graphs


def test_two_threads_in_one_session_raise(cell: cgbundle.Program) -> None:
    session, errors = cell.session(), []

    def work() -> None:
        x = example(4)
        for _ in range(20 * SPIN):
            try:
                session(x)
            except SessionBusy as error:
                errors.append(error)
            if errors:
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors
    session.reset()
    with torch.no_grad():
        close(session(example(4)), Cell().cuda()(example(4)))


# --- static inputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", SIZES)
def test_a_call_with_the_static_buffers_copies_nothing_in(plain: cgbundle.Program, batch: int) -> None:
    with plain.session() as session:
        for program in (plain, session):
            x = torch.from_dlpack(program.buffers((batch,))[0])
            assert x.is_cuda and x.is_contiguous() and x.data_ptr() == program.buffers((batch,))[0].address
            x.copy_(example(batch, 3))
            program(x)  # the first call is not on the fast path
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                output = program(x)
                torch.cuda.synchronize()
            with torch.no_grad():
                close(output, Plain().cuda()(example(batch, 3)))
            into = [event.name for event in profile.events() if "Memcpy DtoD" in event.name]
            fresh = example(batch, 3)
            odd = torch.empty(fresh.nbytes + 16, dtype=torch.uint8, device="cuda")[16:].view(fresh.dtype).view(fresh.shape)
            odd.copy_(fresh)  # a misaligned input must be copied before a launch reads it; an aligned one is not copied
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                program(odd)
                torch.cuda.synchronize()
            assert len(into) < len([event.name for event in profile.events() if "Memcpy DtoD" in event.name])


# --- captures by the caller ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["copy", "view"])
@pytest.mark.parametrize("batch", [4, 3])
@pytest.mark.parametrize("before", ["none", "default", "side"])
def test_a_call_joins_a_graph_that_the_caller_captures(paths: dict[str, Path], outputs: str, batch: int, before: str) -> None:
    model = Plain().cuda()
    with cgbundle.load(paths["plain"], outputs=outputs) as plain, torch.no_grad():
        x = example(batch)
        side = torch.cuda.Stream()
        if before == "default":
            plain(x)
        if before == "side":
            with torch.cuda.stream(side):
                plain(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side if before == "side" else None):
            doubled = x * 2
            output = plain(doubled)
            total = (output if outputs == "copy" else output.tensor) + 1
        for seed in range(3):
            x.copy_(example(batch, seed))
            graph.replay()
            close(total, model(example(batch, seed) * 2) + 1)
        close(getattr(plain(x), "tensor", plain(x)) if outputs == "copy" else plain(x).tensor, model(x))
        torch.cuda.synchronize()
        del graph


def test_state_moves_on_with_every_launch_of_the_callers_graph(cell: cgbundle.Program) -> None:
    model, x = Cell().cuda(), example(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = cell(x)
        second = cell(first)
    assert cell.state["steps"].tolist() == [10, 11, 12, 13], "captured, and not run"
    with torch.no_grad():
        for seed in range(3):
            x.copy_(example(4, seed))
            graph.replay()
            one = model(x)
            close(first, one)
            close(second, model(one))
    torch.cuda.synchronize()
    assert torch.equal(on_host(cell, "steps"), model.steps.cpu())
    del graph


def test_what_cannot_be_captured_is_refused_and_the_capture_goes_on(paths: dict[str, Path]) -> None:
    with cgbundle.load(paths["cell"], lazy=True) as lazy, cgbundle.load(paths["plain"]) as plain:
        x, graph = example(4), torch.cuda.CUDAGraph()
        plain(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            with raises("capture-refused", match=r"int_key \(4,\) is not built yet"):
                lazy(x)
            with raises("capture-refused", match="inputs on the CPU cannot become part"):
                plain(torch.randn(4, WIDTH))
            for use in (lazy.reset, lambda: lazy.state["memory"], lambda: lazy.state_bytes(0)):
                with raises("capture-refused"):
                    use()
            output = plain(x)
        graph.replay()
        with torch.no_grad():
            close(output, Plain().cuda()(x))
        torch.cuda.synchronize()
        del graph


def test_sessions_open_and_close_while_another_thread_captures(paths: dict[str, Path]) -> None:
    with cgbundle.load(paths["plain"]) as plain:
        stop, opened = threading.Event(), []

        def work() -> None:
            while not stop.is_set():
                plain.session().close()
                opened.append(None)
            opened.append("done")

        thread = threading.Thread(target=work)
        thread.start()
        x = example(4)
        with plain.session() as session, torch.no_grad():
            captured = 0
            while thread.is_alive() and (captured < 20 or len(opened) < 20):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    output = session(x)
                graph.replay()
                close(output, Plain().cuda()(x))
                del graph
                captured += 1
        stop.set()
        thread.join(60)
        assert opened[-1] == "done", "an error would have ended the thread"
