"""Prepares, once in the parent, what all recordings of the programs share: weights file, saved programs and request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from cgbundle.format import file_names
from cgbundle.format.schema import IntKey, Weight

from ..errors import BuildError, ModelError
from ..export.programs import Programs
from ..export.torch_program import save_program, without_weights
from ..targets.cuda.donations import DonatedOutput
from ..targets.cuda.tensors import settings, static_bytes, tensors_of
from ..targets.memory_layout import RECORDED_STATES, UploadedValue, WeightLayout, lay_out
from ..targets.weights import row_major, shapes_of, write_weights
from ..transforms.error_bounds import ErrorBound
from .compile_cache import program_hash
from .request import RECORD, Call, Request

MARGIN = 1 << 30
"""Bytes of GPU memory for a process's context, libraries and workspaces.  The largest measured context took 0.6 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordable:
    """What all recordings of the programs share.  The weights are in the bundle's file already.

    `request`: for all keys, largest first; `record_level` completes it.  `stored`: the manifest's rows of the weights file,
    without tables.  `static`: bytes of memory `inputs`, by key.  `inputs`: the self-test's inputs.  `need`: bytes of GPU memory
    that one process takes.  `program`: hash of the programs without the values of their weights."""

    request: Request
    folder: Path
    layout: WeightLayout
    stored: tuple[Weight, ...]
    static: Mapping[IntKey, int]
    inputs: Mapping[IntKey, tuple[bytes, ...]] = field(repr=False)
    donated: Mapping[IntKey, Sequence[DonatedOutput]]
    need: int
    program: str


def prepare(
    programs: Programs,
    calls: Mapping[IntKey, Call],
    *,
    folder: Path,
    specialize: str = "size",
    self_test: Mapping[IntKey, Call],
    code: str = "",
    placements: Mapping[IntKey, Mapping[str, str]] = MappingProxyType({}),
    uploads: Mapping[IntKey, tuple[UploadedValue, ...]] = MappingProxyType({}),
    host_only: frozenset[str] = frozenset(),
    written: Mapping[IntKey, tuple[int, ...]] = MappingProxyType({}),
    state: Collection[str] = (),
    varying: Collection[str] = (),
    self_test_calls: Mapping[IntKey, int] = MappingProxyType({}),
    donated: Mapping[IntKey, Sequence[DonatedOutput]] = MappingProxyType({}),
    bounds: Callable[[Sequence[Weight]], Mapping[IntKey, tuple[ErrorBound, ...]]] = lambda rows: {},
    floors: Mapping[IntKey, float] = MappingProxyType({}),
    stored: Path | None = None,
    release: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Recordable:
    """Writes the files that recordings at the build keys of `calls` need into `folder`, and creates the request.

    `calls`: example arguments.  Tensors may be on any device; other leaves are constants of the call.  `self_test`: other values
    of the same shapes, replayed `self_test_calls` times (default: once) from the initial state.  `code`: as in `Request`.
    `placements`: by key, nodes on the host (see `partition`), empty for programs of one graph.  `uploads`: by key, values that the
    host computes.  `host_only`: weights that no graph reads.  `written`: by key, which of the call's tensors the program writes to.
    `state`: names of buffers that a program writes to; `varying`: those of them with a variable number of rows.  `donated`:
    outputs that a later call reads in place.  `bounds` (a function of the weights' rows) and `floors`: by key, as in `Request`.

    `stored`: path of the weights file, which the processes read (default: inside `folder`).  `release`: free the memory of the
    programs' own tensors, except state, after the file is written; then the programs can no longer run.

    Raises inputs-unlike, state-shared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_calls(calls, self_test)
    tensors = programs.weights()
    _check_apart(state, tensors)
    layout = lay_out(shapes_of(tensors), state, host_only, varying)
    file = stored or folder / file_names.WEIGHTS
    tell("writing the weights")
    rows = write_weights(file, tensors, layout.rows)
    placed = tuple([replace(row, zeros=written.zeros) for row, written in zip(layout.rows, rows, strict=True)])
    activations = _activations(tensors)
    if release:
        _release({name: tensor for name, tensor in tensors.items() if name not in state}, kept=[tensors[name] for name in state])
    files = _saved(programs, folder)
    cpu_calls = {key: tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (calls[key], self_test[key])) for key in calls}
    torch.save(cpu_calls, folder / "calls.pt")
    static = {key: static_bytes(tensors_of(calls[key]), uploads.get(key, ())) for key in calls}
    largest = max(static.values(), default=0)
    request = Request(
        role=RECORD,
        programs=files,
        calls=folder / "calls.pt",
        result=folder / "result",
        keys=tuple(sorted(calls, key=lambda key: (static[key], tuple(key)), reverse=True)),
        level="",
        specialize=specialize,
        code=code,
        placements={key: dict(placed) for key, placed in placements.items()},
        uploads=dict(uploads),
        stored=file.absolute(),
        weights=placed,
        weights_end=layout.weights_end,
        state_end=layout.state_end,
        inputs_end=largest,
        settings=settings(),
        shift=False,
        written={key: written.get(key, ()) for key in calls},
        self_test_calls={key: self_test_calls.get(key, 1) for key in calls},
        varying=tuple(varying),
        bounds=dict(bounds(layout.rows)),
        floors=dict(floors),
    )
    return Recordable(
        request=request, folder=folder, layout=layout, stored=rows, static=static,
        inputs={key: tuple(row_major(t) for t in tensors_of(call)) for key, call in self_test.items()},
        donated=donated, program=program_hash(programs, [sorted(placement) for placement in placements.values()]),
        need=layout.weights_end + RECORDED_STATES * layout.state_end + largest + 2 * activations + MARGIN,
    )  # fmt: skip


def _activations(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the peak GPU memory of eager PyTorch in this process without the weights, in bytes; 0 if no weight is on a GPU."""
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values() if tensor.is_cuda)
    return max(0, torch.cuda.max_memory_allocated() - weight_bytes) if weight_bytes else 0


