"""The capture recorder: records an exported program on a GPU, at one example call per int_key, for a bundle.

CUPTI must subscribe before CUDA starts, so separate processes do the work.  Some fill the compile cache in parallel, then two
capture every key.  They read the weights from the bundle's file, so no process holds a copy in host memory.  A comparison of the
two takes shows which words are addresses (assemble.py).  Both replay the same inputs, which shows whether results are
deterministic.
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
from cgbundle.validate.module_state import ModuleState

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
    """A replay of one key on the self-test's inputs.  `deterministic`: all replays of both processes got the same bits.
    `differences`: as in RawSelfTest, the larger ones of the two processes.  `indices`: as in RawSelfTest, from the first
    process."""

    contents: ReplayedBytes
    deterministic: bool
    differences: tuple[Difference, ...]
    indices: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The result of a recording at one level.  Mappings by int_key list the largest key first, in the order of capture.

    `graphs`: by key, one per graph region; a program without host regions has one, with the call's inputs and outputs.
    `weights`, `tables`, `static` (by key), `weights_bytes` and `state_bytes`: as in RecordedProgram.  `stored`: the manifest's
    rows of the weights file.  `images`: cubins by SHA-256.  `driver`: CUDA version of the machine's driver (13000 = 13.0)."""

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
    """Records the programs at every build key of `calls` at one level, and writes the tables into a file beside the weights.

    Calls `prepare` with `options`, then `record_level`.  `processes`: processes to use, with their compile cache.  By default
    `record` starts processes, with logs in `folder` and the compile cache in `cache` (default: inside `folder`, so that builds
    share nothing).  Raises what the two functions raise.
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
    """Records the programs at one level of `lowering`.  Tables have offsets behind the weights, but are in no file yet.

    At most `workers` processes lower at a time (default: `priming`).  The two recorders run one after the other if GPU memory is
    short.  They also do at max-autotune, where the second must find the autotuning results of the first in the cache.

    Raises weight-mutated, recorder-failed, extra-missing and kernel-failed for branches and loops, and what `assemble` and a
    recorder process raise.
    """
    keys = recordable.request.keys
    path = compiled_path(recordable.program, level, recordable.request.specialize) if level != "eager" else None
    cached_keys = recall_compiled(path, processes.cache)
    lowered = frozenset(key for key in keys if str(key) in cached_keys)
    try:
        recorded = _record(recordable, level, lowered, processes, workers, tell)
    except BuildError as refusal:
        if not lowered or refusal.code != "recordings-differ":
            raise
        processes.end(RECORD)
        recorded = _record(recordable, level, frozenset(), processes, workers, tell)  # cache files were missing, so both compiled
    if len(lowered) < len(keys):
        keep_compiled(path, cached_keys.union(map(str, keys)), processes.cache)
    return recorded


def _record(
    recordable: Recordable, level: str, lowered: Collection[IntKey], processes: RecorderProcesses, workers: int | None, tell: Tell
) -> Recorded:
    """Lowers keys that are not in `lowered` in PRIME processes, then records all keys in two processes and compares the takes."""
    keys, need = recordable.request.keys, recordable.need
    rows = (0, MORE if recordable.request.varying else 0)  # extra rows of varying state in each of the two recorders

    def request(role: str, number: int, worker_keys: tuple[IntKey, ...], more: int) -> Request:
        result = recordable.folder / f"{level}-{role}{number}.result"
        worker_request = replace(recordable.request, role=role, level=level, keys=worker_keys, result=result, shift=bool(number))
        return with_more_rows(worker_request, more) if more else worker_request

    new = tuple([key for key in keys if key not in lowered])
    recording = [request(RECORD, i, keys, more) for i, more in enumerate(rows)]
    variants = sorted(set(rows))  # each number of rows of state is lowered separately
    if number := priming(len(new) * len(variants), level, recordable.request.specialize):
        at_once = fitting(min(workers or number, len(new) * len(variants)), need)
        tell(f"lowering in {at_once} processes" if at_once > 1 else "lowering")
        if level != "max-autotune" and fitting(at_once + 2, need) == at_once + 2:
            processes.load(recording)
        step = max(1, at_once // len(variants))
        shares = [(new[i::step], more) for more in variants for i in range(min(step, len(new)))]
        processes.run([request(PRIME, i, *share) for i, share in enumerate(shares)], tell, at_once)
    processes.end(PRIME)  # frees GPU memory for the recorders
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
    """Returns how many processes fill the compile cache: none at eager, else at most half the processors.  Only one at
    max-autotune, which runs benchmarks, and if all keys share their kernels."""
    if level == "eager" or not keys:
        return 0
    return 1 if level == "max-autotune" or specialize == "shared" else min(keys, max(1, processors() // 2))


def fitting(wanted: int, need: int) -> int:
    """Returns how many of `wanted` processes can run at a time, if each needs `need` bytes of free GPU memory; at least one."""
    return max(1, min(wanted, torch.cuda.mem_get_info()[0] // need))


def _recorded(a: Take, b: Take, assembled: Assembled, recordable: Recordable, images: Sequence[bytes]) -> Recorded:
    """Combines the assembled recordings with the replays of both takes.  `images`: cubins that the build adds."""
    layout, inputs = recordable.layout, recordable.inputs
    replays = {}
    for mine, theirs in zip(a.self_tests, b.self_tests, strict=True):
        replays[mine.key] = Replay(
            contents=ReplayedBytes(inputs=inputs[mine.key], outputs=mine.outputs, mutated=mine.mutated, state=mine.state),
            deterministic=mine.steady
            and theirs.steady
            and (mine.outputs, mine.mutated, mine.state) == (theirs.outputs, theirs.mutated, theirs.state),
            differences=tuple(
                [max(pair, key=lambda diff: diff.error) for pair in zip(mine.differences, theirs.differences, strict=True)]
            ),
            indices=mine.indices,
        )
    return Recorded(
        graphs=assembled.graphs,
        static={key: end + PAD for key, end in recordable.static.items()},  # also for keys without a graph: they run on the host
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
