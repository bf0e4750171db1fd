"""An engine's memory and the replays that verify a bundle, with CPU memory instead of GPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu.capture.recorder import regions

assert regions, "modules of the recorder can be imported from here on"
from cgcompile.capture.engine import memory, observe, read, verify  # noqa: E402
from cgcompile.capture.engine.engine_take import process_name  # noqa: E402
from cgcompile.capture.take import Range  # noqa: E402
from cgcompile.capture.worker.address_map import AddressMap  # noqa: E402
from cgcompile.targets.cuda.tensors import TensorPlace  # noqa: E402
from tests.helpers.raising import raises  # noqa: E402

GIGA = 1 << 30


def host_bytes(address: int, size: int) -> torch.Tensor:
    """Replaces `device_bytes`."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, verify):
        monkeypatch.setattr(module, "device_bytes", host_bytes)
    for name, answer in (("synchronize", None), ("empty_cache", None), ("current_device", 0), ("mem_get_info", (64 * GIGA, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)


# --- what is refused before any memory is read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graphs", "match"),
    [
        ({}, "no graph was given"),
        ({3.5: None}, "graph 3.5: a key is a whole number, a text, or a tuple of these"),
        ({((1, 2), 3): None}, "a key is a whole number"),
        ({"x" * 2000: None}, "the key is longer than 1024 characters"),
        ({8: "graph"}, "graph 8: expected a torch.cuda.CUDAGraph, got str"),
    ],
)
def test_what_is_no_graph_is_refused(graphs: dict[Any, Any], match: str) -> None:
    with raises("graph-refused", match=match):
        read._checked(graphs)


def test_a_graph_whose_nodes_torch_did_not_keep_is_refused() -> None:
    def forgotten() -> int:
        raise RuntimeError("You cannot access the raw cudaGraph_t instance\nand so on")

    with raises("graph-refused", match="graph 'a': torch does not give its nodes: You cannot access the raw cudaGraph_t instance$"):
        read._raw_graph("a", SimpleNamespace(raw_cuda_graph=forgotten))


def test_what_is_no_tensor_of_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [])
    for tensor in (torch.ones(2), 3, torch.ones(2).to_sparse()):
        with raises("tensor-refused", match="tensor 'x' is not a dense torch tensor on a GPU"):
            memory.engine_memory({"x": tensor}, [])
    with raises("tensor-refused", match="has a name that is not printable, or longer than"):
        memory.engine_memory({"a\nb": torch.ones(2)}, [])


def stand_in(monkeypatch: pytest.MonkeyPatch, begun: bool) -> list[Callable[[], str]]:
    """Replaces CUPTI and returns the callbacks that its logs receive."""
    callbacks: list[Callable[[], str]] = []

    def log(line: Callable[[], str]) -> Any:
        callbacks.append(line)
        return SimpleNamespace(close=lambda: None)

    module = ModuleType("cgcompile.capture.worker.image_log")
    module.EngineImageLog = log  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "cgcompile.capture.worker.image_log", module)
    monkeypatch.setattr(observe, "_has_begun", lambda: begun)
    return callbacks


def test_a_process_is_observed_once_and_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, begun=True)
    try:
        with raises("observe-late", match="this process uses CUDA already"):
            observe.observe()
        callbacks = stand_in(monkeypatch, begun=False)
        observe.observe()
        observe.observe()
        assert callbacks == [observe.line] and observe.observed() is observe.image_log()
    finally:
        observe.image_log.cache_clear()


def test_a_process_has_a_name_of_its_own() -> None:
    assert process_name() == process_name() and process_name().count("/") == 2


# --- memory ------------------------------------------------------------------------------------------------------------


def test_blocks_of_torchs_are_what_nobody_named() -> None:
    segments = [{
        "address": 1 << 30,
        "blocks": [
            {"state": "active_allocated", "size": 1024, "requested_size": 1000},
            {"state": "inactive", "size": 512},
            {"state": "active_allocated", "size": 512},
        ],
    }]  # fmt: skip
    span = Range(kind="inputs", start=(1 << 30) + 100, size=100)
    blocks = [(piece.start - (1 << 30), piece.size) for piece in memory._others(segments, [span])]
    assert blocks == [(0, 100), (200, 800), (1536, 512)], "what is behind the bytes that were asked for is nobody's"


def test_tensors_lie_in_spans_and_outputs_in_the_pools_of_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(name: str, tensor: torch.Tensor) -> TensorPlace:
        return TensorPlace(address=tensor.data_ptr(), dtype="float32", shape=tuple(tensor.shape), strides=tensor.stride())

    weight, output, empty = torch.zeros(16), torch.zeros(8), torch.zeros(0)

    def segment(tensor: torch.Tensor, pool: tuple[int, int], device: int = 0) -> dict[str, Any]:
        block = {"state": "active_allocated", "size": 512, "requested_size": 100}
        start = {"address": tensor.data_ptr(), "total_size": 512, "segment_pool_id": pool, "device": device}
        return {**start, "blocks": [block]}

    segments = [segment(weight, (0, 0)), segment(output, (0, 7)), segment(torch.zeros(1), (0, 0), device=1)]
    monkeypatch.setattr(memory, "_place", place)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    seen = memory.engine_memory({"w": weight, "a/row": weight[4:8], "out": output, "empty": empty}, [(0, 7)])
    assert [(piece.kind, piece.start, piece.size) for piece in seen.ranges] == [
        ("inputs", weight.data_ptr(), 64), ("pool", output.data_ptr(), 512), ("torch", weight.data_ptr() + 64, 36),
    ]  # fmt: skip
    assert [(row.name, row.span, row.offset) for row in seen.tensors] == [("a/row", 0, 16), ("w", 0, 0)]
    assert list(seen.pooled) == ["out"]
    assert seen.segments == ((weight.data_ptr(), 512), (output.data_ptr(), 512))


def test_words_that_are_addresses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SCAN_WORDS", 4)
    words = torch.arange(20) * 3
    buffer = torch.zeros(64)
    words[1], words[11], words[12] = buffer.data_ptr() + 4, buffer.data_ptr() - 8, words.data_ptr()
    pieces = [
        Range(kind="inputs", start=words.data_ptr(), size=160), Range(kind="torch", start=buffer.data_ptr(), size=256),
    ]  # fmt: skip
    addresses = AddressMap(pieces, [(piece.start, piece.size) for piece in pieces], lambda address: None)
    pointers = memory.pointer_words(addresses, [0], [])
    assert [(ptr.word.at, ptr.word.readings[0].range, ptr.word.readings[0].offset) for ptr in pointers] == [(8, 1, 4), (96, 0, 0)]
    assert memory._words_between(words.data_ptr() + 4, 150, words.data_ptr(), words.data_ptr() + 1) == [(92, words.data_ptr())]
