"""Compares the exported programs with a model that was never called before, over sequences of calls.

The inputs differ from those of the export.  Every int_key is called with inputs A, B and A, then all int_keys in reverse order.  So
state that a call leaves for later calls shows in the results, whichever sizes come first.  Sizes between the declared ones, which
may be padded, have no program: there the new model is compared with the model that the build has called.

The model is called every time.  Results of a program on the CPU are reused for equal inputs if its operators draw no random numbers
and write to no tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from cgbundle.format.file_names import FORWARD

from ..errors import ModelError
from ..export.exported import Exported
from ..export.programs import coarsest
from ..model.dynamic_axes import bounded_outputs, probe_sizes
from ..model.flat_module import ProgramModule, call_eager
from ..model.nondeterminism.fresh_process import Called, FreshModel, FreshModels
from ..model.nondeterminism.kept_values import Kept
from ..model.side_effects import Obstacle
from ..model.source import CPU, OTHER_SEED, SELF_TEST_SEED, all_keys, sample, written_method
from ..model.user_code import defined
from ..transforms.rng.rewrite import draws
from ..util.tolerance import compare, is_float

RULE = "earlier-calls"

FIRST_SEED = 0x9E3779B9
"""Seed of torch's random numbers for the first call of a sequence; each following call adds 1.  It differs from the seed of the
build's first call, so that numbers that a model draws once, in its first call, differ too."""

KNOWN = frozenset({"mutated-attribute", "python-random", "clock-read", "unrepeatable-result", "data-dependent-branch"})
"""Obstacles that stop a build and already explain why a new model gives other results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of entry number `entry` at `sizes`, with inputs drawn with `seed`.  `declared`: whether these sizes are declared."""

    entry: int
    sizes: Mapping[str, int]
    seed: int
    declared: bool = True

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())


def with_sequences(exported: Sequence[Exported], models: FreshModels | None) -> list[Exported]:
    """Returns the entries of one model, with an obstacle if a program differs from the model in a sequence of calls.

    Without `models` nothing is compared: a saved program has no Python code, and a rank cannot run alone.  Raises fresh-failed, and
    eager-failed if a new model raises an error for inputs that inputs() made.
    """
    if models is None or any(obstacle.rule in KNOWN for entry in exported for obstacle in entry.obstacles):
        return list(exported)
    difference = _compared(exported, models)
    # rounding may differ between runs on a GPU
    if difference is not None and _compared(exported, models) is not None:
        call, text = difference
        causes = _cause(exported[call.entry], exported, models, call, text)
        return [
            replace(exported_entry, obstacles=(*exported_entry.obstacles, *causes)) if number == call.entry else exported_entry
            for number, exported_entry in enumerate(exported)
        ]
    return list(exported)


def sequence(exported: Sequence[Exported]) -> list[Call]:
    """Returns the calls at declared sizes."""
    keys = [
        (number, dict(zip(entry.sizes, key, strict=True))) for number, entry in enumerate(exported) for key in all_keys(entry.sizes)
    ]
    first = [
        Call(entry=number, sizes=sizes, seed=seed)
        for number, sizes in keys
        for seed in (SELF_TEST_SEED, OTHER_SEED, SELF_TEST_SEED)
    ]
    return first + [Call(entry=number, sizes=sizes, seed=OTHER_SEED) for number, sizes in reversed(keys[:-1])]


