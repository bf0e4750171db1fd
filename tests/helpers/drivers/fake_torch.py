"""The part of torch that a call with GPU tensors uses, over the memory of `logging_driver`."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from tests.helpers.drivers.logging_driver import LoggingDriver

PAGE = 4096
"""Alignment of tensors in bytes (torch uses 512)."""


class FakeTensor:
    """A row-major float32 tensor on the GPU."""

    layout, dtype, is_cuda, is_cpu, requires_grad = "strided", "torch.float32", True, False, False

    def __init__(self, address: int, shape: tuple[int, ...], owner: object) -> None:
        self.address, self.shape, self.owner = address, shape, owner

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return True

    def stride(self) -> tuple[int, ...]:
        return (self.shape[-1], 1)[-len(self.shape) :]

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def element_size(self) -> int:
        return 4

    def detach(self) -> FakeTensor:
        return self

    def numel(self) -> int:
        return self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)


class FakeTorch:
    """Replaces `sys.modules["torch"]`. `current` is the caller's stream. New tensors lie in the memory of `driver`."""

    Tensor, strided, float32, contiguous_format = FakeTensor, "strided", "torch.float32", None

    def __init__(self, driver: LoggingDriver) -> None:
        self.driver, self.current, self.capturing = driver, 0, False
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: self.current)
        self.cuda = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: self.capturing)
        self._pages: dict[int, object] = {}  # never freed, so that no two tensors share an address

    def empty(self, shape: tuple[int, ...], data: bytes = b"") -> FakeTensor:
        buffer = ctypes.create_string_buffer(2 * PAGE)
        start = ctypes.addressof(buffer)
        address = start + -start % PAGE
        self.driver.live[address] = (ctypes.c_char * PAGE).from_address(address)
        self._pages[address] = buffer
        self.driver.labels[address] = f"torch{len(self._pages)}"
        ctypes.memmove(address, data, len(data))
        return FakeTensor(address, shape, buffer)

    def empty_like(self, value: FakeTensor) -> FakeTensor:
        return self.empty(value.shape)

    def from_dlpack(self, value: Any) -> FakeTensor:
        tensor = FakeTensor(value.address, value.shape, value)
        tensor.clone = lambda memory_format=None: self._cloned(tensor)  # type: ignore[attr-defined]
        return tensor

    def _cloned(self, value: FakeTensor) -> FakeTensor:
        return self.empty(value.shape, ctypes.string_at(value.address, 4 * value.numel()))

    def forget(self) -> None:
        """Removes the memory of all tensors from the driver."""
        for address in self._pages:
            del self.driver.live[address]
        self._pages.clear()
