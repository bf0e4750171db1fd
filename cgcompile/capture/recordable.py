"""What all recordings of some programs share, made once in the parent: the file of weights, the saved programs, and the request."""

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
"""Bytes of the GPU's memory for a process's context, libraries and workspaces; contexts were seen to take up to 0.6 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordable:
    """What all recordings of some programs share: their weights are in the bundle's file, everything else is ready to be asked for.

    `request` is one for all keys, largest first; `stored` are the manifest's rows of the file of weights, without tables; `static`
    are bytes of memory `inputs` by key, `inputs` the self-test's; `need` are the bytes of the GPU's memory that a process takes.
    `program` is the hash of the programs without the values of their weights.
    """

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
    """What recordings of the programs need, at every build key of `calls`.  Files go into `folder`.

    `calls` are example tensors on any device; other leaves are constants of the call.

    `self_test`: other inputs of the same shapes, which are replayed `self_test_calls` times (default: once) from the first state.
    `code`: as in `Request`.  `placements` are nodes on the host by key (see `partition`), none for programs that are one graph;
    `uploads` is what the host makes by key, and `host_only` are weights that no graph reads.  Host regions are not recorded.
    `written`: by key, positions of the inputs, among the call's tensors, that its program writes to; `state`: buffers that one
    does, by name, and `varying` those of them that have any number of rows.  `donated`: outputs that a later call takes where they
    lie.  `bounds`: by key, given the rows of weights, and `floors`, as in `Request`.

    `stored` is where the file of weights goes, from which the processes take them (default: inside `folder`).  With `release` the
    programs' own tensors, but for state, give their memory back once it is written: nothing can run the programs afterwards.

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
    both = {key: tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (calls[key], self_test[key])) for key in calls}
    torch.save(both, folder / "calls.pt")
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
    """The most that eager PyTorch took on the GPU in this process beside the weights, bytes."""
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values() if tensor.is_cuda)
    return max(0, torch.cuda.max_memory_allocated() - held) if held else 0


def _release(tensors: Mapping[str, torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
    """Gives the memory of tensors on a GPU back, unless a kept one shares it."""
    held = {tensor.untyped_storage()._cdata for tensor in kept}
    for tensor in tensors.values():
        if tensor.is_cuda and tensor.untyped_storage()._cdata not in held:
            tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def _saved(programs: Programs, folder: Path) -> dict[IntKey, Path]:
    """The file of the program of every key; keys that share a program share the file."""
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
    tied = [name for name, shape in shapes_of(tensors).items() if shape.same_as in state or (shape.same_as and name in state)]
    broken = sorted((set(state) & _overlapping(tensors)) | set(tied))
    if broken:
        raise ModelError("state-shared", f"the program changes {', '.join(broken)}, which shares memory with another weight")


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of tensors that share memory with another without being the same: placed apart, the two no longer follow each other."""
    groups: dict[int, set[Any]] = {}
    for t in tensors.values():
        groups.setdefault(t.untyped_storage().data_ptr(), set()).add((t.data_ptr(), t.shape, t.stride()))
    return frozenset(n for n, t in tensors.items() if t.numel() and len(groups[t.untyped_storage().data_ptr()]) > 1)
