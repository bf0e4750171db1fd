"""Verification of an engine's graphs: what is compared, sent to the new process, and restored. Host memory replaces GPU memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cgbundle.gpu.engine_replay import POISON  # noqa: E402
from cgcompile.capture.engine import digests as digests_module  # noqa: E402
from cgcompile.capture.engine import regions as regions_module  # noqa: E402
from cgcompile.capture.engine import verify as verify_module  # noqa: E402
from cgcompile.capture.engine.digests import CHUNK, digests, digests_of  # noqa: E402
from cgcompile.capture.engine.regions import Here  # noqa: E402
from cgcompile.capture.engine.verify import verify  # noqa: E402
from tests.helpers.bundles import engine_bundle  # noqa: E402
from tests.helpers.bundles.cuda_bundles import FLOATS  # noqa: E402
from tests.helpers.raising import raises  # noqa: E402
from tests.pure.capture.test_engine import ONE, TWO, Process  # noqa: E402

ROW = 4 * FLOATS
SIZES = {"x": 8, "out": 8, "result": 4, "scratch": 4}
"""Rows of the engine's memory.  No tensor names the memory `scratch`."""
KEYS = ("small", (8, "rows"))


class Graph:
    """A graph that is a Python function."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


class Engine:
    """The memory of the engine in `engine_bundle`: `x` and `out` with 8 rows, and `result` and `scratch` with 4 rows in the graphs'
    memory."""

    def __init__(self) -> None:
        self.memory = {name: ctypes.create_string_buffer(rows * ROW + 64) for name, rows in SIZES.items()}
        for name, buffer in self.memory.items():
            self.view(name).copy_(
                torch.frombuffer(bytearray(hashlib.sha512(name.encode()).digest() * 64), dtype=torch.uint8)[: len(buffer) - 64]
            )
        here = {name: -(-ctypes.addressof(buffer) // 16) * 16 for name, buffer in self.memory.items()}
        pools = ((here["result"], 4 * ROW), (here["scratch"], 4 * ROW))
        self.here = Here(spans=(here["x"], here["out"]), pooled={"result": here["result"]}, pools=pools)

    def view(self, name: str) -> torch.Tensor:
        address = -(-ctypes.addressof(self.memory[name]) // 16) * 16
        return host_bytes(address, len(self.memory[name]) - 64)

    def small(self) -> None:
        self.view("result").copy_(self.view("x")[: 4 * ROW] ^ 1)

    def rows(self) -> None:
        self.view("out").copy_(self.view("x") ^ 2)


def host_bytes(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the requests to new processes; none of them runs."""
    seen: list[dict[str, Any]] = []

    def fresh(module: str, arguments: list[str], path: str) -> dict[str, Any]:
        plan = json.loads(Path(arguments[1]).read_text())
        seen.append(plan | {"held": Path(plan["file"]).read_bytes()})
        return {"differs": "", "torch_imported": False}

    for module in (verify_module, regions_module, digests_module):
        monkeypatch.setattr(module, "device_bytes", host_bytes)
    monkeypatch.setattr(verify_module, "run_fresh", fresh)
    monkeypatch.setattr(verify_module, "span_handle", lambda address, number, engine: ("00" * 64, 0, address))
    for name, value in (("empty_cache", None), ("synchronize", None), ("current_device", 0), ("mem_get_info", (1 << 40, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    return seen


def run(
    graphs: dict[Any, Graph],
    engine: Engine,
    prepare: Callable[[Any], None] = lambda key: None,
    returns: dict[Any, list[str]] | None = None,
) -> None:
    verify(Path("stage"), engine_bundle.engine(), 1024, graphs, engine.here, prepare, returns)  # type: ignore[arg-type]


def test_of_scratch_memory_only_what_a_graph_returns_is_compared(plans: list[dict[str, Any]]) -> None:
    engine = Engine()
    calls: list[int] = []

    def scratch() -> None:
        calls.append(0)
        engine.view("result")[0] = len(calls)

    graphs = {"small": Graph(engine.small), (8, "rows"): Graph(scratch)}
    with raises("replays-differ", match="leave other bits in 'result'"):
        run(graphs, engine)
    run(graphs, engine, returns={"small": ["result"], (8, "rows"): []})
    rows = [[place for place, _ in results] for _, results in plans[0]["graphs"]]
    assert rows == [[["result", 0, 4 * ROW]], []] and plans[0]["contents"] == []


@pytest.mark.parametrize("steady", [True, False])
def test_bytes_that_differ_are_counted(plans: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, steady: bool) -> None:
    engine, calls = Engine(), []

    def fresh(module: str, arguments: list[str], path: str) -> dict[str, Any]:
        plan = json.loads(Path(arguments[1]).read_text())
        engine.small()
        held = bytearray(engine.view("result").numpy()[: 4 * ROW])
        held[40] ^= 1
        held[50] ^= 1
        Path(f"{plan['file']}.differs").write_bytes(held)
        return {"differs": "graph 'small': other bits", "torch_imported": False, "at": [0, 0]}

    def small() -> None:
        calls.append(0)
        engine.small()
        if not steady:
            engine.view("result")[0] = len(calls)

    monkeypatch.setattr(verify_module, "run_fresh", fresh)
    graphs = {"small": Graph(small), (8, "rows"): Graph(lambda: None)}
    if steady:
        text = f"graph 'small': other bits: 2 of {4 * ROW:,} bytes, the first 40 bytes behind the tensor's start"
        with raises("proof-failed", match=text):
            run(graphs, engine)
    else:
        with raises("replays-differ", match="two replays of the engine's own graph 1 of 2 leave other bits in 'result'"):
            run(graphs, engine, returns={"small": ["result"], (8, "rows"): []})


def test_changes_of_graphs_are_recorded_and_undone(plans: list[dict[str, Any]]) -> None:
    engine = Engine()
    before = {name: bytes(engine.view(name).numpy()) for name in engine.memory}
    with raises("proof-failed", match="tensor 'out' holds other bits than the engine's own graphs leave in it"):
        run({"small": Graph(engine.small), (8, "rows"): Graph(engine.rows)}, engine)  # the fixture `plans` replaces the new process
    assert {name: bytes(engine.view(name).numpy()) for name in engine.memory} == before
    (plan,) = plans
    (inputs, (((name, at, size), digest),)), (_, (other,)) = plan["graphs"]
    assert not inputs and (name, at, size) == ("result", 0, 4 * ROW) and other[0][0] == "out"
    assert digest == hashlib.sha256(bytes([byte ^ 1 for byte in before["x"][: 4 * ROW]])).hexdigest()
    assert plan["contents"] == [], "what a graph writes whole may begin as anything"


def test_memory_that_a_graph_does_not_write_whole_keeps_its_contents(plans: list[dict[str, Any]]) -> None:
    engine = Engine()
    held = bytes(engine.view("result").numpy())
    run({"small": Graph(lambda: engine.view("result")[:8].fill_(7)), (8, "rows"): Graph(lambda: None)}, engine)
    (((name, at, size), begin),) = plans[0]["contents"]
    assert (name, at) == ("result", 0) and plans[0]["held"][begin : begin + size] == held


def test_poison_is_not_what_a_graph_may_read(plans: list[dict[str, Any]]) -> None:
    engine, seen = Engine(), []
    run({"small": Graph(lambda: seen.append(int(engine.view("result")[0]))), (8, "rows"): Graph(lambda: None)}, engine)
    assert POISON in seen and seen[-1] != POISON


def test_an_output_that_a_graph_does_not_write_is_not_compared(plans: list[dict[str, Any]]) -> None:
    """In vLLM, attention writes such an output between two graphs.  Until then its memory holds temporaries of earlier graphs."""
    engine, calls = Engine(), []
    before = {name: bytes(engine.view(name).numpy()) for name in engine.memory}

    def scratch() -> None:
        calls.append(0)
        engine.view("scratch")[0] = len(calls)

    def reader() -> None:
        engine.view("out")[: 4 * ROW].copy_(engine.view("result"))

    with raises("proof-failed", match="tensor 'out' holds other bits than the engine's own graphs leave in it"):
        run({"small": Graph(scratch), (8, "rows"): Graph(reader)}, engine, returns={"small": ["result"], (8, "rows"): []})
    (nothing, unwritten), (inputs, results) = plans[0]["graphs"]
    assert not nothing and not unwritten and [place for place, _ in results] == [["out", 0, 8 * ROW]]
    (((name, at, size), begin),) = inputs
    numbers = torch.frombuffer(bytearray(plans[0]["held"][begin : begin + size]), dtype=torch.bfloat16)
    assert (name, at, size) == ("result", 0, 4 * ROW) and 0.5 < numbers.std() < 2 and numbers.abs().max() < 8
    expected = bytes(numbers.view(torch.uint8).numpy()) + before["out"][4 * ROW :]
    assert results[0][1] == hashlib.sha256(expected).hexdigest()
    assert {name: bytes(engine.view(name).numpy()) for name in engine.memory} == before


def test_indices_that_a_graph_returns_and_reads_stay_valid(plans: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the verification filled outputs with invalid indices, the engine's process would end."""
    engine, seen = Engine(), []
    row = replace(engine_bundle.engine().tensors[-1], dtype="int32")
    assert row.name == "result"
    described = replace(engine_bundle.engine(), tensors=(*engine_bundle.engine().tensors[:-1], row))
    monkeypatch.setattr(engine_bundle, "engine", lambda: described)
    graph = Graph(lambda: seen.append(bytes(engine.view("result")[:4].numpy())))
    before = bytes(engine.view("result")[:4].numpy())
    run({"small": graph, (8, "rows"): Graph(lambda: None)}, engine, returns={"small": ["result"], (8, "rows"): []})
    assert seen[:2] == [before, bytes(4)] and [results for _, results in plans[0]["graphs"]] == [[], []]


def test_an_output_is_compared_though_its_bytes_were_there_before(plans: list[dict[str, Any]]) -> None:
    engine = Engine()
    run({"small": Graph(engine.small), (8, "rows"): Graph(engine.small)}, engine, returns={key: ["result"] for key in KEYS})
    assert [[place for place, _ in results] for _, results in plans[0]["graphs"]] == 2 * [[["result", 0, 4 * ROW]]]


def test_scratch_that_no_tensor_names_is_restored(plans: list[dict[str, Any]]) -> None:
    engine, seen = Engine(), []
    before = bytes(engine.view("scratch").numpy())
    run({"small": Graph(lambda: seen.append(int(engine.view("scratch")[0]))), (8, "rows"): Graph(lambda: None)}, engine)
    assert seen[-1] == POISON and bytes(engine.view("scratch").numpy()) == before


def test_inputs_that_a_graph_needs_are_noted_before_it(plans: list[dict[str, Any]]) -> None:
    engine = Engine()

    def count() -> None:
        engine.view("out")[0] += 1

    def prepare(key: Any) -> None:
        engine.view("out")[0] = 0 if key == "small" else 100

    before = bytes(engine.view("out").numpy())
    with raises("proof-failed", match="tensor 'out' holds other bits than the engine's own graphs leave in it"):
        run({"small": Graph(count), (8, "rows"): Graph(count)}, engine, prepare)
    rows = plans[0]["graphs"]
    held = [plans[0]["held"][begin] for inputs, _ in rows for (_, begin) in inputs]
    assert held == [0, 100] and [[place[0] for place, _ in results] for _, results in rows] == [["out"], ["out"]]
    assert bytes(engine.view("out").numpy()) == before


def test_prepare_may_write_other_bytes_every_time(plans: list[dict[str, Any]]) -> None:
    """FlashAttention 3's schedule has an unused end, whose bytes differ.  The new process gets the bytes of this process's last
    replay."""
    engine, calls = Engine(), []
    before = bytes(engine.view("out").numpy())

    def prepare(key: Any) -> None:
        calls.append(0)
        engine.view("out")[0] = len(calls)

    with raises("proof-failed", match="tensor 'out' holds other bits"):
        run({"small": Graph(engine.small), (8, "rows"): Graph(lambda: None)}, engine, prepare, {key: [] for key in KEYS})
    held = [plans[0]["held"][begin] for inputs, _ in plans[0]["graphs"] for (_, begin) in inputs]
    assert held == [len(calls) - 1, len(calls)] and bytes(engine.view("out").numpy()) == before


def test_graphs_that_are_not_deterministic_are_refused(plans: list[dict[str, Any]]) -> None:
    engine = Engine()
    calls: list[int] = []

    def count() -> None:
        calls.append(0)
        engine.view("out")[0] = len(calls)

    with raises("replays-differ", match="two replays of the engine's own graphs"):
        run({"small": Graph(count), (8, "rows"): Graph(lambda: None)}, engine)
    assert not plans


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ({"differs": "graph 8: tensor 'x' holds other bits", "torch_imported": False}, "graph 8: tensor 'x' holds other bits"),
        ({"differs": "", "torch_imported": True}, "it imported torch"),
        ({"error": "cuGraphLaunch: CUDA_ERROR_ILLEGAL_ADDRESS", "hint": "", "code": "driver-failed"}, "ILLEGAL_ADDRESS"),
    ],
)
def test_what_the_fresh_process_says_ends_the_save(
    plans: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], match: str
) -> None:
    monkeypatch.setattr(verify_module, "run_fresh", lambda module, arguments, path: answer)
    engine = Engine()
    before = bytes(engine.view("out").numpy())
    with raises("proof-failed", match=match):
        run({"small": Graph(engine.small), (8, "rows"): Graph(engine.rows)}, engine)
    assert bytes(engine.view("out").numpy()) == before


def test_a_gpu_without_room_for_the_graphs_own_memory_is_refused(
    plans: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 0))
    with raises("not-verifiable", match="needs 1,073,742,848 bytes of the GPU, which has 1,073,741,824 free"):
        run({}, Engine())


