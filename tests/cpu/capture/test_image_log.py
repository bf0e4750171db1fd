"""The native callback for CUPTI, called as CUPTI would call it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.raising import raises

pytest.importorskip("torch")

DRIVER_API, RESOURCE, MODULE_LOADED, GRAPHNODE_CREATED = 1, 3, 6, 13
ENTER, EXIT = 0, 1


class CallbackData(ctypes.Structure):
    _fields_ = (("site", ctypes.c_int), ("function", ctypes.c_char_p), ("params", ctypes.c_void_p), ("result", ctypes.c_void_p))


@pytest.fixture
def image_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Returns the module; uses a fake driver if cuda-bindings is not installed."""
    if importlib.util.find_spec("cuda") is None:
        fakes = {name: ModuleType(name) for name in ("cuda", "cuda.bindings", "cuda.bindings.driver")}
        fakes["cuda.bindings"].driver = fakes["cuda.bindings.driver"]  # type: ignore[attr-defined]
        for name, fake in fakes.items():
            monkeypatch.setitem(sys.modules, name, fake)
    yield importlib.import_module("cgcompile.capture.worker.image_log")


class Events:
    """Calls the callback with CUPTI's structures."""

    def __init__(self, events: Any) -> None:
        self._call, self._log = events.callback, ctypes.c_void_p(events.log)

    def enter(self, name: str) -> None:
        self._call(self._log, DRIVER_API, 0, ctypes.byref(CallbackData(ENTER, name.encode(), None, None)))

    def leave(self, name: str, *words: int, result: int = 0) -> None:
        params, code = (ctypes.c_uint64 * 3)(*words), ctypes.c_int(result)
        data = CallbackData(EXIT, name.encode(), ctypes.addressof(params), ctypes.addressof(code))
        self._call(self._log, DRIVER_API, 0, ctypes.byref(data))

    def load(self, image: bytes) -> None:
        held = ctypes.create_string_buffer(image, len(image))
        self._resource(MODULE_LOADED, (ctypes.c_size_t * 3)(7, len(image), ctypes.addressof(held)))

    def add_node(self, node: int) -> None:
        self._resource(GRAPHNODE_CREATED, (ctypes.c_uint64 * 3)(1, 0, node))

    def _resource(self, number: int, descriptor: Any) -> None:
        data = (ctypes.c_void_p * 3)(None, None, ctypes.addressof(descriptor))
        self._call(self._log, RESOURCE, number, ctypes.byref(data))


def rows(events: Any) -> list[tuple[str, str, int, bytes]]:
    return [(load.call, load.kind, load.handle, image) for load, image in events.new_loads()]


def test_a_load_has_the_handle_that_its_call_returns(image_log: ModuleType) -> None:
    events = image_log.NativeEvents(lambda: "")
    calls = Events(events)
    module = ctypes.c_uint64(0xA1)
    calls.leave("cuCtxGetDevice")  # this call began before the subscription
    calls.enter("cuModuleLoadData_v2")
    calls.enter("cuCtxPushCurrent")
    calls.leave("cuCtxPushCurrent")
    calls.load(b"first")
    calls.leave("cuModuleLoadData_v2", ctypes.addressof(module))
    assert rows(events) == [("cuModuleLoadData_v2", "module", 0xA1, b"first")]
    calls.enter("cuLaunchKernel_ptsz")
    calls.enter("cuKernelGetFunction")
    calls.load(b"inner")
    calls.leave("cuKernelGetFunction", 1, 0xB2)
    calls.load(b"outer")
    calls.leave("cuLaunchKernel_ptsz", 0xC3)
    assert rows(events) == [
        ("cuKernelGetFunction", "kernel", 0xB2, b"inner"),
        ("cuLaunchKernel_ptsz", "function", 0xC3, b"outer"),
    ]
    assert rows(events) == []


def test_images_of_one_call_are_together_and_those_of_a_failed_one_are_not_kept(image_log: ModuleType) -> None:
    events = image_log.NativeEvents(lambda: "")
    calls = Events(events)
    calls.enter("cuNewLoader")
    calls.load(b"one")
    calls.load(b"two")
    calls.leave("cuNewLoader", 5)
    calls.enter("cuModuleLoad")
    calls.load(b"lost")
    calls.leave("cuModuleLoad", 0, result=200)
    calls.load(b"no call")
    loads = events.new_loads()
    assert [(load.serial, load.call, load.kind) for load, _ in loads] == [
        (0, "cuNewLoader", ""), (0, "cuNewLoader", ""), (1, "no driver call", ""),
    ]  # fmt: skip
    assert [load.image for load, _ in loads] == [hashlib.sha256(text).hexdigest() for text in (b"one", b"two", b"no call")]


def test_nodes_have_lines(image_log: ModuleType) -> None:
    lines = iter(("model.py:1", "model.py:2"))
    events = image_log.NativeEvents(lambda: next(lines))
    calls = Events(events)
    calls.add_node(0)  # a null handle is not a node
    calls.add_node(16)
    calls.add_node(32)
    assert events.lines == {16: "model.py:1", 32: "model.py:2"}


def test_threads_load_at_the_same_time(image_log: ModuleType) -> None:
    events = image_log.NativeEvents(lambda: "")

    def work(number: int) -> None:
        calls = Events(events)
        for turn in range(200):
            calls.enter("cuFuncLoad")
            calls.load(f"{number} {turn}".encode())
            calls.leave("cuFuncLoad", 1000 * number + turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen += events.new_loads()
    seen += events.new_loads()
    assert sorted(load.serial for load, _ in seen) == list(range(800))
    for number in range(4):
        mine = [(load.handle, image) for load, image in seen if load.handle // 1000 == number]
        assert mine == [(1000 * number + turn, f"{number} {turn}".encode()) for turn in range(200)]


def test_without_a_compiler_nothing_is_observed(image_log: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises("compiler-failed", match="no C\\+\\+ compiler: 'no-such-compiler' is not on the PATH"):
        image_log.NativeEvents(lambda: "")
    monkeypatch.setenv("CXX", "false")
    with raises("compiler-failed", match="observe: false does not compile image_log.cpp: no message"):
        image_log.NativeEvents(lambda: "")
