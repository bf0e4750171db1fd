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
from typing import Any

import torch

from cgbundle.format import file_names
from cgbundle.format.schema import DonatedRange, IntKey, Weight
from cgbundle.tables.module_state import ModuleState

from ..bundle.self_test import ReplayedBytes
from ..errors import BuildError, ModelError
from ..export.programs import Programs
from ..targets.cuda.recorded import RecordedGraph
from ..targets.kernels.conditions import condition_function, condition_image
from ..targets.memory_layout import MORE, PAD, Table
from ..targets.weights import write_tables
from ..util.progress import Tell
from ..util.tolerance import Difference
from ..util.workers import processors
from .assemble import Assembled, assemble, has_conditions
from .compile_cache import compiled_path, keep_compiled, recall_compiled
from .processes import RecorderProcesses, recorder_processes
from .recordable import Recordable, prepare
from .request import PRIME, RECORD, Call, Request, with_more_rows
from .take import Take


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A replay of one key on the self-test's inputs.  `deterministic`: all replays got the same bits.  `differences` from eager
    PyTorch are as in RawSelfTest, of the process where they are larger; `indices` are those of the first."""

    contents: ReplayedBytes
    deterministic: bool
    differences: tuple[Difference, ...]
    indices: tuple[tuple[int, int], ...] = ()


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
    reserved: tuple[DonatedRange, ...]
    images: dict[str, bytes] = field(repr=False)
    arch: str
    driver: int


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
    **options: Any,
) -> Recorded:
    """Record the programs at every build key of `calls` at one level: `prepare`, which takes `options`, `record_level`, and the
    tables, in a file beside that of the weights.

    `processes`: started ones, which have a cache; else `folder` takes the processes' logs, too, and `cache` is the compile cache
    (default: inside `folder`, so that nothing leaks between builds).  Raises what the two do.
    """
    recordable = prepare(programs, calls, folder=folder, tell=tell, **options)
    with ExitStack() as stack:
        running = processes or stack.enter_context(recorder_processes(folder, cache))
        draft = record_level(recordable, level, running, workers=workers, tell=tell)
    return replace(draft, stored=draft.stored + write_tables(recordable.request.stored.with_name(file_names.TABLES), draft.tables))


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
    keys = recordable.request.keys
    path = compiled_path(recordable.program, level, recordable.request.specialize) if level != "eager" else None
    kept = recall_compiled(path, processes.cache)
    known = frozenset(key for key in keys if str(key) in kept)
    try:
        recorded = _record(recordable, level, known, processes, workers, tell)
    except BuildError as refusal:
        if not known or refusal.code != "recordings-differ":
            raise
        processes.end(RECORD)
        recorded = _record(recordable, level, frozenset(), processes, workers, tell)  # both compiled what the cache lacked
    if len(known) < len(keys):
        keep_compiled(path, kept.union(map(str, keys)), processes.cache)
    return recorded


def _record(
    recordable: Recordable, level: str, known: Collection[IntKey], processes: RecorderProcesses, workers: int | None, tell: Tell
) -> Recorded:
    """`known`: int_keys that the compile cache has."""
    keys, need = recordable.request.keys, recordable.need
    rows = (0, MORE if recordable.request.varying else 0)  # how many more the state of each recorder has

    def request(role: str, number: int, some: tuple[IntKey, ...], more: int) -> Request:
        result = recordable.folder / f"{level}-{role}{number}.result"
        worker_request = replace(recordable.request, role=role, level=level, keys=some, result=result, shift=bool(number))
        return with_more_rows(worker_request, more) if more else worker_request

    new = tuple([key for key in keys if key not in known])
    recording = [request(RECORD, i, keys, more) for i, more in enumerate(rows)]
    others = sorted(set(rows))  # state of other shapes is lowered by itself
    if number := priming(len(new) * len(others), level, recordable.request.specialize):
        at_once = fitting(min(workers or number, len(new) * len(others)), need)
        tell(f"lowering in {at_once} processes" if at_once > 1 else "lowering")
        if level != "max-autotune" and fitting(at_once + 2, need) == at_once + 2:
            processes.load(recording)
        step = max(1, at_once // len(others))
        shares = [(new[i::step], more) for more in others for i in range(min(step, len(new)))]
        processes.run([request(PRIME, i, *share) for i, share in enumerate(shares)], tell, at_once)
    processes.end(PRIME)  # their memory is needed
    at_once = fitting(1 if level == "max-autotune" else 2, need)
    tell("recording" if at_once == 2 else "recording, one process after the other")
    a, b = processes.run(recording, tell, at_once)
    tell("comparing the recordings")
    if a.mutated:
        raise ModelError("weight-mutated", f"a replay changes {', '.join(a.mutated)}")
    image = condition_image(a.arch) if has_conditions(a) else b""
    conditions = condition_function(image) if image else None
    begin = min([row.offset for row in recordable.layout.rows if row.name in recordable.request.varying], default=None)
    assembled = assemble(a, b, recordable.layout.weights_end, recordable.donated, conditions, begin)
    return _recorded(a, b, assembled, recordable, [image] if image else [])


def priming(keys: int, level: str, specialize: str) -> int:
    """How many processes fill the compile cache: half the processors at most, one where benchmarks would disturb each other."""
    if level == "eager" or not keys:
        return 0
    return 1 if level == "max-autotune" or specialize == "shared" else min(keys, max(1, processors() // 2))


def fitting(wanted: int, need: int) -> int:
    """How many of `wanted` processes the GPU's free memory holds at a time, where each needs so many bytes; one at least."""
    return max(1, min(wanted, torch.cuda.mem_get_info()[0] // need))


def _recorded(a: Take, b: Take, assembled: Assembled, recordable: Recordable, images: Sequence[bytes]) -> Recorded:
    """`images` are ours, beside those that the recorders saw."""
    layout, inputs = recordable.layout, recordable.inputs
    replays = {}
    for mine, theirs in zip(a.self_tests, b.self_tests, strict=True):
        replays[mine.key] = Replay(
            contents=ReplayedBytes(inputs=inputs[mine.key], outputs=mine.outputs, written=mine.written, state=mine.state),
            deterministic=mine.steady
            and theirs.steady
            and (mine.outputs, mine.written, mine.state) == (theirs.outputs, theirs.written, theirs.state),
            differences=tuple(
                [max(pair, key=lambda diff: diff.error) for pair in zip(mine.differences, theirs.differences, strict=True)]
            ),
            indices=mine.indices,
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