@pytest.mark.parametrize("size", [8, 4096, CHUNK, CHUNK + 16, 65 * CHUNK + 8])
def test_a_chunk_has_a_digest_of_its_own(plans: list[dict[str, Any]], size: int) -> None:
    buffer = ctypes.create_string_buffer(size)
    address = ctypes.addressof(buffer)
    parts = [host_bytes(address + at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
    before, pieces = digests(address, size).tolist(), digests_of(parts)
    assert not any(before), "zeros have the digest 0, by which they are left out of the file"
    assert len(before) == len(pieces) == -(-size // CHUNK)
    ctypes.memset(address + size - 1, 1, 1)
    for one, other in ((before, digests(address, size).tolist()), (pieces, digests_of(parts))):
        assert [number for number in range(len(before)) if one[number] != other[number]] == [len(before) - 1]


def test_a_process_that_differs_takes_the_place_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgcompile.capture.engine import read, save
    from cgcompile.capture.engine.engine_take import read_recording

    one, two = [Process(base).take([Process(base).kernel(Process(base).x)]) for base in (ONE, TWO)]
    takes = iter([one, replace(two, keys=(8,))])
    monkeypatch.setattr(save, "observed", lambda: None)
    monkeypatch.setattr(read, "read_engine", lambda log, graphs, tensors: next(takes))
    assert save.save_graphs({}, {}, tmp_path / "engine.cgb").kind == "recording"
    with raises("engine-differs", match="other keys: 0 and 8; the recording is now of this process"):
        save.save_graphs({}, {}, tmp_path / "engine.cgb")
    assert read_recording(tmp_path / "engine.cgb.recording").keys == (8,)


@pytest.mark.parametrize(
    ("returns", "match"),
    [
        ({}, r"graph 8: `returns` does not say what it returns"),
        ({8: [], 9: []}, r"`returns` names graph 9, which is not among the graphs"),
        ({8: ["sum", "sums"]}, r"graph 8: `returns` names tensor 'sums', which is not among the tensors"),
    ],
)
def test_returns_that_would_leave_out_a_comparison_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: dict[Any, list[str]], match: str
) -> None:
    from cgcompile.capture.engine import save

    monkeypatch.setattr(save, "observed", lambda: None)
    with raises("graph-refused", match=match):
        save.save_graphs({8: None}, {"sum": None}, tmp_path / "engine.cgb", returns=returns)  # type: ignore[dict-item]
