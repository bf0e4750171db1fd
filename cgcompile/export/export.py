"""export: torch.export with the declared dimensions dynamic, over flat tensors.

The model is wrapped so that export sees only tensors in and tensors out; the nesting is kept as data (model/pytree.py).
Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from cgbundle.format.schema import Size
from cgbundle.format.size_expressions import linear

from ..errors import ModelError
from ..model import dynamic_axes as axes
from ..model.flat_module import FlatModule, run_eager, unwatched
from ..model.module_attributes import ATTRIBUTE_FIX, assignment_place, changed, marks
from ..model.side_effects import BRANCH, BRANCH_FIX, Obstacle, SideEffects
from ..model.source import Source, all_keys, sample
from ..model.user_code import first_line, user_line, user_place
from .composite_operators import without_composites
from .exported import EagerShapes, Exported, memory_order
from .higher_order import expanded
from .programs import Programs

STOPPED = ("export-failed", "branch-on-data", "size-excluded")
"""Causes by which torch.export stops."""


def export(source: Source, sizes: Mapping[str, tuple[int, ...]]) -> Exported:
    """The program for all sizes, whatever it holds.  Where Python branched on the value of a tensor, it is one of several: the
    obstacles say so, and `refuse_branches` refuses it.

    Raises dimension-unused, shape-irregular, size-excluded (with the dimension), export-failed (with the user's file and line),
    branch-on-data and structure-unsupported.
    """
    shapes = axes.input_shapes(source, sizes)
    like = sample(source, axes.probe_sizes(sizes))
    _make_dense(source.model)
    flat = FlatModule(source.model, like, source.device)
    calls: list[SideEffects] = []
    flat.watch = calls.append
    seen = _try_eager(source, flat, sizes)
    flat.earlier = calls[0]
    left = _changed_attributes(source, flat, sizes)
    try:
        program, obstacles = _past_branches(source, flat, shapes, sizes, calls)
    except ModelError as error:
        if left and error.code in STOPPED:  # the likelier cause, and one that has to go anyway
            raise ModelError(
                "state-changed", f"{left[0].where or source.label}: {left[0].message}, which is no buffer: {error}", ATTRIBUTE_FIX
            ) from error
        raise
    flat.watch = unwatched
    return Exported(
        source=source, sizes=sizes, programs=Programs(by_key=dict.fromkeys(all_keys(sizes), program), dynamic=True), flat=flat,
        shapes=tuple(shapes), eager_shapes=tuple(seen),
        obstacles=(*left, *obstacles),
    )  # fmt: skip


def refuse_branches(exported: Exported) -> None:
    """Raises branch-on-data where Python branched on the value of a tensor."""
    for obstacle in exported.obstacles:
        if obstacle.rule == "data-dependent-branch":
            raise _branch(obstacle.where or exported.source.label, obstacle.source)


def _past_branches(
    source: Source,
    flat: FlatModule,
    shapes: Sequence[tuple[Size, ...]],
    sizes: Mapping[str, tuple[int, ...]],
    calls: list[SideEffects],
) -> tuple[ExportedProgram, tuple[Obstacle, ...]]:
    """A branch on a number that Python read out of a tensor stops the export.  It is made again with the number that eager PyTorch
    had, so that the checks see what comes after."""
    passed: list[Obstacle] = []
    while True:
        try:
            program = _export(source, flat, shapes, sizes)
        except ModelError as error:
            stop = error.__cause__
            more = calls[-1].reads_of(_free_symbols(stop)) - flat.known
            if error.code != "branch-on-data" or not more or stop is None:
                raise
            where, line = user_place(stop)
            passed.append(Obstacle(rule="data-dependent-branch", message=BRANCH, where=where, source=line))
            flat.known = flat.known | more
        else:
            return program, tuple(dict.fromkeys([*passed, *calls[-1].obstacles]))


def _free_symbols(error: BaseException | None) -> frozenset[Any]:
    """The symbols of the condition that stopped an export."""
    return frozenset(getattr(getattr(error, "cond", None), "free_symbols", ()))


def _make_dense(model: torch.nn.Module) -> None:
    """Weights with gaps or overlaps (an expanded buffer, a slice) become row-major copies: a bundle stores dense tensors only."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.permute(memory_order(buffer)).is_contiguous():
                module._buffers[name] = buffer.contiguous()
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.permute(memory_order(parameter)).is_contiguous():
                parameter.data = parameter.data.contiguous()


def _try_eager(source: Source, flat: FlatModule, sizes: Mapping[str, tuple[int, ...]]) -> list[EagerShapes]:
    """Runs the model at its smallest and largest sizes.  Raises size-excluded, structure-unsupported."""
    results, shapes = [], []
    for pick in (0, -1):
        chosen = {name: values[pick] for name, values in sizes.items()}
        at = ", ".join(f"{name}={size}" for name, size in chosen.items())
        try:
            outputs = run_eager(flat, sample(source, chosen).tensors).outputs
        except Exception as error:
            if isinstance(error, ModelError):
                raise
            place = user_line(error, source.label) or source.label
            raise ModelError(
                "size-excluded", f"{place}: the model fails in eager PyTorch at {at or 'its inputs'}: {first_line(error)}"
            ) from error
        results.append(flat.result)
        shapes.append((chosen, [tuple(output.shape) for output in outputs]))
    if results[0] != results[1]:
        raise ModelError(
            "structure-unsupported",
            f"{source.label}: the result's nesting or constants change with the sizes: {results[0]} and {results[1]}",
            "return tensors, and numbers that do not depend on a declared dimension",
        )
    return shapes


def _changed_attributes(source: Source, flat: FlatModule, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Obstacle, ...]:
    """The attributes that a call changes, at every call: the first ones may fill caches."""
    tensors = sample(source, {name: values[0] for name, values in sizes.items()}).tensors
    watch, flat.watch = flat.watch, unwatched
    run_eager(flat, tensors)
    before = marks(source.model)
    run_eager(flat, tensors)
    flat.watch = watch
    names = changed(before, marks(source.model))
    places = {name: assignment_place(source.model, name) for name in names}
    return tuple(
        [
            Obstacle(rule="mutated-attribute", message=f"forward() changes {name!r}", where=where, source=line)
            for name, (where, line) in places.items()
        ]
    )


def _export(
    source: Source, flat: FlatModule, shapes: Sequence[tuple[Size, ...]], sizes: Mapping[str, tuple[int, ...]]
) -> ExportedProgram:
    # export takes a dimension with a single value above 1 for a constant: the range always goes beyond the sizes
    roots = {name: Dim(name, min=values[0], max=max(values[0] + 3, values[-1])) for name, values in sizes.items()}
    try:
        return _torch_export(flat, shapes, roots)
    except Exception as error:
        narrower = _narrower(str(error), roots)
        if narrower is None:
            raise _explain(source, error, sizes) from error
    try:
        return _torch_export(flat, shapes, narrower)
    except Exception as error:
        raise _explain(source, error, sizes) from error


def _torch_export(flat: FlatModule, shapes: Sequence[tuple[Size, ...]], roots: Mapping[str, Any]) -> ExportedProgram:
    dynamic = tuple([{axis: _dim(size, roots) for axis, size in enumerate(shape) if not isinstance(size, int)} for shape in shapes])
    said = io.StringIO()
    with torch.no_grad(), redirect_stderr(said), _quiet(logging.getLogger("torch.fx.experimental.symbolic_shapes")):
        program = torch.export.export(flat, _separate(flat.like.tensors), dynamic_shapes=(dynamic,), strict=False)
    sys.stderr.write(said.getvalue())
    return without_composites(expanded(program))


def _separate(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, each in a storage of its own where it shared one: in a bundle no input is a view of another.

    torch cannot make a program functional that writes to such.  A tensor whose elements share memory stays as it is.
    """
    seen: set[int] = set()
    made = []
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen and all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        seen.add(storage)
        made.append(tensor)
    return tuple(made)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """A failing export logs what it could not guard on, and prints its graph: what they mean is in the exception."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _dim(size: Size, roots: Mapping[str, Any]) -> Any:
    rule = linear(size)
    assert rule is not None, size
    name, scale, offset = rule
    made = roots[name] if scale == 1 else scale * roots[name]
    return made + offset if offset else made


def _narrower(text: str, roots: Mapping[str, Any]) -> dict[str, Any] | None:
    """torch.export names the constraint that it found as suggested fixes: "batch = Dim('batch', min=2)", "seq = 8*_seq".

    A range or a multiple is taken up, because every declared size is checked against the exported program afterwards; None for
    anything else, a constant above all.
    """
    _, found, fixes = text.partition("Suggested fixes:")
    if not found:
        return None
    made = dict(roots)
    for name, low, high in re.findall(r"^\s*(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)\s*$", fixes, re.MULTILINE):
        made[name] = Dim(name, min=int(low or 1), max=int(high) if high else None)
    for name, scale, root, offset in re.findall(r"^\s*(\w+) = (?:(\d+)\*)?(_\w+)(?: ([+-] \d+))?\s*$", fixes, re.MULTILINE):
        step = int(offset.replace(" ", "")) if offset else 0
        base = made.get(root) or Dim(root)
        made[name] = int(scale or 1) * base + step if step else int(scale or 1) * base
    return made if made != dict(roots) and made.keys() >= roots.keys() and not _constants(fixes) else None


_INPUT_SIZE = r"L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]"
"""How export spells the size of an input's axis."""


def _constants(fixes: str) -> dict[str, str]:
    """Dimensions that export found to be constant, with the value."""
    return dict(re.findall(r"^\s*(\w+) = (\d+)\s*$", fixes, re.MULTILINE))


def _explain(source: Source, error: Exception, sizes: Mapping[str, tuple[int, ...]]) -> ModelError:
    text = str(error)
    constants = _constants(text)
    for name in sizes:
        if name in constants:
            return ModelError(
                "size-excluded",
                f"{source.label}: dimension {name!r} cannot vary: the model's code fixes it to {constants[name]}",
                f"remove what depends on the value of {name} (an if, int(), a constant in a view), or declare no such dimension",
            )
        if re.search(rf"\b{name}\b", text) and "onstraint" in text:
            lines = [line.strip(" -*") for line in text.splitlines() if re.search(rf"\b{name}\b", line)]
            line = next((line for line in lines if line.startswith("Not all values")), lines[0])
            return ModelError("size-excluded", f"{source.label}: dimension {name!r}: {re.sub(_INPUT_SIZE, name, line)}")
    if isinstance(error, GuardOnDataDependentSymNode):
        place, line = user_place(error)
        return _branch(place or source.label, line)
    place = user_line(error, source.label)
    if not place:
        found = re.search(r'File "([^"]+)", line (\d+), in forward', text)
        place = f"{found[1]}:{found[2]}" if found else source.label
    return ModelError("export-failed", f"{place}: torch.export cannot take the model: {type(error).__name__}: {first_line(error)}")


def _branch(where: str, line: str) -> ModelError:
    return ModelError("branch-on-data", f"{where}: data-dependent-branch: {BRANCH}: {line}", BRANCH_FIX)
