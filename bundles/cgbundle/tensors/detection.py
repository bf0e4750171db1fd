"""Which tensor library a caller uses, found among the modules that the caller has imported already."""

from __future__ import annotations

import sys
from typing import Any

from .dlpack_tensors import DLPack
from .library import Library


def library_of(value: Any) -> Library:
    """The library that `value`, an input, belongs to; never imports one."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        from .numpy_arrays import Numpy  # each where its library is there: a load that meets none stays light

        return Numpy(numpy)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor):
        from .torch_tensors import Torch

        return Torch(torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        from .cupy_arrays import Cupy

        return Cupy(cupy)
    return DLPack()


def caller_captures() -> bool:
    """Whether the caller's current stream, as far as a library of the caller's knows one, is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    cupy = sys.modules.get("cupy")
    return cupy is not None and hasattr(cupy, "cuda") and bool(cupy.cuda.get_current_stream().is_capturing())