def _release(tensors: Mapping[str, torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
    """Frees the storages of tensors on a GPU, except storages that a tensor in `kept` shares."""
    kept_storages = {tensor.untyped_storage()._cdata for tensor in kept}
    for tensor in tensors.values():
        if tensor.is_cuda and tensor.untyped_storage()._cdata not in kept_storages:
            tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def _saved(programs: Programs, folder: Path) -> dict[IntKey, Path]:
    """Saves each distinct program without weights, and returns the file for every key."""
    files = {}
    for number, (_, program) in enumerate(programs.distinct):
        files[id(program)] = folder / f"program{number}.pt2"
        save_program(without_weights(program), files[id(program)])
    return {key: files[id(program)] for key, program in programs.by_key.items()}


def _check_calls(calls: Mapping[IntKey, Call], self_test: Mapping[IntKey, Call]) -> None:
    for key, call in calls.items():
        if key not in self_test:
            raise BuildError("inputs-unlike", f"there are no fresh inputs for int_key {key}")
        shapes = []
        for leaves, spec in (tree_flatten(call), tree_flatten(self_test[key])):
            shapes.append((spec, [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
        if shapes[0] != shapes[1]:
            raise BuildError("inputs-unlike", f"int_key {key}: the fresh inputs have other shapes than the example's")


def _check_apart(state: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
    ties = [name for name, shape in shapes_of(tensors).items() if shape.same_as in state or (shape.same_as and name in state)]
    shared_names = sorted((set(state) & _overlapping(tensors)) | set(ties))
    if shared_names:
        raise ModelError("state-shared", f"the program changes {', '.join(shared_names)}, which shares memory with another weight")


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Returns names of tensors that share a storage with a different view.  A bundle places them separately, so a write to one
    would no longer change the other."""
    groups: dict[int, set[Any]] = {}
    for t in tensors.values():
        groups.setdefault(t.untyped_storage().data_ptr(), set()).add((t.data_ptr(), t.shape, t.stride()))
    return frozenset(n for n, t in tensors.items() if t.numel() and len(groups[t.untyped_storage().data_ptr()]) > 1)
