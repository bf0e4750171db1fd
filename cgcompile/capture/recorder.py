"""The capture recorder: an exported program and one call per int_key -> everything a bundle needs, by way of a GPU.

`record` asks short-lived processes of its own, so that CUPTI can listen before CUDA starts and the caller's process stays clean:
some that fill the compile cache in parallel, then two that capture every key and say what they saw.  Comparing the two
names every address (assemble.py); replaying the same fresh inputs in both shows whether the program is deterministic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from cgbundle.format.schema import IntKey, Weight
from cgbundle.tables.recording import ModuleState

from ..errors import BuildError, ModelError
from ..targets.cuda.lowering import cache_environment
from ..targets.cuda.memory_layout import PAD, Landing, Table, align, lay_out, tensor_bytes
from ..targets.cuda.tensors import entangled, freshen, inputs_bytes, program_tensors, row_major, settings, shapes_of, tolerance_of
from .assemble import Assembled, Graph, assemble
from .processes import run_all
from .request import Request
from .rows import Take

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call: (args, kwargs)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A replay of one key in the recording process: the bytes of every input and output tensor, row-major, in the call's order, and
    what the inputs that the program writes to held after it; `state`: what its state held, by the weights' names, in memory order.

    `deterministic`: two processes got the same bits.  `error` and `tolerance` are those of schema.Proof, against eager PyTorch.
    """

    inputs: tuple[bytes, ...]
    outputs: tuple[bytes, ...]
    written: tuple[bytes, ...]
    state: tuple[tuple[str, bytes], ...]
    deterministic: bool
    error: float
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """All that was recorded.  Mappings by int_key hold the keys largest first, as they were captured.

    `graphs`: one for a program that is one graph, whose inputs and outputs are those of the call, else one per graph region.
    `weights` are the program's tensors with their offsets; `tables` follow them in the same memory, which takes
    `weights_bytes` in all, those that the program writes to in memory `state`, which takes `state_bytes`.  `static` are the bytes
    that each key needs of memory `inputs`.
    `images` are cubins by sha256.  `driver` is the CUDA version of the recording machine's driver (13000 = 13.0).
    """

    graphs: dict[IntKey, tuple[Graph, ...]]
    static: dict[IntKey, int]
    trials: dict[IntKey, Trial]
    weights: tuple[Weight, ...]
    tables: tuple[Table, ...]
    weights_bytes: int
    state_bytes: int
    states: tuple[ModuleState, ...]
    images: dict[str, bytes] = field(repr=False)
    arch: str
    driver: int
    machine: str
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def record(
    program: torch.export.ExportedProgram,
    calls: Mapping[IntKey, Call],
    *,
    folder: Path,
    level: str = "inductor",
    specialize: str = "size",
    fresh: Mapping[IntKey, Call] | None = None,
    code: str = "",
    placements: Mapping[str, str] = MappingProxyType({}),
    landing: Mapping[IntKey, tuple[Landing, ...]] = MappingProxyType({}),
    elsewhere: frozenset[str] = frozenset(),
    written: tuple[int, ...] = (),
    state: Collection[str] = (),
    exam_calls: int = 1,
    cache: Path | None = None,
    workers: int | None = None,
    parallel: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Recorded:
    """Record a program at every key of `calls` (example tensors on any device; other leaves are constants of the call).

    `fresh` are other inputs of the same shapes for the exam, drawn here when not given.  `code`: as in `Request`.  `placements`
    (see `partition`) are nodes that are on the host, and `landing` by key where in memory `inputs`, behind the call's inputs, what
    the host makes is put; host regions are not part of what is recorded.  `elsewhere`: weights that no graph reads, which get no
    place.  `written`: positions of the inputs, among the call's tensors, that the program writes to; `state`: buffers that it does,
    by name.  `exam_calls`: how often the exam replays a key, from the first state on.  `folder` takes working files
    and the processes' logs; `cache` the compile cache (default: inside `folder`, so that nothing leaks between builds).
    `workers` processes lower at a time (default: half the processors, 1 for max-autotune, whose benchmarks would disturb
    each other); with `parallel` the two recorders share the GPU, else they run one after the other.

    Raises the refusals of errors.py.
    """
    folder.mkdir(parents=True, exist_ok=True)
    exam = fresh if fresh is not None else _fresh_calls(calls)
    _check_calls(calls, exam)
    tensors = program_tensors(program)
    _check_apart(state, tensors)
    weights, ends = lay_out({name: shape for name, shape in shapes_of(tensors).items() if name not in elsewhere}, state)
    torch.export.save(program, folder / "program.pt2")
    both = {key: tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (calls[key], exam[key])) for key in calls}
    torch.save(both, folder / "calls.pt")
    static = {key: inputs_bytes(_tensors(calls[key])) for key in calls}
    for key, rows in landing.items():
        static[key] = max([static[key], *(align(offset + tensor_bytes(dtype, shape)) for _, offset, dtype, shape, _ in rows)])
    keys = tuple(sorted(calls, key=lambda key: (static[key], key), reverse=True))

    def request(role: str, number: int, some: tuple[IntKey, ...]) -> Request:
        return Request(
            role=role,
            program=folder / "program.pt2",
            calls=folder / "calls.pt",
            result=folder / f"{role}{number}.result",
            keys=some,
            level=level,
            specialize=specialize,
            code=code,
            placements=tuple(placements.items()),
            landing=dict(landing),
            weights=weights,
            weights_end=ends.weights,
            state_end=ends.state,
            inputs_end=max(static.values(), default=0),
            settings=settings(),
            shift=bool(number),
            written=written,
            exam_calls=exam_calls,
        )

    environment = cache_environment(cache or folder / "cache")
    if level != "eager":
        shares = [(key,) for key in keys] if specialize == "size" else [keys]
        at_once = workers or (1 if level == "max-autotune" else max(1, (os.cpu_count() or 2) // 2))
        run_all([request("prime", i, share) for i, share in enumerate(shares)], folder, environment, at_once, tell)
    a, b = run_all([request("record", i, keys) for i in range(2)], folder, environment, 2 if parallel else 1, tell)
    tell("comparing the recordings")
    if a.mutated:
        raise ModelError("weight-mutated", f"a replay changes {', '.join(a.mutated)}")
    exams = {key: tuple(row_major(t) for t in _tensors(call)) for key, call in exam.items()}
    return _recorded(a, b, assemble(a, b, ends.weights), weights, ends.state, static, exams, tolerance_of(program))


def _recorded(
    a: Take,
    b: Take,
    assembled: Assembled,
    weights: tuple[Weight, ...],
    state_end: int,
    static: Mapping[IntKey, int],
    exams: Mapping[IntKey, tuple[bytes, ...]],
    tolerance: float,
) -> Recorded:
    trials = {}
    for mine, theirs in zip(a.exams, b.exams, strict=True):
        trials[mine.key] = Trial(
            inputs=exams[mine.key],
            outputs=mine.outputs,
            written=mine.written,
            state=mine.state,
            deterministic=(mine.outputs, mine.written, mine.state) == (theirs.outputs, theirs.written, theirs.state),
            error=max(mine.error, theirs.error),
            tolerance=tolerance,
        )
    return Recorded(
        graphs=assembled.graphs,
        static={key: static[key] + PAD for key in assembled.graphs},
        trials=trials,
        weights=weights,
        tables=assembled.tables,
        weights_bytes=assembled.weights_end + PAD,
        state_bytes=state_end + PAD if state_end else 0,
        states=assembled.states,
        images=a.images,
        arch=a.arch,
        driver=a.driver,
        machine=a.machine,
        versions=a.versions,
        notes=a.notes,
    )


def _tensors(call: Call) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]


def _fresh_calls(calls: Mapping[IntKey, Call]) -> dict[IntKey, Call]:
    """Other inputs for every key, the same in every build."""
    generator = torch.Generator().manual_seed(0)
    return {key: tree_map_only(torch.Tensor, lambda t: freshen(t, generator), call) for key, call in calls.items()}


def _check_calls(calls: Mapping[IntKey, Call], exam: Mapping[IntKey, Call]) -> None:
    for key, call in calls.items():
        if key not in exam:
            raise BuildError("sizes-differ", f"there are no fresh inputs for int_key {key}")
        shapes = []
        for leaves, spec in (tree_flatten(call), tree_flatten(exam[key])):
            shapes.append((spec, [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
        if shapes[0] != shapes[1]:
            raise BuildError("sizes-differ", f"int_key {key}: the fresh inputs have other shapes than the example's")


def _check_apart(state: Collection[str], tensors: Mapping[str, torch.Tensor]) -> None:
    tied = [name for name, shape in shapes_of(tensors).items() if shape.same_as in state or (shape.same_as and name in state)]
    broken = sorted((set(state) & entangled(tensors)) | set(tied))
    if broken:
        raise ModelError("shared-storage", f"the program changes {', '.join(broken)}, which shares memory with another weight")
