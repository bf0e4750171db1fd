"""Converts nested inputs and outputs to a tree (see cgbundle.format.pytree) and a flat list of tensors, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch

from cgbundle.format.schema import DTYPES, Tree

from ..errors import ModelError, named
from .class_fields import Fields, fields_of
from .user_code import first_line

NamedTensor = tuple[str, torch.Tensor]
"""A tensor with its path, such as `cache.0.key`."""

CODES = ("structure-unsupported", "dtype-unsupported")
"""Codes of the errors that this module raises."""

TYPES = "use tensors, None, numbers, text, and tuples, lists, dicts, named tuples or dataclasses of them"
NO_CACHE = "set model.config.use_cache = False, pass use_cache=False, or return its tensors (output.logits)"
HINTS = {"numpy.ndarray": "torch.from_numpy(...) makes a tensor of it"}


def describe(value: Any, path: str, leaves: list[NamedTensor]) -> Tree:
    """Returns the tree of `value`, and appends its tensors to `leaves`.  Raises structure-unsupported for a type that JSON cannot
    describe, dtype-unsupported for tensors that a bundle cannot hold."""
    if isinstance(value, torch.Tensor):
        _check_tensor(value, path)
        leaves.append((path, value))
        return {"tensor": len(leaves) - 1}
    if isinstance(value, float) and not isfinite(value):
        raise _unsupported(path, f"a bundle holds no number {value} outside of tensors")
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if names := _tuple_names(value):
        children = [describe(item, join(path, name), leaves) for name, item in zip(names, value, strict=True)]
        return {"namedtuple": [type(value).__name__, list(names), children]}
    if isinstance(value, tuple | list):
        children = [describe(item, join(path, str(index)), leaves) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": children}
    if fields := fields_of(value):
        return _describe_fields(fields, path, leaves)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise _unsupported(path, f"the key {key!r} of a dict is neither text nor a number")
        return {"dict": [[key, describe(item, join(path, str(key)), leaves)] for key, item in value.items()]}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise _unsupported(path, f"{name} cannot be described in a bundle", HINTS.get(name, NO_CACHE if "Cache" in name else TYPES))


def _describe_fields(fields: Fields, path: str, leaves: list[NamedTensor]) -> Tree:
    children = [describe(item, join(path, name), leaves) for name, item in zip(fields.names, fields.values, strict=True)]
    return {"tuple": children} if fields.kind == "tuple" else {"record": [fields.name, fields.kind, list(fields.names), children]}


def _tuple_names(value: Any) -> tuple[str, ...]:
    """Returns the fields of a named tuple, or of a result such as that of torch.topk, else ()."""
    if not isinstance(value, tuple):
        return ()
    return tuple(getattr(value, "_fields", ()) or (getattr(value, "__match_args__", ()) if hasattr(value, "n_fields") else ()))


def constant(value: Any) -> Tree | None:
    """Returns the tree of a value without tensors, or None if a bundle cannot describe it."""
    leaves: list[NamedTensor] = []
    try:
        tree = describe(value, "", leaves)
    except ModelError:
        return None
    return None if leaves else tree


def contexts(value: Any, path: str) -> list[Any]:
    """Returns (path, name, value) of the attributes that `rebuild` copies from an example input.  They must be the same at all
    sizes.  Raises structure-unsupported for an instance that cannot be rebuilt with other tensors."""
    if isinstance(value, torch.Tensor | str):
        return []
    if not isinstance(value, tuple | list) and (parts := fields_of(value)):
        if parts.obstacle:
            raise _unsupported(
                path,
                f"{parts.obstacle}: it can be an output, but no input",
                "pass its tensors as inputs, and create it in forward()",
            )
        inner = [
            context for name, item in zip(parts.names, parts.values, strict=True) for context in contexts(item, join(path, name))
        ]
        return [*[(path, *entry) for entry in parts.context], *inner]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple | list) else ()
    return [context for key, item in items for context in contexts(item, join(path, str(key)))]


def rebuild(tree: Tree, tensors: list[torch.Tensor], like: Any) -> Any:
    """Returns a copy of `like` with other tensors: the inverse of `describe`.  Keeps the types of `like`."""
    ((kind, body),) = tree.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "value":
        return body
    if kind == "record" or (kind == "tuple" and not isinstance(like, tuple)):
        fields = fields_of(like)
        assert fields is not None, type(like)
        trees = body[3] if kind == "record" else body
        return fields.remake([rebuild(child, tensors, item) for child, item in zip(trees, fields.values, strict=True)])
    if kind == "dict":
        mapping = {key: rebuild(child, tensors, like[key]) for key, child in body}
        if isinstance(like, defaultdict):
            return defaultdict(like.default_factory, mapping)
        return mapping if type(like) is dict else type(like)(mapping)
    if kind == "namedtuple":
        parts = [rebuild(child, tensors, item) for child, item in zip(body[2], like, strict=True)]
        return type(like)._make(parts) if hasattr(like, "_make") else type(like)(parts)
    items = [rebuild(child, tensors, item) for child, item in zip(body, like, strict=True)]
    return items if kind == "list" else tuple(items)


def join(path: str, part: str) -> str:
    """Joins `cache` and `0` to `cache.0`."""
    return f"{path}.{part}" if path else part


@contextmanager
def located(place: str) -> Iterator[None]:
    """Adds `place`, such as `model.py:12: forward() returns`, to the errors of this module."""
    try:
        yield
    except ModelError as error:
        if error.code not in CODES:
            raise
        raise named(error.code, f"{place}{error}", error.hint) from None
    except Exception as error:  # code of the user's class raised it
        text = f"{place}an object whose attributes cannot be read: {type(error).__name__}: {first_line(error)}"
        raise ModelError("structure-unsupported", text, TYPES) from error


def _unsupported(path: str, message: str, hint: str = "") -> ModelError:
    return ModelError("structure-unsupported", f"{path or 'output'}: {message}", hint)


def _check_tensor(value: torch.Tensor, path: str) -> None:
    where = path or "output"
    if dtype_name(value.dtype) not in DTYPES:
        raise ModelError("dtype-unsupported", f"{where}: dtype {value.dtype} cannot be held in a bundle")
    if kind := not_dense(value):
        raise ModelError(
            "dtype-unsupported", f"{where}: expected a dense tensor, got a {kind} one", f"make it dense: {DENSE[kind]}"
        )


SPARSE = "sparse"

DENSE = {"nested": ".to_padded_tensor(0)", "quantized": ".dequantize()", SPARSE: ".to_dense()", "blocked": ".to_dense()"}
"""The method that makes a tensor of each kind dense."""


def not_dense(value: torch.Tensor) -> str:
    """Returns the key of DENSE for a tensor that is not dense, else ""."""
    if value.is_nested:
        return "nested"
    if value.is_quantized:
        return "quantized"
    if value.layout is torch.strided:
        return ""
    return "blocked" if value.is_mkldnn else SPARSE


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
