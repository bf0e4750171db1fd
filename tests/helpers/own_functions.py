"""The shared object with the functions that CPU bundles use instead of libtorch; tests call it with torch tensors."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from ctypes import byref, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from cgbundle.cpu import libtorch
from cgcompile.targets.kernels import standalone
from cgcompile.targets.requirements import compiler

VECTORS = """
#include <cstring>
#ifdef __AVX512F__
#define LANES 16
#define NAME(name, accuracy) Sleef_##name##f16_##accuracy
#else
#define LANES 8
#define NAME(name, accuracy) Sleef_##name##f8_##accuracy
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
#define APPLIED(name, accuracy) \\
  extern "C" Vector NAME(name, accuracy)(Vector); \\
  extern "C" void name##_of(const float* from, float* into, long count) { \\
    for (long at = 0; at < count; at += LANES) { \\
      Vector value; \\
      std::memcpy(&value, from + at, sizeof value); \\
      value = NAME(name, accuracy)(value); \\
      std::memcpy(into + at, &value, sizeof value); \\
    } \\
  }
APPLIED(exp, u10) APPLIED(log, u10) APPLIED(log1p, u10) APPLIED(tanh, u10) APPLIED(sin, u35) APPLIED(cos, u35)
"""
"""C++ wrappers that apply the Sleef vector functions to arrays of a multiple of 16 floats: ctypes cannot pass vectors."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


def own_functions(target: Path, level: str = "native", sources: Sequence[Path] = ()) -> Code:
    """Compiles the functions for processors of `level` into `target`, together with other `sources`."""
    vectors = target.with_suffix(".cpp")
    vectors.write_text(VECTORS)
    command = [word for word in standalone.command(compiler(), target) if word != "-c"]
    command = [word.replace("=native", f"={level}") for word in command]
    subprocess.run([*command, "-shared", *standalone.LINKED, str(vectors), *map(str, sources)], check=True)
    return Code(target)


class Code:
    """The loaded shared object, whose functions are called with torch tensors."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def handle(self, tensor: torch.Tensor) -> c_void_p:
        sizes, strides = [(c_int64 * max(1, tensor.dim()))(*numbers) for numbers in (tensor.shape, tensor.stride())]
        tensor_handle = c_void_p()
        create = self.library.aoti_torch_create_tensor_from_blob
        create.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p)
        code = libtorch.LibTorch(self.library).dtype(str(tensor.dtype).removeprefix("torch."))
        assert create(tensor.data_ptr(), tensor.dim(), sizes, strides, 0, code, 0, 0, byref(tensor_handle)) == 0
        return tensor_handle

    def __call__(self, name: str, *arguments: Any) -> int:
        handles = [self.handle(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        code = int(self.library[f"aoti_torch_cpu_{name}"](*handles))
        for handle, argument in zip(handles, arguments, strict=True):
            if isinstance(argument, torch.Tensor):
                self.library.aoti_torch_delete_tensor_object(handle)
        return code

    def taken(self, handle: c_void_p, like: torch.Tensor) -> torch.Tensor:
        """Copies a float32 tensor that the library made, with the strides of that tensor, and deletes the original."""
        torch_library = libtorch.LibTorch(self.library)
        _, shape, strides = torch_library.layout(handle.value or 0)
        place = c_void_p()
        assert torch_library.data_pointer(handle, byref(place)) == 0
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        data = torch.frombuffer(bytearray(ctypes.string_at(place.value or 0, 4 * count)), dtype=torch.float32)
        self.library.aoti_torch_delete_tensor_object(handle)
        assert shape == tuple(like.shape)
        return data.as_strided(shape, strides)

    def dense(self, handle: c_void_p, like: torch.Tensor) -> torch.Tensor:
        """Copies a dense tensor that the library made, with the layout of `like`, and deletes the original."""
        torch_library, place = libtorch.LibTorch(self.library), c_void_p()
        _, sizes, strides = torch_library.layout(handle.value or 0)
        assert (tuple(sizes), tuple(strides)) == (tuple(like.shape), like.stride())
        assert torch_library.data_pointer(handle, byref(place)) == 0
        data = bytearray(ctypes.string_at(place.value or 0, like.nbytes))
        self.library.aoti_torch_delete_tensor_object(handle)
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape) if data else torch.empty_like(like)

    def result(self, handle: c_void_p) -> torch.Tensor:
        """Copies a tensor that the library made, with its dtype, shape and strides, and deletes the original."""
        torch_library, place = libtorch.LibTorch(self.library), c_void_p()
        number, shape, strides = torch_library.layout(handle.value or 0)
        dtype = next(candidate for candidate in DTYPES if torch_library.dtype(str(candidate).removeprefix("torch.")) == number)
        assert torch_library.data_pointer(handle, byref(place)) == 0
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        data = bytearray(ctypes.string_at(place.value or 0, dtype.itemsize * (last + 1))) if 0 not in shape else bytearray()
        self.library.aoti_torch_delete_tensor_object(handle)
        whole = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return whole.as_strided(shape, strides)
