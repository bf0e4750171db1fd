"""Loads a saved `torch.export` program (.pt2) as a source.  Its symbolic sizes are the declared dimensions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from ..errors import ModelError
from ..util.model_file import SAVE, check_saved, name_of
from .declared_sizes import SavedDimension
from .devices import markers  # noqa: F401 (a program may hold these operators)
from .source import Source
from .user_code import first_line

NAMES = "dimensions"
"""The extra file of a .pt2 with names of dimensions: `torch.export.save(program, path, extra_files={NAMES: "batch,seq"})`.  PyTorch
does not save the names of `Dim`s (2.11 and 2.13)."""


def load_saved(label: str) -> Source:
    """Loads a saved program.  Raises source-missing, source-invalid.

    Dimensions are in the order of their first occurrence in the inputs' shapes.  The extra file `NAMES` names them.  Without it, a
    single dimension is `batch`, and several are `dim0`, `dim1`, ...  Inputs are random: floats from a normal distribution, integers
    within the range of the program's example inputs.  An input that is not a tensor is a constant without a default, because the
    program requires it.
    """
    check_saved(label)
    extra = {NAMES: ""}
    program = _load_program(label, extra)
    if program.example_inputs is None:
        raise ModelError("source-invalid", f"{label}: the program was saved without its example inputs", SAVE)
    user = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in user]
    model = program.module()
    axes: dict[Any, list[str]] = {}
    for path, value in zip(_paths(program.example_inputs, model), values, strict=True):
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            for symbol in sorted(_free_symbols(size), key=str):
                axes.setdefault(symbol, []).extend([f"{path}.{axis}"] if size.node.expr == symbol else [])
    names = _names(label, extra[NAMES], len(axes))
    saved = tuple(
        [_saved_dimension(name, program, symbol, paths) for name, (symbol, paths) in zip(names, axes.items(), strict=True)]
    )
    inputs = _random_inputs(program, values, dict(zip(axes, names, strict=True)), names)
    return Source(
        name=name_of(label), label=label, code="", model=model, inputs=inputs, dimensions=tuple(names), owned=True, saved=saved
    )  # fmt: skip


def _load_program(label: str, extra: dict[str, Any]) -> Any:
    """Loads a program and its extra files.  torch only logs the reason of a failure, so this function catches and raises it."""
    reasons: list[BaseException] = []

    def keep_reason(record: logging.LogRecord) -> bool:
        reasons.extend([record.exc_info[1]] if record.exc_info and record.exc_info[1] else [])
        return False

    logger = logging.getLogger("torch.export")
    logger.addFilter(keep_reason)
    try:
        return torch.export.load(label, extra_files=extra)
    except Exception as error:
        reason = reasons[0] if reasons else error
        raise ModelError(
            "source-invalid", f"{label}: torch.export.load failed: {type(reason).__name__}: {first_line(reason)}",
            f"the file is damaged, or of another version of torch than {torch.__version__}: {SAVE}",
        ) from error  # fmt: skip
    finally:
        logger.removeFilter(keep_reason)


def _names(label: str, contents: str | bytes, count: int) -> list[str]:
    text = contents.decode() if isinstance(contents, bytes) else contents
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    if not names:
        return ["batch"] if count == 1 else [f"dim{index}" for index in range(count)]
    if len(names) != count or len(set(names)) != count or not all(name.isidentifier() for name in names):
        example = ",".join([*("batch", "seq")[:count], *[f"dim{index}" for index in range(2, count)]])
        raise ModelError(
            "source-invalid", f"{label}: its file {NAMES!r} has {text!r}, expected {count} different names",
            f"in the order of the inputs' shapes: torch.export.save(program, path, extra_files={{{NAMES!r}: {example!r}}})",
        )  # fmt: skip
    return names


def _paths(examples: Any, model: torch.nn.Module) -> list[str]:
    """Returns the path of every example input, such as `cache.0.key`."""
    positional = list(inspect.signature(model.forward).parameters)
    paths = []
    for (kind, first, *keys), _ in pytree.tree_flatten_with_path(examples)[0]:
        name = positional[first.idx] if kind.idx == 0 else first.key
        inner = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))) for key in keys]
        paths.append(".".join(map(str, [name, *inner])))
    return paths


def _saved_dimension(name: str, program: Any, symbol: Any, axes: list[str]) -> SavedDimension:
    bounds = program.range_constraints.get(symbol)
    low, high = (1, None) if bounds is None else (max(1, int(bounds.lower)), int(bounds.upper) if bounds.upper.is_Integer else None)
    return SavedDimension(name, tuple(axes), low, high)


def _free_symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _random_inputs(program: Any, values: list[Any], names: dict[Any, str], order: list[str]) -> Callable[..., Any]:
    examples, spec = pytree.tree_flatten(program.example_inputs)

    def inputs(**sizes: int) -> Any:
        drawn = []
        for example, value in zip(examples, values, strict=True):
            if isinstance(example, torch.Tensor):
                shape = [
                    int(size.node.expr.subs({s: sizes[n] for s, n in names.items()})) if _free_symbols(size) else int(size)
                    for size in value.shape
                ]
                drawn.append(_random_like(example, shape))
            else:
                drawn.append(example)
        args, kwargs = pytree.tree_unflatten(drawn, spec)
        return tuple(args), dict(kwargs)

    inputs.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in order]
    )
    return inputs


def _random_like(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if example.dtype.is_floating_point or example.dtype.is_complex:
        return torch.randn(shape, dtype=torch.float32).to(example.dtype)
    if example.dtype == torch.bool or not example.numel():
        return torch.ones(shape, dtype=example.dtype)
    low, high = int(example.min()), int(example.max())
    return torch.randint(low, high + 1, shape).to(example.dtype)
