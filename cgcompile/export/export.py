"""`export` runs torch.export over flat tensors, with the declared dimensions dynamic.  If that fails, it runs once per int_key.

The model is wrapped so that inputs and outputs are tuples of tensors.  Their nesting is stored as data (model/pytree.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey, Size

from ..errors import ModelError
from ..model import dynamic_axes as axes
from ..model.devices.index_guard import guarded_indices
from ..model.flat_module import FlatModule, held_weights, unwatched
from ..model.nondeterminism.repeated_calls import apart, unrepeated
from ..model.side_effects import ASSIGNED, NOTHING, UNREAD, Asserted, Obstacle, SideEffects
from ..model.source import Source, all_keys, sample, written_method
from ..model.tracing.attributes import ATTRIBUTE_FIX
from ..model.tracing.held_tensors import make_attribute
from ..model.tracing.questions import ALL, FLAGS_ALONE, KNOWN
from ..model.user_code import defined, place
from ..util.progress import Tell
from .exported import EagerShapes, Exported
from .first_calls import changed_weights, first_calls, sample_at
from .functionalization import size_from_a_float, varying_groups
from .paths import MAX_PATHS
from .paths.explore import PathsRefused
from .paths.program import WayStopped, with_paths
from .programs import Programs, coarsest, with_shared_constants
from .signature.eager_check import check_dynamic, check_result, check_static, eager_shapes
from .torch_export import branch, export_dynamic, export_static, past_branches
from .weight_values import baked_values, baked_weights, make_dense, unread_attributes

STOPPED = ("export-failed", "data-dependent-branch", "size-excluded", "data-dependent-shape")
"""Codes of errors that stop torch.export."""

OF_SHAPES = ("export-failed", "size-excluded")
"""Codes of errors that constant sizes may avoid."""

OF_VALUES = ("data-dependent-branch", "data-dependent-shape")
"""Codes of errors that constant sizes may avoid, because values that depend only on sizes are then known."""

ONE_SIZE = "calls write to state, and every dimension has one size"
"""`Programs.reason` if sizes are constants because no call is padded and each dimension has one size."""

PROBES = 8
"""Maximum number of undeclared sizes of a dimension at which eager PyTorch runs to get output shapes."""


def untold(text: str) -> None:
    """Reports no progress: the default of `tell`."""


def export(
    source: Source,
    sizes: Mapping[str, tuple[int, ...]],
    alone: bool = True,
    max_paths: int = MAX_PATHS,
    elsewhere: Set[str] = frozenset(),
    tell: Tell = untold,
) -> Exported:
    """Exports one program for all sizes, or one for each int_key if torch.export cannot keep the dimensions dynamic.

    Tensors of the model that it writes to become buffers.  If Python branches on the value of a tensor, the program may have only
    one side.  Then the result has an obstacle, for which `refuse_branches` raises.  `alone`: the model has no other entry, so
    errors need not name this one.  `elsewhere`: buffers that other entries write to; Python may not read their values.
    `max_paths`: maximum number of exported paths through the model's Python code.  `tell`: reports progress.

    Raises dimension-unused, shape-irregular, size-excluded (with the dimension), eager-failed and export-failed (with the user's
    file and line), data-dependent-branch, data-dependent-shape and structure-unsupported.
    """
    try:
        return _exported(source, sizes, alone, max_paths, elsewhere, tell)
    except ModelError as error:
        entry_error = error if alone else _of_entry(error, source)
        if entry_error is error:
            raise
        raise entry_error from error.__cause__


def with_unwritten(exports: Sequence[Exported], max_paths: int = MAX_PATHS) -> list[Exported]:
    """Returns the exports of one model's entries.  Exports an entry again without the value of a buffer if Python read the value,
    and another entry writes to the buffer.  Raises the errors of `export`."""
    while True:
        writes = frozenset().union(*[entry.written for entry in exports])
        if all(entry.baked.keys().isdisjoint(writes) for entry in exports):
            return list(exports)
        exports = [
            entry
            if entry.baked.keys().isdisjoint(writes)
            else export(entry.source, entry.sizes, len(exports) == 1, max_paths, writes)
            for entry in exports
        ]


def _exported(
    source: Source, sizes: Mapping[str, tuple[int, ...]], alone: bool, max_paths: int, elsewhere: Set[str], tell: Tell
) -> Exported:
    shapes = axes.input_shapes(source, sizes)
    like = sample(source, axes.probe_sizes(sizes))
    make_dense(source)
    flat = FlatModule(source.model, like, source.device, source.target_device, source.entry, source.capability)
    effects = first_calls(source, flat, sizes)
    constant = bool(effects.written) and bool(sizes) and all(len(values) == 1 for values in sizes.values())
    job = _Job(source=source, flat=flat, shapes=shapes, sizes=sizes, max_paths=max_paths, tell=tell, constant=constant)
    calls = list(effects.calls)
    flat.watch = calls.append
    flat.assigned = tuple(effects.changes)
    changed = tuple([*effects.changes.values(), *[obstacle for obstacle, _ in effects.counters.values()]])
    try:
        draft, writes = _with_known(job, calls, elsewhere, effects.written)
        unread = (
            unread_attributes(draft.programs, {name: (name,) for name in effects.counters} | dict(effects.holding)) if alone else []
        )
        for name in unread:
            if name in effects.counters:
                make_attribute(source.model, name, effects.counters[name][1])
            for buffer in effects.holding.get(name, ()):
                path, _, leaf = buffer.rpartition(".")
                delattr(source.model.get_submodule(path), leaf)
        if unread:
            flat.follow_buffers()
            draft, writes = _with_known(job, calls, elsewhere, writes)
    except ModelError as error:
        if changed and error.code in STOPPED:  # either can be the cause: torch.export also fails for models that keep nothing
            raise ModelError(
                "state-changed",
                f"{changed[0].where or source.label}: {changed[0].message}, which is not a buffer, and the export fails: {error}",
                f"either can be the cause; for the attribute, {ATTRIBUTE_FIX}; for the export, {error.hint}",
            ) from error
        raise
    flat.watch = unwatched
    outside = effects.outside
    if not effects.changes and not outside and apart(effects.first, effects.second.results):
        written = defined(written_method(source.model, source.entry))
        outside = unrepeated(flat, sample_at(source, sizes, 0), effects.second, coarsest(draft.programs), written)
    uncounted = tuple([replace(effects.counters[name][0], rule=UNREAD) for name in unread if name in effects.counters])
    early = set().union(*[call.early for call in calls])
    rules = {
        name: UNREAD if name in unread else change.rule if name in early else ASSIGNED for name, change in effects.changes.items()
    }
    changed = tuple([replace(change, rule=rules[name]) for name, change in effects.changes.items()])
    baked = baked_values(calls)
    return Exported(
        source=source, sizes=sizes, programs=draft.programs, flat=flat, shapes=tuple(shapes),
        eager_shapes=(*effects.shapes, *draft.eager_shapes),
        obstacles=(*changed, *uncounted, *outside, *effects.notes, *draft.obstacles, *baked_weights(draft.programs, baked)),
        baked={name: where or source.label for name, (where, _) in baked.items()},
        written=writes,
    )  # fmt: skip


def _with_known(job: _Job, calls: list[SideEffects], elsewhere: Set[str], writes: frozenset[str]) -> tuple[_Draft, frozenset[str]]:
    """Exports the model so that Python can read the values of parameters and buffers that nothing writes to.  Excluded are
    `elsewhere`, which other entries write to, and `writes`, which this entry is known to write to.  If Python read the value of
    a weight that a path writes to, exports again without this value.  Also returns all names that this entry writes to."""
    flat = job.flat
    first_effects, before = flat.earlier, list(calls)
    while True:
        flat.weights = held_weights(flat.model, elsewhere | writes)
        flat.earlier, flat.known, flat.asserted, flat.as_eager = first_effects, frozenset(), NOTHING, ""
        failed: ModelError | None = None
        try:
            draft = _as_eager(job, calls)
        except ModelError as error:
            failed = error
        baked = baked_values(calls).keys()
        writes = writes.union(*[call.written for call in calls])
        if failed is None and baked.isdisjoint(writes):
            writes = writes.union(changed_weights(flat, sample_at(job.source, job.sizes, 0), baked))
        if baked.isdisjoint(writes):
            break
        calls[:] = before
    if failed is not None:
        raise failed
    return draft, writes


def _of_entry(error: ModelError, source: Source) -> ModelError:
    """Returns the error with the entry's name added, unless its text names the entry or a line of the model."""
    text, where = str(error), f"{error.where}: " if error.where else ""
    if re.search(rf"\b{source.entry}\(|'{source.entry}'", text) or (error.code != "export-failed" and error.where != source.label):
        return error
    return ModelError(error.code, f"{where}{source.entry}(): {text.removeprefix(where)}", error.hint)


