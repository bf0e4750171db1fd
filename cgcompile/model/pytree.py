"""Nested inputs and outputs -> structure as data (see cgbundle.format.pytree) and a flat list of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch

from cgbundle.format.schema import DTYPES, Tree

from ..errors import ModelError

NamedTensor = tuple[str, torch.Tensor]
"""A tensor with its path, such as `cache.0.key`."""


def describe(value: Any, path: str, leaves: list[NamedTensor]) -> Tree:
    """The tree of `value`; its tensors are appended to `leaves`.

    Raises structure-unsupported for a type that JSON cannot describe, dtype-unsupported for tensors that a bundle cannot hold.
    """
    if isinstance(value, torch.Tensor):
        _check_tensor(value, path)
        leaves.append((path, value))
        return {"tensor": len(leaves) - 1}
    if isinstance(value, float) and not isfinite(value):
        raise ModelError("structure-unsupported", f"{path}: a bundle holds no number {value} outside of tensors")
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        children = [describe(item, join(path, name), leaves) for name, item in zip(value._fields, value, strict=True)]
        return {"namedtuple": [type(value).__name__, list(value._fields), children]}
    if isinstance(value, tuple | list):
        children = [describe(item, join(path, str(index)), leaves) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": children}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise ModelError("structure-unsupported", f"{path}: the key {key!r} of a dict is neither text nor a number")
        return {"dict": [[key, describe(item, join(path, str(key)), leaves)] for key, item in value.items()]}
    raise ModelError(
        "structure-unsupported",
        f"{path}: {type(value).__module__}.{type(value).__qualname__} cannot be described in a bundle",
        "use tensors, None, numbers, text, and tuples, lists, dicts or named tuples of them",
    )


def constant(value: Any) -> tuple[Tree, ...]:
    """The tree of a value without tensors, or () for what a bundle cannot describe."""
    leaves: list[NamedTensor] = []
    try:
        tree = describe(value, "", leaves)
    except ModelError:
        return ()
    return () if leaves else (tree,)


def rebuild(tree: Tree, tensors: list[torch.Tensor], like: Any) -> Any:
    """`like` with its tensors replaced: the inverse of `describe`, which keeps the types of the original."""
    ((kind, body),) = tree.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "value":
        return body
    if kind == "dict":
        made = {key: rebuild(child, tensors, like[key]) for key, child in body}
        return made if type(like) is dict else type(like)(made)
    if kind == "namedtuple":
        return type(like)(*[rebuild(child, tensors, item) for child, item in zip(body[2], like, strict=True)])
    made_items = [rebuild(child, tensors, item) for child, item in zip(body, like, strict=True)]
    return made_items if kind == "list" else tuple(made_items)


def join(path: str, part: str) -> str:
    """`cache` and `0` make `cache.0`."""
    return f"{path}.{part}" if path else part


def _check_tensor(value: torch.Tensor, path: str) -> None:
    if dtype_name(value.dtype) not in DTYPES:
        raise ModelError("dtype-unsupported", f"{path}: dtype {value.dtype} cannot be held in a bundle")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise ModelError("dtype-unsupported", f"{path}: expected a dense tensor, got layout {value.layout}")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
