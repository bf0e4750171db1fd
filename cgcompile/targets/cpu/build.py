"""The cpu target's part of a build: the whole model is one host region, or one per int_key if it was exported per size."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.export import ExportedProgram

from cgbundle.errors import CallError, CgbundleError
from cgbundle.format import file_names
from cgbundle.format.file_names import FORWARD
from cgbundle.format.schema import IntKey, Region, SelfTest, Target, Value, Weight

from ...bundle.emit import describe_size
from ...bundle.proof import unproved
from ...bundle.self_test import KeySelfTest, eager_self_test, write_self_test
from ...bundle.single_region import WHOLE, whole_program, whole_region
from ...errors import BuildError, ModelError
from ...export.exported import memory_order
from ...export.programs import Programs
from ...model.flat_module import PREFIX
from ...model.pytree import dtype_name
from ...transforms.error_bounds import error_bounds
from ...transforms.inlining import custom_operators, inlined
from ...transforms.output_aliases import with_aliases
from ...transforms.prepared import Prepared
from ...util.disk_space import size
from ...util.progress import Stages, Tell, named, named_tells
from ...util.scratch import scratch_folder
from ...util.workers import processors, run_forked
from ..build_spec import BuildSpec, EntryParts, ManifestParts
from ..instruction_sets import Level, level_of
from ..kernels.operator_calls import own_operators
from ..memory_layout import lay_out, tensor_bytes
from ..program_contents import program_contents
from ..weights import frozen_weights, shapes_of, write_weights
from . import layouts
from .aoti import Compiled, import_inductor
from .interface import Begun
from .object_cache import compiled_and_kept, kept_at, recalled

REASON = "the whole model, compiled for the processor"


@dataclass(frozen=True, kw_only=True, slots=True)
class _CompiledEntry:
    """An entry and its compiled programs: a shared object for each distinct program, by its first int_key."""

    entry: Prepared
    programs: Programs
    compiled: dict[IntKey, Compiled]

    def name(self, key: IntKey) -> str:
        """Returns the region of the program of `key`: `model`, or `model-8x128` if keys have different programs.  Entries other
        than forward use their own name: `decode`, `decode-8x128`."""
        base = WHOLE if self.entry.name == FORWARD else self.entry.name
        return base if len(self.programs.distinct) == 1 else f"{base}-{'x'.join(map(str, key))}"

    def file(self, key: IntKey) -> str:
        return f"{file_names.HOST}{self.name(key)}.so"

    def named(self, key: IntKey, tell: Tell) -> Tell:
        """Returns a `tell` that names the program, if there are several: they are compiled side by side, and each one counts its
        source files from 0."""
        return tell if len(self.programs.distinct) == 1 else named(tell, self.name(key))


def build_parts(spec: BuildSpec, stage: Path, stages: Stages, begun: Begun | None = None) -> ManifestParts:
    """Compiles every program, and writes the shared objects, the weights and the self-test into `stage`.  `begun`: compilations
    that started before the export."""
    level = level_of(spec.chosen.target)
    with scratch_folder() as scratch:
        with stages("lower") as tell:
            changing = any(entry.state or any(alias.name for alias in entry.aliases) for entry in spec.entries)
            tells = named_tells(tell, [entry.name for entry in spec.entries])
            entries = [
                _CompiledEntry(entry=entry, programs=entry.programs.changed(_without_python), compiled={}) for entry in spec.entries
            ]
            standalone = spec.options.standalone
            compile_all = partial(_compile_all, entries, tells=tells, changing=changing, level=level, begun=begun)
            compile_all(scratch, standalone=standalone)
            if standalone is None and not all(code.standalone for entry in entries for code in entry.compiled.values()):
                standalone = False  # either all code of a bundle uses torch's libraries, or no code does
                tell("some code calls what only torch's libraries have: the rest is linked to them, too")
                compile_all(scratch / "again", standalone=standalone)
            tell.result(_summary([(entry.file(key), compiled) for entry in entries for key, compiled in entry.compiled.items()]))
        with stages("emit") as tell:
            tensors = dict(sorted(spec.first.weights.items()))
            rows = weight_rows(tensors, spec.first.state, spec.first.varying)
            weights = write_weights(stage / file_names.WEIGHTS, tensors, rows)
            (stage / file_names.HOST).mkdir()
            self_tests = {entry.name: eager_self_test(entry, weights) for entry in spec.entries}
            try:
                parts, regions, folded = _parts_of_all(entries, self_tests, weights, stage)
            except CgbundleError as error:
                if standalone is not None:
                    raise
                standalone = False  # torch's functions may support arguments that standalone.cpp refuses
                tell(f"linked to torch's libraries, because the code fails with the functions of standalone.cpp ({error})")
                compile_all(scratch / "libtorch", standalone=standalone)
                parts, regions, folded = _parts_of_all(entries, self_tests, weights, stage)
            write_self_test(stage / file_names.SELF_TEST, self_tests)
            tell.result(describe_size(stage))
    features = {feature for entry in entries for compiled in entry.compiled.values() for feature in compiled.features}
    return ManifestParts(
        target=Target(
            kind="cpu", arch=platform.machine(), level=level.name if level else "", features=tuple(sorted(features)),
            torch=spec.torch_version if standalone is False else "", driver=0,
        ),
        weights=weights,
        frozen=frozen_weights(stage, weights, spec.programs, folded, spec.baked),
        memories=_memories(weights),
        regions=tuple(regions),
        module_state="",
        entries=tuple(parts),
    )  # fmt: skip


def _compile_all(
    entries: Sequence[_CompiledEntry],
    scratch: Path,
    *,
    tells: Sequence[Tell],
    changing: bool,
    level: Level | None,
    begun: Begun | None,
    standalone: bool | None,
) -> None:
    """Compiles programs that are not yet compiled for `standalone`, several in parallel.  `changing`: some entry changes
    weights."""
    works: dict[tuple[int, IntKey], Callable[[Tell], Compiled]] = {}
    for number, unit in enumerate(entries):
        contents = program_contents([program for _, program in unit.programs.distinct])
        shared = [alias.output for alias in unit.entry.aliases]
        for key, program in unit.programs.distinct:
            previous = unit.compiled.get(key)
            if previous is not None and previous.standalone == standalone:
                continue
            if previous is not None and standalone is False and previous.libtorch is not None:
                unit.compiled[key] = replace(previous, path=previous.libtorch, standalone=False, libtorch=None)
                continue
            work = scratch / unit.name(key)
            work.mkdir(parents=True)
            arguments = program, contents[id(program)], shared, changing, level, standalone
            if (cached := recalled(kept_at(*arguments), work)) is not None:
                unit.compiled[key] = cached
            else:
                works[number, key] = partial(compiled_and_kept, *arguments, work, begun)
    work_tells = {(number, key): entries[number].named(key, tells[number]) for number, key in works}
    if len(works) > 1 and processors() > 1 and not torch.cuda.is_initialized():
        import_inductor()
        if begun is not None:
            begun.wait()
        shared_objects = run_forked(works, work_tells, scratch, "worker-died")
    else:
        shared_objects = {name: work(work_tells[name]) for name, work in works.items()}
    for (number, key), compiled in shared_objects.items():
        entries[number].compiled[key] = compiled


def _without_python(program: ExportedProgram) -> ExportedProgram:
    """Returns the program without operators that need Python at run time.  Raises the errors of `inlined`."""
    known_operators = own_operators(program)
    return inlined(program, custom_operators(program) - known_operators if known_operators else None)


def _parts_of_all(
    entries: Sequence[_CompiledEntry], self_tests: Mapping[str, Sequence[KeySelfTest]], weights: tuple[Weight, ...], stage: Path
) -> tuple[list[EntryParts], list[Region], set[str]]:
    """Returns the parts and regions of all entries, and the names of weights whose values the code holds.  Runs the code once per
    int_key."""
    regions: list[Region] = []
    folded: set[str] = set()
    parts = [_entry_parts(unit, self_tests[unit.entry.name], weights, regions, folded, stage) for unit in entries]
    return parts, regions, folded


def _entry_parts(
    unit: _CompiledEntry,
    self_tests: Sequence[KeySelfTest],
    weights: tuple[Weight, ...],
    regions: list[Region],
    folded: set[str],
    stage: Path,
) -> EntryParts:
    """Returns the parts of an entry.  Adds its regions to `regions`, its shared objects to `stage`, and to `folded` the weights
    whose values the code holds."""
    prepared = unit.entry
    numbers: dict[IntKey, int] = {}
    strides: dict[IntKey, list[tuple[int, ...]]] = {}
    for key, program in unit.programs.distinct:
        bound = layouts.bind_constants(unit.compiled[key].path, program, weights)
        for self_test in [self_test for self_test in self_tests if unit.programs.at(self_test.key) is program]:
            numbers[self_test.key] = len(regions)
            try:
                strides[self_test.key] = layouts.output_strides(
                    bound, [_copy(tensor) for tensor in self_test.inputs], self_test.outputs
                )
            except CallError as error:
                text = f"the compiled code fails with the example inputs, which eager PyTorch takes: {error}"
                alone = unit.compiled[key].standalone
                raise BuildError("compiler-failed", text, "without --standalone torch's own code runs" if alone else "") from error
        bound.region.close()
        folded |= bound.unbound
        shutil.copyfile(unit.compiled[key].path, stage / unit.file(key))
        regions.append(whole_region("host", REASON, unit.file(key), bound.constants, unit.name(key)))
    programs = []
    for self_test in self_tests:
        input_values = [_value(tensor, tensor.stride()) for tensor in self_test.inputs]
        output_values = [_value(tensor, stride) for tensor, stride in zip(self_test.outputs, strides[self_test.key], strict=True)]
        programs.append(whole_program("host", self_test.key, input_values, output_values, region=numbers[self_test.key]))
    bounds = error_bounds(prepared, weights)
    return EntryParts(
        programs=with_aliases(tuple(programs), prepared.aliases, prepared.signature.outputs, weights),
        self_test=SelfTest(
            compare="tolerance", calls=prepared.self_test_calls, expected="eager", bounds=tuple([limit.bound for limit in bounds]),
            proofs=tuple([unproved(self_test.key, bounds) for self_test in self_tests]),
        ),
    )  # fmt: skip


def _summary(compiled: Sequence[tuple[str, Compiled]]) -> str:
    """Returns `host/model.so, 150.2 KiB`, or `3 shared objects, 460.1 KiB, 2 of them from the cache`."""
    total = size(sum(shared_object.path.stat().st_size for _, shared_object in compiled))
    before = sum(shared_object.recalled for _, shared_object in compiled)
    if len(compiled) == 1:
        return f"{compiled[0][0]}, {total}{', from the cache' if before else ''}"
    cached = "all" if before == len(compiled) else f"{before} of them"
    return f"{len(compiled)} shared objects, {total}{f', {cached} from the cache' if before else ''}"


def weight_rows(tensors: Mapping[str, torch.Tensor], state: Collection[str], varying: Collection[str] = ()) -> tuple[Weight, ...]:
    """Returns the rows under the program's names.  Rows in memory `weights`, the mapped file, have offset 0.  Raises
    dtype-unsupported for dtypes that a bundle cannot hold and for constants with gaps or overlaps."""
    for full, value in tensors.items():
        name = full.removeprefix(PREFIX)
        if not value.detach().permute(memory_order(value)).is_contiguous():
            raise ModelError(
                "dtype-unsupported",
                f"weight {name!r}: strides {list(value.stride())} leave gaps or overlap",
                "call .contiguous() on it in the model",
            )
    rows = lay_out(shapes_of(tensors), state, varying=varying).rows
    return tuple([row if row.memory == "state" else replace(row, memory="weights", offset=0) for row in rows])


def _memories(rows: Sequence[Weight]) -> tuple[tuple[str, int], ...]:
    """Returns the bytes of memory weights and, if there is state, of memory state."""
    sizes = {row.tensor: (row, tensor_bytes(row.dtype, row.shape)) for row in rows}.values()
    state = [row.offset + size for row, size in sizes if row.memory == "state"]
    weights = sum(size for row, size in sizes if row.memory == "weights")
    return (("weights", weights), *((("state", max(state)),) if state else ()))


def _value(tensor: torch.Tensor, strides: Sequence[int]) -> Value:
    return Value(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), strides=tuple(strides), memory="host", offset=0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides, because the compiled code of some models writes to its inputs."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
