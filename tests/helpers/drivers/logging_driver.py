"""The driver of `fake_driver`, with a log of every call and its arguments.

Handles and addresses differ from run to run, so the log numbers them in the order of their first use: `gpu2+256`, `stream1`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any
from zlib import crc32

from cgbundle.cuda.structures import KernelNodeParams, LaunchConfig
from cgbundle.format.table import SET_CONDITION
from tests.helpers.drivers.fake_driver import PARAMS, FakeDriver, Handle

KINDS = {
    "cuMemAlloc": "gpu", "cuMemAllocAsync": "output", "cuMemHostAlloc": "pinned", "cuStreamCreate": "stream",
    "cuEventCreate": "event", "cuModuleLoadData": "module", "cuModuleGetFunction": "function", "cuGraphCreate": "graph",
    "cuGraphClone": "graph", "cuGraphInstantiate": "executable", "cuGraphConditionalHandleCreate": "condition",
    "cuModuleGetGlobal": "symbol",
}  # fmt: skip
"""Kind of the object that a driver call returns."""

FIRST_ADDRESS = 1 << 32
"""Integers from here on are logged as addresses."""


class LoggingDriver(FakeDriver):
    """`log` has a line for every call of the thread that created this object; `others` has the calls of other threads, unordered.
    `labels` maps handles, and start addresses of memory, to their names in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.others: list[str] = []
        self._thread = threading.get_ident()
        self.labels: dict[int, str] = {}
        self._counts: dict[str, itertools.count[int]] = {}

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)

        def logged(*args: Any) -> Any:
            text = f"{name}({', '.join(self._texts(name, args))})"
            answer = call(*args)
            if threading.get_ident() != self._thread:
                self.others.append(text)
                return answer
            kind = KINDS.get(name)
            self.log.append(f"{text} -> {self._label(kind, answer[1])}" if kind and not answer[0] else text)
            if name.startswith("cuGraphAdd") and type(answer) is tuple:
                answer[1].label = self._next("node")
                self.log[-1] += f" -> {answer[1].label}"
            return answer

        logged.__name__ = name
        return logged

    def taken(self) -> list[str]:
        """Returns and clears the lines since the last call; lines of other threads follow, sorted."""
        lines = [*self.log, *[f"  {line}" for line in sorted(self.others)]]
        self.log.clear()
        self.others.clear()
        return lines

    def _next(self, kind: str) -> str:
        return f"{kind}{next(self._counts.setdefault(kind, itertools.count(1)))}"

    def _label(self, kind: str, value: Any) -> str:
        label = self.labels[int(value)] = self._next(kind)
        return label

    def _texts(self, name: str, args: tuple[Any, ...]) -> list[str]:
        if name == "cuLaunchKernelEx":
            return [self._launch(args[0]), self._text(args[1]), self._block(args[1], args[2])]
        texts = [self._text(value) for value in args]
        if name.startswith(("cuGraphAdd", "cuGraphConditional")) and type(args[0]) is int:
            texts[0] = self.labels.get(args[0], "body")
        return texts

    def _text(self, value: Any) -> str:
        if isinstance(value, bool) or value is None:
            return str(value)
        if isinstance(value, Handle):
            return self.labels.get(int(value), "context" if value == 7 else "other")
        if isinstance(value, int):
            return self.place(value) if value >= FIRST_ADDRESS else str(value)
        if isinstance(value, bytes) and len(value) == 8:
            return self._word(value)
        if isinstance(value, bytes | str):
            return str(value) if len(value) < 40 else f"{len(value)} bytes {crc32(bytes(value)):08x}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, KernelNodeParams):
            return f"{self._fields(value, ('func', 'kernelParams', 'extra'))} {self._block(value.func, value.kernelParams)}"
        if isinstance(value, ctypes.Structure):
            return self._fields(value)
        if isinstance(value, ctypes.Union | ctypes.Array):
            return bytes(value).rstrip(b"\0").hex()
        return str(getattr(value, "label", type(value).__name__))

    def place(self, address: int) -> str:
        """Returns the label and offset of an address in memory of the driver, or `host`."""
        for start, item in list(self.live.items()):
            if isinstance(item, ctypes.Array) and start <= address < start + len(item):
                return f"{self.labels.get(start, 'other')}+{address - start}"
            if isinstance(item, dict):
                for symbol, data in item.items():
                    if ctypes.addressof(data) == address:
                        return f"symbol {symbol}"
        return "host"

    def _fields(self, value: Any, left_out: tuple[str, ...] = ()) -> str:
        fields = [(field[0], getattr(value, field[0])) for field in value._fields_ if field[0] not in left_out]
        return " ".join([f"{name}={self._text(item)}" for name, item in fields if isinstance(item, ctypes.Structure) or item])

    def _launch(self, config: LaunchConfig) -> str:
        attributes = [f"{config.attrs[row].id}:{self._text(config.attrs[row].value)}" for row in range(config.numAttrs)]
        return f"{self._fields(config, ('hStream', 'attrs'))} {attributes} stream={self._stream(config.hStream)}"

    def _stream(self, value: int | None) -> str:
        return self.labels.get(value or 0, str(value or 0))

    def _block(self, function: int, params: int) -> str:
        """Returns the parameters of a kernel as text, one word of 8 bytes at a time."""
        symbol = self.functions[function].symbol
        sizes = [size for _, size in PARAMS[symbol]]
        pointers = (ctypes.c_void_p * len(sizes)).from_address(params)
        blocks = [ctypes.string_at(pointer or 0, size) for pointer, size in zip(pointers, sizes, strict=True)]
        if symbol == SET_CONDITION:
            return f"{symbol}({self._word(blocks[0])}, {self.labels.get(int.from_bytes(blocks[1], 'little'), '?')})"
        return f"{symbol}({', '.join(' '.join(map(self._word, _words(block))) for block in blocks)})"

    def _word(self, word: bytes) -> str:
        value = int.from_bytes(word, "little")
        return self.place(value) if len(word) == 8 and FIRST_ADDRESS <= value < 1 << 48 else word.hex()


def _words(block: bytes) -> list[bytes]:
    return [block[at : at + 8] for at in range(0, len(block), 8)]