def between(exported: Sequence[Exported]) -> list[Call]:
    """Returns, for every dimension, a call at a size that is not declared, with the smallest size of the other dimensions."""
    calls = []
    for number, exported_entry in enumerate(exported):
        smallest = {name: values[0] for name, values in exported_entry.sizes.items()}
        for name, values in exported_entry.sizes.items():
            undeclared = [size for size in range(1, values[-1]) if size not in values]
            if undeclared:
                sizes = {**smallest, name: undeclared[len(undeclared) // 2]}
                calls.append(Call(entry=number, sizes=sizes, seed=SELF_TEST_SEED, declared=False))
    return calls


def _compared(exported: Sequence[Exported], models: FreshModels) -> tuple[Call, str] | None:
    """Returns the first call at which a program differs from the model, and a text about the difference, or None."""
    with (
        models.new({exported_entry.source.entry: probe_sizes(exported_entry.sizes) for exported_entry in exported}) as model,
        _programs(exported, model.threads) as programs,
    ):
        for number, call in enumerate(sequence(exported)):
            if text := _difference(exported[call.entry], programs, model, call, number):
                return call, text
        if not programs.changed():  # a model with state is never padded
            for call in between(exported):
                if text := _difference(exported[call.entry], programs, model, call, 0):
                    return call, text
    return None


def _difference(exported: Exported, programs: _Programs, model: FreshModel, call: Call, seed: int) -> str:
    """Describes how the results of a call differ, or returns ""."""
    try:
        tensors, mixed = drawn(exported, call)
    except ModelError:
        if call.declared:
            raise
        return ""  # inputs() does not support this size
    program_results, called = _both(programs, model, call, tensors, seed, reset=False)
    if call.declared and (called.raised or isinstance(program_results, str)):  # a cache of the model may be full
        programs.reset()
        program_results, called = _both(programs, model, call, tensors, seed, reset=True)
    if called.raised and mixed:  # the model may refuse mixed values
        programs.reset()
        tensors = sample(exported.source, call.sizes).tensors
        program_results, called = _both(programs, model, call, tensors, seed, reset=True)
    if called.raised:
        if call.declared:
            raise ModelError("eager-failed", f"{called.raised} ({_text(exported, call)}, in a new copy of the model)")
        return ""
    if isinstance(program_results, str):
        # if the program asserts a value of the model, it is expected to raise
        asserted = any(obstacle.rule == "asserted-value" for obstacle in exported.obstacles)
        return "" if asserted else f"{_text(exported, call)}: the exported program raises {program_results}"
    bound = coarsest(exported.programs)
    names = [*exported.flat.names, *[f"the input {name!r}" for name, _ in exported.flat.like.leaves]]
    outputs = bounded_outputs(called.outputs, exported.flat.bounded, call.sizes) if exported.flat.bounded else called.outputs
    for name, expected, actual in zip(names, (*outputs, *called.inputs), program_results, strict=True):
        difference = compare(expected, actual.detach().cpu())
        if difference.error > (bound if is_float(expected.dtype) else 0.0):
            return f"{_text(exported, call)}: {name}: {difference.text}"
    return ""


def _both(
    programs: _Programs, model: FreshModel, call: Call, tensors: Sequence[torch.Tensor], number: int, *, reset: bool
) -> tuple[Sequence[torch.Tensor] | str, Called]:
    """Calls program and model at the same time.  Returns the program's results or error text, and the model's results."""
    seed = FIRST_SEED + number
    model.send(call.entry, tensors, seed, reset)
    try:
        program_results: Sequence[torch.Tensor] | str = programs.call(call, tensors, seed)
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        program_results = f"{type(error).__name__}: {error}".splitlines()[0]
    return program_results, model.receive()


def drawn(exported: Exported, call: Call) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Returns the inputs of a call, and whether they are mixed.  If inputs() ignores the seed, its values are mixed: integers in
    another order, floats between two of the values."""
    tensors = sample(exported.source, call.sizes, call.seed).tensors
    first = sample(exported.source, call.sizes).tensors
    if not all(compare(before, now).error == 0 for before, now in zip(first, tensors, strict=True)):
        return tensors, False
    order = torch.Generator().manual_seed(call.seed)
    return tuple([_mixed(tensor, order) for tensor in tensors]), True


def _mixed(tensor: torch.Tensor, order: torch.Generator) -> torch.Tensor:
    """Returns a tensor with mixed values.  If all floats are equal, adds random numbers from 0 to 1."""
    flat = tensor.reshape(-1)
    permuted = flat[torch.randperm(flat.numel(), generator=order).to(tensor.device)]
    if tensor.is_floating_point():
        fraction = torch.rand(flat.shape, generator=order).to(flat)
        equal = bool((flat == permuted).all())
        permuted = flat + fraction if equal else torch.where(flat == permuted, flat, flat + fraction * (permuted - flat))
    return permuted.reshape(tensor.shape)


def _text(exported: Exported, call: Call) -> str:
    entry = "" if exported.source.entry == FORWARD else f"{exported.source.entry}: "
    sizes = ", ".join([f"{name}={size}" for name, size in call.sizes.items()])
    return f"{entry}{sizes}" if sizes else f"{entry}one size"


# --- the programs ----------------------------------------------------------------------------------------------------


MAX_RESULT_BYTES = 1 << 28
"""Maximum bytes of inputs and results that are kept for later calls with the same inputs."""

PURE = ("aten", "prims")
"""Namespaces of operators without state.  An operator of the user may have state."""


class _Programs:
    """Calls the exported programs of all entries, which share one state."""

    def __init__(self, exported: Sequence[Exported]) -> None:
        self._exported = exported
        self._modules: dict[int, ProgramModule] = {}
        self._pure = all(_pure(program) for entry in exported for _, program in entry.programs.distinct)
        self._known: dict[Hashable, tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]]] = {}
        self._free = MAX_RESULT_BYTES
        for entry in exported:
            for _, program in entry.programs.distinct:
                self._modules[id(program)] = ProgramModule([program])
        buffers: dict[str, torch.Tensor] = {}
        for module in self._modules.values():
            for path, owner in module.programs[0].named_modules():
                for leaf, tensor in owner._buffers.items():
                    if tensor is not None:
                        owner._buffers[leaf] = buffers.setdefault(f"{path}.{leaf}" if path else leaf, tensor)

    def call(self, call: Call, tensors: Sequence[torch.Tensor], seed: int) -> tuple[torch.Tensor, ...]:
        """Returns the outputs, and the inputs after the call."""
        exported, call_id = self._exported[call.entry], (call.entry, call.key, call.seed)
        if call_id in self._known and all(map(torch.equal, self._known[call_id][0], tensors)):
            return self._known[call_id][1]
        reference = self._modules[id(exported.programs.at(call.key))] if call.declared else exported.flat
        inputs = tuple([tensor.clone() for tensor in tensors])
        results = (*call_eager(reference, inputs, seed), *inputs)
        size = sum(tensor.nbytes for tensor in (*tensors, *results))
        if self._pure and call.declared and size <= self._free and all(tensor.device == CPU for tensor in tensors):
            self._known[call_id] = tensors, results
            self._free -= size
        return results

    def changed(self) -> bool:
        """Whether calls have written to a buffer."""
        return any(module.snapshot.changed() for module in self._modules.values())

    def reset(self) -> None:
        """Resets buffers to their initial values."""
        for module in self._modules.values():
            module.snapshot.restore()


def _pure(program: ExportedProgram) -> bool:
    """Whether a program's results depend only on its inputs and weights, and the program writes to none of these."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return not draws(program) and all(
        target.namespace in PURE and not target._schema.is_mutable
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__module__", "") in ("_operator", "math")
        for target in targets
    )


@contextmanager
def _programs(exported: Sequence[Exported], threads: int) -> Iterator[_Programs]:
    """Yields the programs, with this number of threads.  Restores state and number of threads at the end."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    programs = _Programs(exported)
    try:
        yield programs
    finally:
        programs.reset()
        torch.set_num_threads(threads_before)


# --- the cause -------------------------------------------------------------------------------------------------------


def _cause(exported: Exported, entries: Sequence[Exported], models: FreshModels, call: Call, text: str) -> list[Obstacle]:
    """Returns obstacles that name the attributes that carry data to later calls, or one that describes the difference."""
    runs: list[Kept] = []
    for seed in (SELF_TEST_SEED, OTHER_SEED, SELF_TEST_SEED):
        calls = [
            (
                number,
                drawn(entry, Call(entry=number, sizes=dict(zip(entry.sizes, all_keys(entry.sizes)[0], strict=True)), seed=seed))[0],
            )
            for number, entry in enumerate(entries)
        ]
        with models.new({exported_entry.source.entry: probe_sizes(exported_entry.sizes) for exported_entry in entries}) as model:
            runs.append(model.kept(calls))
    first_run, other_inputs, first_inputs_again = runs
    buffers = {name for name, _ in exported.source.model.named_buffers()}  # the build turned some counters into buffers
    first_run = replace(first_run, read=first_run.read - buffers)
    method = f"{exported.source.entry}()"
    drawn_once = [
        name for name in first_run.first if name in first_run.read and first_run.first[name] != first_inputs_again.first.get(name)
    ]
    values = [name for name in first_run.first if name in first_run.read and first_run.first[name] != other_inputs.first.get(name)]
    counts = [name for name in first_run.again if name in first_run.read and name not in values]
    reasons = [(name, f"{method} sets {name!r} to another value in every process, and later calls read it") for name in drawn_once]
    reasons += [
        (name, f"{method} sets {name!r} from the values of its inputs, and a later call reads it")
        for name in values
        if name not in drawn_once
    ]
    reasons += [(name, f"{method} changes {name!r} with every call, and reads it") for name in counts]
    if not reasons:
        set_once = [name for name in first_run.first if name in first_run.read]
        reasons = [(name, f"{method} sets {name!r} at its first call, and later calls read it") for name in set_once]
    if not reasons:
        if exported.flat.reshaped:
            where, description = exported.flat.reshaped
            return [Obstacle(rule=RULE, message=f"{description} ({text})", where=where, source="")]
        where, line = defined(written_method(exported.source.model, exported.source.entry))
        message = f"a model that was not called before gives something else than the exported program: {text}"
        return [Obstacle(rule=RULE, message=message, where=where, source=line)]
    return [
        Obstacle(rule=RULE, message=f"{message} ({text})", where=where, source=line)
        for name, message in reasons
        for where, line in [first_run.places.get(name, ("", ""))]
    ]
