"""torch.Tensor on the CPU or a GPU, without importing torch. Private in torch (2.11, 2.13), with public fallbacks:
`torch._C._cuda_getCurrentRawStream`, `torch._C._dynamo.guards.TensorGuards`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CallError
from ..format.shapes import span_of
from .library import Descriptor, Guard, Library, Wrapper, array_type, kind_of
from .tensor import Tensor


class Torch(Library):
    name = "torch"

    def __init__(self, module: Any) -> None:
        self.module = module
        self.names: dict[Any, str] = {}
        self._tensor, self._strided, self._empty_like = module.Tensor, module.strided, module.empty_like
        # the function that torch's generated code calls: the public one creates a Stream object, 3 us a call
        self.stream = getattr(module._C, "_cuda_getCurrentRawStream", None) or self._public_stream  # type: ignore[method-assign]
        # the guards of torch.compile, which check type, dtype, device, layout, sizes and strides in one call
        self._guards = getattr(getattr(getattr(module._C, "_dynamo", None), "guards", None), "TensorGuards", None)

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        """Called for every input of every call: each check takes 50 ns."""
        if not isinstance(value, self._tensor):
            raise CallError("input-kind", f"input {name!r}: expected a torch tensor like the first input, got {kind_of(value)}")
        if value.layout is not self._strided:
            raise CallError("input-kind", f"input {name!r}: expected a dense tensor, got layout {value.layout}")
        if value.is_neg() or value.is_conj():
            value = value.resolve_conj().resolve_neg()  # lazy: the memory has the values before the operation
        if value.requires_grad:
            value = value.detach()
        try:
            descriptor = self.describe(value)
        except RuntimeError as error:  # a nested tensor
            reason = (str(error).splitlines() or [""])[0]
            raise CallError("input-kind", f"input {name!r}: torch gives no address for it: {reason}") from None
        if not descriptor[0] and value.numel():
            raise CallError("input-kind", f"input {name!r}: expected a tensor with values, got {kind_of(value)} without memory")
        return value, descriptor

    def describe(self, value: Any) -> Descriptor:
        dtype = value.dtype
        name = self.names.get(dtype)
        if name is None:
            name = self.names[dtype] = str(dtype).removeprefix("torch.")
        device = value.get_device() if value.is_cuda else None if value.is_cpu else -1
        return value.data_ptr(), value.shape, name, None if value.is_contiguous() else value.stride(), device

    def guard(self, values: Sequence[Any]) -> Guard:
        if self._guards is None or any([value.is_neg() or value.is_conj() for value in values]):
            return super().guard(values)
        checks = []
        for value in values:
            sizes, strides = list(value.shape), list(value.stride())
            checks.append(self._guards(value, dynamic_dims_sizes=[sizes], dynamic_dims_strides=[strides]).check)
        check, count = checks[0], len(checks)

        def like_one(inputs: Sequence[Any]) -> tuple[list[int], Any] | None:
            return ([inputs[0].data_ptr()], None) if len(inputs) == 1 and check(inputs[0]) else None

        def like_all(inputs: Sequence[Any]) -> tuple[list[int], Any] | None:
            if len(inputs) != count:
                return None
            for same, value in zip(checks, inputs, strict=True):
                if not same(value):
                    return None
            return [value.data_ptr() for value in inputs], None

        return like_one if count == 1 else like_all

    def strides(self, value: Any) -> Sequence[int]:
        return tuple(value.stride())

    def byte_strides(self, value: Any) -> Sequence[int]:
        size = value.element_size()
        return [stride * size for stride in value.stride()]

    def ordered(self, value: Any, order: Sequence[int]) -> Any:
        back = sorted(range(len(order)), key=lambda axis: order[axis])
        return value.permute(*order).contiguous().permute(*back)

    def wrapper(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Wrapper:
        if 0 in shape:
            return lambda address, owner: self.empty(dtype, shape)
        memory, kind = array_type(span_of(dtype, shape, strides)), getattr(self.module, dtype)
        frombuffer, size, steps = self.module.frombuffer, tuple(shape), tuple(strides)

        def alias(address: int, owner: object) -> Any:
            view = memory.from_address(address)
            view.owner = owner
            return frombuffer(view, dtype=kind).as_strided(size, steps)

        return alias

    def wrap(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        if device is None or 0 in shape:
            return self.wrapper(dtype, shape, strides)(address, owner) if device is None else self.empty(dtype, shape, device)
        return self.module.from_dlpack(Tensor(address, dtype, shape, strides, owner, device))

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Any:
        return self.module.zeros(
            tuple(shape), dtype=getattr(self.module, dtype), device="cpu" if device is None else f"cuda:{device}"
        )

    def as_strided(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        kind, value = getattr(self.module, dtype), value.detach()
        if kind is value.dtype:
            return value.as_strided(tuple(shape), tuple(strides), value.storage_offset() + offset // value.element_size())
        begin = value.storage_offset() * value.element_size() + offset
        fresh = self.module.empty(0, dtype=kind, device=value.device)
        return fresh.set_(value.untyped_storage(), begin // fresh.element_size(), tuple(shape), tuple(strides))

    def _public_stream(self, device: int) -> int:
        return int(self.module.cuda.current_stream(device).cuda_stream)

    def copy(self, value: Any) -> Any:
        return value.clone(memory_format=self.module.contiguous_format)

    def empty_like(self, value: Any) -> tuple[Any, int]:
        tensor = self._empty_like(value)  # this and the driver's copy take less time than torch's `clone`
        return tensor, tensor.data_ptr()

    def cast(self, value: Any, dtype: str) -> Any:
        return value.to(getattr(self.module, dtype))

    def writable(self, value: Any, name: str) -> Any:
        return value.detach()
