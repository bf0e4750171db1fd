"""The capture recorder: an exported program and one call per int_key -> everything a bundle needs, by way of a GPU.

CUPTI has to listen before CUDA starts, hence the processes: some fill the compile cache in parallel, then two capture every key.
They take the weights from the bundle's own file, so that no process holds a copy in the host's memory.
Comparing the two names every address (assemble.py); replaying the same inputs in both shows whether the program is deterministic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from cgbundle.format import archive
from cgbundle.format.schema import IntKey, Reserved, Weight
from cgbundle.tables.recording import ModuleState

from ..bundle.exam import ReplayedBytes
from ..errors import BuildError, ModelError
from ..export.programs import Programs
from ..export.torch_program import without_weights
from ..targets.cuda.chains import ChainedOutput
from ..targets.cuda.recorded import RecordedGraph
from ..targets.cuda.tensors import settings, static_bytes, tensors_of
from ..targets.kernels.conditions import condition_function, condition_image
from ..targets.memory_layout import PAD, Table, UploadedValue, WeightLayout, lay_out
from ..targets.weights import row_major, shapes_of, write_tables, write_weights
from ..util.tolerance import Difference
from ..util.workers import processors
from .assemble import Assembled, assemble, has_conditions
from .processes import RecorderProcesses, recorder_processes
from .request import PRIME, RECORD, Call, Request
from .take import Take


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A replay of one key on the exam's inputs.  `deterministic`: two processes got the same bits.  `differences` from eager
    PyTorch are as in RawExam, of the process where they are larger."""

    contents: ReplayedBytes
    deterministic: bool
    differences: tuple[Difference, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """All that was recorded.  Mappings by int_key hold the keys largest first, as they were captured.

    `graphs`: one for a program that is one graph, whose inputs and outputs are those of the call, else one per graph region.
    `weights`, `tables`, `static` (by key) and the bytes are those of RecordedProgram.  `stored` are the manifest's rows of the
    file of weights.  `images` are cubins by sha256.  `driver`: the CUDA version of the recording machine's driver (13000 = 13.0).
    """

    graphs: dict[IntKey, tuple[RecordedGraph, ...]]
    static: dict[IntKey, int]
    replays: dict[IntKey, Replay]
    weights: tuple[Weight, ...]
    stored: tuple[Weight, ...]
    tables: tuple[Table, ...]
    weights_bytes: int
    state_bytes: int
    states: tuple[ModuleState, ...]
    reserved: tuple[Reserved, ...]
    images: dict[str, bytes] = field(repr=False)
    arch: str
    driver: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordable:
    """What all recordings of some programs share: their weights are in the bundle's file, everything else is ready to be asked for.

    `request` is one for all keys, largest first; `stored` are the manifest's rows of the file of weights, without tables; `static`
    are bytes of memory `inputs` by key, `inputs` the exam's; `need` are the bytes of the GPU's memory that a process takes.
    """

    request: Request
    folder: Path
    layout: WeightLayout
    stored: tuple[Weight, ...]
    static: Mapping[IntKey, int]
    inputs: Mapping[IntKey, tuple[bytes, ...]] = field(repr=False)
    chained: Mapping[IntKey, Sequence[ChainedOutput]]
    need: int


def record(
    programs: Programs,
    calls: Mapping[IntKey, Call],
    *,
    folder: Path,
    level: str = "inductor",
    processes: RecorderProcesses | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **given: Any,
) -> Recorded:
    """Record the programs at every build key of `calls` at one level: `prepare` (which takes what else is `given`), `record_level`,
    and the tables, in a file beside that of the weights.

    `processes`: started ones, which have a cache; else `folder` takes the processes' logs, too, and `cache` is the compile cache
    (default: inside `folder`, so that nothing leaks between builds).  Raises what the two do.
    """
    recordable = prepare(programs, calls, folder=folder, tell=tell, **given)
    with ExitStack() as stack:
        running = processes or stack.enter_context(recorder_processes(folder, cache))
        made = record_level(recordable, level, running, workers=workers, tell=tell)
    return replace(made, stored=made.stored + write_tables(recordable.request.stored.with_name(archive.TABLES), made.tables))


def prepare(
    programs: Programs,
    calls: Mapping[IntKey, Call],
    *,
    folder: Path,
    specialize: str = "size",
    exam: Mapping[IntKey, Call],
    code: str = "",
    placements: Mapping[IntKey, Mapping[str, str]] = MappingProxyType({}),
    uploads: Mapping[IntKey, tuple[UploadedValue, ...]] = MappingProxyType({}),
    host_only: frozenset[str] = frozenset(),
    written: Mapping[IntKey, tuple[int, ...]] = MappingProxyType({}),
    state: Collection[str] = (),
    exam_calls: Mapping[IntKey, int] = MappingProxyType({}),
    chained: Mapping[IntKey, Sequence[ChainedOutput]] = MappingProxyType({}),
    stored: Path | None = None,
    release: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Recordable:
    """What recordings of the programs need, at every build key of `calls`.  Files go into `folder`.

    `calls` are example tensors on any device; other leaves are constants of the call.

    `exam`: other inputs of the same shapes, which are replayed `exam_calls` times (once by default) from the first state on.
    `code`: as in `Request`.  `placements` are nodes on the host by key (see `partition`), none for programs that are one graph;
    `uploads` is what the host makes by key, and `host_only` are weights that no graph reads.  Host regions are not recorded.
    `written`: by key, positions of the inputs, among the call's tensors, that its program writes to; `state`: buffers that one
    does, by name.  `chained`: outputs that a later call takes where they lie.

    `stored` is where the file of weights goes, from which the processes take them (default: inside `folder`).  With `release` the
    programs' own tensors, but for state, give their memory back once it is written: nothing can run the programs afterwards.

    Raises inputs-unlike, state-shared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_calls(calls, exam)
    tensors = programs.weights()
    _check_apart(state, tensors)
    layout = lay_out(shapes_of(tensors), state, host_only)
    file = stored or folder / archive.WEIGHTS
    tell("writing the weights")
    rows = write_weights(file, tensors, layout.rows)
    placed = tuple([replace(row, zeros=written.zeros) for row, written in zip(layout.rows, rows, strict=True)])
    activations = _activations(tensors)
    if release:
        _release({name: tensor for name, tensor in tensors.items() if name not in state}, kept=[tensors[name] for name in state])
    files = _saved(programs, folder)
    both = {key: tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (calls[key], exam[key])) for key in calls}
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
        exam_calls={key: exam_calls.get(key, 1) for key in calls},
    )
    return Recordable(
        request=request, folder=folder, layout=layout, stored=rows, static=static,
        inputs={key: tuple(row_major(t) for t in tensors_of(call)) for key, call in exam.items()},
        chained=chained, need=layout.weights_end + STATES * layout.state_end + largest + 2 * activations + MARGIN,
    )  # fmt: skip


def record_level(
    recordable: Recordable,
    level: str,
    processes: RecorderProcesses,
    *,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Recorded:
    """The programs recorded at one level of `lowering`.  Its tables are placed behind the weights, and not yet in the file.

    `workers` processes lower at a time (default: `priming`).  The two recorders run one after the other where the GPU's memory is
    short, and at max-autotune: what the first measured and chose, the second has to find in the cache.

    Raises weight-mutated, recorder-failed, extra-missing and kernel-failed for branches and loops, and what `assemble` and a
    recorder process raise.
    """
    keys, need = recordable.request.keys, recordable.need

    def request(role: str, number: int, some: tuple[IntKey, ...]) -> Request:
        result = recordable.folder / f"{level}-{role}{number}.result"
        return replace(recordable.request, role=role, level=level, keys=some, result=result, shift=bool(number))

    if number := priming(len(keys), level, recordable.request.specialize):
        at_once = fitting(min(workers or number, len(keys)), need)
        tell(f"lowering in {at_once} processes")
        processes.run([request(PRIME, i, keys[i::at_once]) for i in range(at_once)], tell, at_once)
        processes.end(PRIME)  # their memory is needed
    at_once = fitting(1 if level == "max-autotune" else 2, need)
    tell("recording" if at_once == 2 else "recording, one process after the other")
    a, b = processes.run([request(RECORD, i, keys) for i in range(2)], tell, at_once)
    tell("comparing the recordings")
    if a.mutated:
        raise ModelError("weight-mutated", f"a replay changes {', '.join(a.mutated)}")
    own = condition_image(a.arch) if has_conditions(a) else b""
    conditions = condition_function(own) if own else None
    assembled = assemble(a, b, recordable.layout.weights_end, recordable.chained, conditions)
    return _recorded(a, b, assembled, recordable, [own] if own else [])


MARGIN = 1 << 30
"""Bytes of the GPU's memory for a process's context, libraries and workspaces; contexts were seen to take up to 0.6 GB."""


STATES = 4
"""What a process holds of state at most: itself, what it held at first, and in the exam what a replay and eager PyTorch leave."""


def priming(keys: int, level: str, specialize: str) -> int:
    """How many processes fill the compile cache: half the processors at most, one where benchmarks would disturb each other."""
    if level == "eager":
        return 0
    return 1 if level == "max-autotune" or specialize == "shared" else min(keys, max(1, processors() // 2))


def fitting(wanted: int, need: int) -> int:
    """How many of `wanted` processes the GPU's free memory holds at a time, where each needs so many bytes; one at least."""
    return max(1, min(wanted, torch.cuda.mem_get_info()[0] // need))


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


def _recorded(a: Take, b: Take, assembled: Assembled, recordable: Recordable, images: Sequence[bytes]) -> Recorded:
    """`images` are ours, beside those that the recorders saw."""
    layout, inputs = recordable.layout, recordable.inputs
    replays = {}
    for mine, theirs in zip(a.exams, b.exams, strict=True):
        replays[mine.key] = Replay(
            contents=ReplayedBytes(inputs=inputs[mine.key], outputs=mine.outputs, written=mine.written, state=mine.state),
            deterministic=(mine.outputs, mine.written, mine.state) == (theirs.outputs, theirs.written, theirs.state),
            differences=tuple(
                [max(pair, key=lambda each: each.error) for pair in zip(mine.differences, theirs.differences, strict=True)]
            ),
        )
    return Recorded(
        graphs=assembled.graphs,
        static={key: end + PAD for key, end in recordable.static.items()},  # also of keys without a graph: all of it is on the host
        replays=replays,
        weights=layout.rows,
        stored=recordable.stored,
        tables=assembled.tables,
        weights_bytes=assembled.weights_end + PAD,
        state_bytes=layout.state_end + PAD if layout.state_end else 0,
        states=assembled.states,
        reserved=assembled.reserved,
        images={**a.images, **{hashlib.sha256(image).hexdigest(): image for image in images}},
        arch=a.arch,
        driver=a.driver,
    )


def _saved(programs: Programs, folder: Path) -> dict[IntKey, Path]:
    """The file of the program of every key; keys that share a program share the file."""
    files = {}
    for number, (_, program) in enumerate(programs.each):
        files[id(program)] = folder / f"program{number}.pt2"
        torch.export.save(without_weights(program), files[id(program)])
    return {key: files[id(program)] for key, program in programs.by_key.items()}


def _check_calls(calls: Mapping[IntKey, Call], exam: Mapping[IntKey, Call]) -> None:
    for key, call in calls.items():
        if key not in exam:
            raise BuildError("inputs-unlike", f"there are no fresh inputs for int_key {key}")
        shapes = []
        for leaves, spec in (tree_flatten(call), tree_flatten(exam[key])):
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
