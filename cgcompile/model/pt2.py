"""A saved `torch.export` program (.pt2) as a source: its symbolic sizes are the declared dimensions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from ..errors import BuildError, ModelError
from .devices import markers  # noqa: F401 (a program may hold these operators)
from .source import Source
from .user_code import first_line


def load_saved(label: str) -> Source:
    """Raises source-missing, source-invalid.

    Dimensions are named `dim0`, `dim1`, ... in the order in which they first occur in the inputs' shapes (a .pt2 keeps no
    names), or `batch` where there is one.  Inputs are drawn like the program's own example inputs: floats normal, integers
    within the examples' range.  What is no tensor is a constant without a default: the program, too, wants it given.
    """
    if not os.path.isfile(label):
        raise BuildError("source-missing", f"{label}: no such file")
    try:
        program = torch.export.load(label)
    except Exception as error:
        raise ModelError(
            "source-invalid", f"{label}: torch.export.load failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    if program.example_inputs is None:
        raise ModelError("source-invalid", f"{label}: the program was saved without example inputs")
    user = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in user]
    symbols: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            for size in value.shape:
                for symbol in sorted(_free(size), key=str):
                    if symbol not in symbols:
                        symbols.append(symbol)
    names = ["batch"] if len(symbols) == 1 else [f"dim{index}" for index in range(len(symbols))]
    inputs = _random_inputs(program, values, dict(zip(symbols, names, strict=True)), names)
    return Source(
        name=Path(label).stem, label=label, code="", model=program.module(), inputs=inputs, dimensions=tuple(names), owned=True
    )  # fmt: skip


def _free(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _random_inputs(program: Any, values: list[Any], names: dict[Any, str], order: list[str]) -> Callable[..., Any]:
    examples, spec = pytree.tree_flatten(program.example_inputs)

    def inputs(**sizes: int) -> Any:
        drawn = []
        for example, value in zip(examples, values, strict=True):
            if isinstance(example, torch.Tensor):
                shape = [
                    int(size.node.expr.subs({s: sizes[n] for s, n in names.items()})) if _free(size) else int(size)
                    for size in value.shape
                ]
                drawn.append(_like(example, shape))
            else:
                drawn.append(example)
        args, kwargs = pytree.tree_unflatten(drawn, spec)
        if args and kwargs:
            raise ValueError("programs with positional and keyword inputs at once are not supported")
        return kwargs or args

    inputs.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in order]
    )
    return inputs


def _like(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if example.dtype.is_floating_point or example.dtype.is_complex:
        return torch.randn(shape, dtype=torch.float32).to(example.dtype)
    if example.dtype == torch.bool or not example.numel():
        return torch.ones(shape, dtype=example.dtype)
    low, high = int(example.min()), int(example.max())
    return torch.randint(low, high + 1, shape).to(example.dtype)