def refuse_branches(exported: Exported) -> None:
    """Raises data-dependent-branch if Python branched on the value of a tensor."""
    for obstacle in exported.obstacles:
        if obstacle.rule == "data-dependent-branch":
            raise branch(obstacle.where or exported.source.label, obstacle.source, obstacle.message)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Job:
    """The arguments of an export.  `shapes`: those of the inputs.  `max_paths` and `tell`: as for `export`.  `constant`: sizes can
    be constants, since every dimension has one size, and calls write to state, so that no call is padded."""

    source: Source
    flat: FlatModule
    shapes: Sequence[tuple[Size, ...]]
    sizes: Mapping[str, tuple[int, ...]]
    max_paths: int
    tell: Tell
    constant: bool

    @property
    def dynamic(self) -> Callable[[], ExportedProgram]:
        """The function that exports one program for all sizes."""
        return partial(export_dynamic, self.source, self.flat, self.shapes, self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """Exported programs, their obstacles, and output shapes at further sizes."""

    programs: Programs
    obstacles: tuple[Obstacle, ...]
    eager_shapes: tuple[EagerShapes, ...] = ()


def _as_eager(job: _Job, calls: list[SideEffects]) -> _Draft:
    """Exports the model.  If the program differs from eager PyTorch, exports again while `torch.compiler.is_exporting()` and
    similar functions return False, then with all paths if the model branches on data.  If that does not help, raises the first
    error."""
    flat = job.flat
    first = flat.earlier
    try:
        return _draft(job, calls)
    except ModelError as error:
        if error.code not in ("export-differs", "numpy-untraceable"):
            raise
        why = error
    for questions in (FLAGS_ALONE, KNOWN, ALL):
        flat.earlier, flat.known, flat.asserted, flat.as_eager = first, frozenset(), NOTHING, questions
        try:
            return _draft(job, calls)
        except ModelError as error:
            if error.code == "data-dependent-branch":
                raise
    branches = [obstacle for call in calls for obstacle in call.obstacles if obstacle.rule == "data-dependent-branch"]
    if branches:  # perhaps no data leads to the exported path
        flat.earlier, flat.known, flat.asserted, flat.as_eager = first, frozenset(), NOTHING, ""
        try:
            if draft := _followed(job, calls, str(why)):
                return draft
        except ModelError as error:
            if not isinstance(error.__cause__, WayStopped):
                raise
        # the error names a loop, if there is one, since a loop may have no bound
        cause = next((loop for loop in branches if loop.source.startswith("while ")), branches[0])
        raise branch(cause.where or job.source.label, cause.source, cause.message) from why
    raise why


def _draft(job: _Job, calls: Sequence[SideEffects]) -> _Draft:
    """Exports with dynamic dimensions, else once per size.  If both fail, it usually raises the dynamic export's error, which names
    the user's line.

    With constant sizes Python can read more values, such as positions and masks that are computed from sizes alone.
    """
    source, flat, sizes = job.source, job.flat, job.sizes
    if job.constant:
        before = flat.earlier, flat.known, flat.asserted
        with suppress(ModelError):
            return _per_size(job, calls, ONE_SIZE, follow=False)
        flat.earlier, flat.known, flat.asserted = before
    try:
        first = sample(source, {name: values[0] for name, values in sizes.items()}).tensors
        program, obstacles = past_branches(flat, calls, first, job.dynamic)
        if sizes and (where := size_from_a_float(program)):
            raise ModelError("data-dependent-shape", f"{where}: the size of a tensor depends on data")
        if sizes and (grouped := varying_groups(program)):
            where = place(grouped)[0] or source.label
            raise ModelError("size-excluded", f"{where}: the number of groups of a convolution varies with {' or '.join(sizes)}")
        if sizes and not _same(flat.asserted, *calls[:2]):
            raise branch(*next((obstacle.where, obstacle.source) for obstacle in obstacles if obstacle.rule == "asserted-value"))
        check_dynamic(source, flat, program, job.shapes, sizes, branched=_branched(obstacles))
    except ModelError as error:
        if error.code not in (*OF_SHAPES, *OF_VALUES):
            raise
        why = error
    else:
        dynamic = _Draft(programs=Programs(by_key=dict.fromkeys(all_keys(sizes), program), dynamic=True), obstacles=obstacles)
        if not _branched(obstacles):
            return dynamic
        if sizes:
            with suppress(ModelError):
                return _per_size(job, calls, _reason(source, obstacles), follow=False)
        try:
            if draft := _paths(job, calls):
                return draft
            with suppress(ModelError):
                return _per_size(job, calls, _reason(source, obstacles), follow=True)
            return dynamic
        except ModelError as error:
            cause = error.__cause__
            if isinstance(cause, WayStopped):
                with suppress(ModelError):
                    return _per_size(job, calls, _reason(source, obstacles), follow=True)
            elif not isinstance(cause, PathsRefused) or error.code != "data-dependent-branch":
                raise
            return replace(dynamic, obstacles=(cause.obstacle, *_others(obstacles)))
    if not sizes:
        draft = _paths(job, calls) if why.code == "data-dependent-branch" else None
        if draft is None:
            raise why
        return draft
    try:
        return _per_size(job, calls, str(why), follow=why.code in OF_SHAPES)
    except ModelError as error:
        if why.code == "data-dependent-branch" and (draft := _followed(job, calls, str(why))):
            return draft
        same_line = error.code == why.code and str(error).startswith(f"{source.label}:")
        raise (why if same_line or why.code in OF_VALUES else error) from why.__cause__


def _followed(job: _Job, calls: Sequence[SideEffects], reason: str) -> _Draft | None:
    """Exports all paths through the model's Python code: for all sizes together, else per size.  Returns None if branches on data
    remain.  Raises an error that WayStopped caused."""
    stopped: ModelError | None = None
    try:
        if draft := _paths(job, calls):
            return draft
    except ModelError as error:
        if not isinstance(error.__cause__, WayStopped):
            raise
        stopped = error
    with suppress(ModelError):
        draft = _per_size(job, calls, reason, follow=True)
        if not _branched(draft.obstacles):
            return draft
    if stopped is not None:
        raise stopped
    return None


def _others(obstacles: Sequence[Obstacle]) -> list[Obstacle]:
    """Returns the obstacles that are not branches on data."""
    return [obstacle for obstacle in obstacles if obstacle.rule != "data-dependent-branch"]


def _paths(job: _Job, calls: Sequence[SideEffects]) -> _Draft | None:
    """Exports one program for all sizes with all paths through the model's Python code.  Returns None if `with_paths` does."""
    source, flat, sizes = job.source, job.flat, job.sizes
    keys = all_keys(sizes)
    samples = [sample(source, dict(zip(sizes, key, strict=True))).tensors for key in dict.fromkeys([keys[0], keys[-1]])]
    merged = with_paths(flat, calls, job.dynamic, samples, job.max_paths, job.tell)
    if merged is None:
        return None
    program, obstacles = merged
    check_dynamic(source, flat, program, job.shapes, sizes, branched=False)
    return _Draft(programs=Programs(by_key=dict.fromkeys(keys, program), dynamic=True), obstacles=obstacles)


def _same(asserted: Asserted, small: SideEffects, large: SideEffects) -> bool:
    """Whether the answers and numbers that a program asserts are the same at the smallest and the largest sizes."""
    pairs = [(small.answers, large.answers, asserted.answers), (small.reads, large.reads, asserted.reads)]
    return all(one[at : at + 1] == other[at : at + 1] for one, other, places in pairs for at in places)


def _reason(source: Source, obstacles: Sequence[Obstacle]) -> str:
    where = next(obstacle.where for obstacle in obstacles if obstacle.rule == "data-dependent-branch")
    return f"{where or source.label}: Python asks for a value that depends on the sizes"


def _per_size(job: _Job, calls: Sequence[SideEffects], reason: str, *, follow: bool) -> _Draft:
    """Exports a program for each int_key, after a run in eager PyTorch at its sizes.  `follow`: export all paths through the
    model's Python code; otherwise a branch on data raises data-dependent-branch."""
    source, flat, sizes = job.source, job.flat, job.sizes
    by_key: dict[IntKey, ExportedProgram] = {}
    obstacles: list[Obstacle] = []
    shapes: list[EagerShapes] = []
    result = flat.result
    for key in all_keys(sizes):
        key_sizes = dict(zip(sizes, key, strict=True))
        tensors = sample(source, key_sizes).tensors
        flat.known, flat.asserted = frozenset(), NOTHING
        shapes.append((key_sizes, eager_shapes(source, flat, key_sizes, tensors)))
        check_result(source, result, flat.result)
        flat.earlier = calls[-1]
        job.tell(f"torch.export at {', '.join([f'{name}={size}' for name, size in key_sizes.items()]) or 'one size'}")
        attempt = partial(export_static, source, flat, tensors)
        stopped: ModelError | None = None
        try:
            program, size_obstacles = past_branches(flat, calls, tensors, attempt)
        except ModelError as error:
            if not follow or error.code != "data-dependent-branch":
                raise
            stopped = error
        if follow and (stopped is not None or _branched(size_obstacles)):
            if merged := with_paths(flat, calls, attempt, [tensors], job.max_paths, job.tell):
                program, size_obstacles = merged
            elif stopped is not None:
                raise stopped
        if not _branched(size_obstacles):
            check_static(source, flat, program, key_sizes, tensors)
        elif not follow:
            raise next(branch(cause.where, cause.source) for cause in size_obstacles if cause.rule == "data-dependent-branch")
        by_key[key] = program
        obstacles += size_obstacles
    (programs,) = with_shared_constants([Programs(by_key=by_key, dynamic=False, reason=reason)])
    probed = [] if job.constant else _probed(source, flat, sizes)
    return _Draft(programs=programs, obstacles=tuple(dict.fromkeys(obstacles)), eager_shapes=(*shapes, *probed))


def _branched(obstacles: Sequence[Obstacle]) -> bool:
    """Whether an obstacle is a branch on data.  The program has only one side of it, so it may differ from the model."""
    return any(obstacle.rule == "data-dependent-branch" for obstacle in obstacles)


def _probed(source: Source, flat: FlatModule, sizes: Mapping[str, tuple[int, ...]]) -> list[EagerShapes]:
    """Returns the output shapes of eager PyTorch at some undeclared sizes.  Calls that are padded may have such sizes."""
    probes = []
    for name, values in sizes.items():
        between = [size for size in range(1, values[-1] + 3) if size not in values]
        step = -(-len(between) // PROBES)
        for size in between[::step] if between else ():
            probe_sizes = {**{other: size[0] for other, size in sizes.items()}, name: size}
            try:
                with guarded_indices(source.device):  # the model may have a table of positions that is too short for this size
                    probes.append((probe_sizes, eager_shapes(source, flat, probe_sizes, sample(source, probe_sizes).tensors)))
            except ModelError:
                continue  # eager PyTorch fails at this size: the verification of padding tests such calls
    return probes
