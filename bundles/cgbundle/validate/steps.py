"""Every invariant of a program's steps: what each may read and write, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from ..format.schema import HOST, PERSISTENT, Alias, EntrySpec, Manifest, Program, Region, Step
from ..format.spans import Cover, Spans, extent, span
from . import require
from .lifetimes import changed_rows, check_lifetimes


def check_steps(manifest: Manifest, entry: EntrySpec, program: Program, where: str) -> None:
    """Raises manifest-invalid unless the program's steps are sound; `where` is the program's path in the manifest."""
    require(bool(program.steps), f"{where}.steps", "no step")
    changing = Cover(changed_rows(manifest, entry))
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        require(all(0 <= value < len(program.values) for value in (*step.inputs, *step.outputs)), at, "no such value")
        require((step.kind == "graph") == bool(step.file), f"{at}.file", "a graph step has a table, others none")
        if step.kind == "copy":
            _check_copy(program, step, changing, at)
        else:
            _check_region(manifest.regions, step, at)
    if manifest.target.kind == "cpu":
        (step, *more) = program.steps
        whole = step.kind == HOST and not more and step.inputs == program.inputs and step.outputs == program.outputs
        require(whole, f"{where}.steps", "a cpu program is one host step over the call's values")
    else:
        _check_sides(program, where)
        check_order(program, where, {alias.output: alias for alias in entry.aliases}, entry.mutated_inputs)
        check_lifetimes(program, where)


def _check_copy(program: Program, step: Step, changing: Cover, at: str) -> None:
    require(len(step.inputs) == len(step.outputs) == 1, at, "a copy has one input and one output")
    source, target = program.values[step.inputs[0]], program.values[step.outputs[0]]
    same = (source.dtype, source.shape, source.strides) == (target.dtype, target.shape, target.strides)
    require(same, at, "a copy between values of different layouts")
    known = target.memory != "state" or not span(target) or changing.holds(target.memory, *extent(target))
    require(known, at, "copies into memory state, outside of the buffers that `mutated_buffers` names")


def _check_region(regions: tuple[Region, ...], step: Step, at: str) -> None:
    require(0 <= step.region < len(regions), f"{at}.region", f"no region {step.region}")
    require(regions[step.region].kind == step.kind, f"{at}.region", "is of another kind")


def _check_sides(program: Program, where: str) -> None:
    """The host and the GPU meet in copies alone: a call's values and those of graph steps lie on the GPU, those of host steps do
    not."""
    values = program.values
    for kind, positions in (("inputs", program.inputs), ("outputs", program.outputs)):
        for place, index in enumerate(positions):
            require(values[index].memory != HOST, f"{where}.{kind}[{place}]", "lies in memory host, not on the GPU")
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        used = [(f"value {index}", values[index].memory) for index in (*step.inputs, *step.outputs)]
        if step.kind == "copy":
            require(not all(memory == HOST for _, memory in used), at, "a copy from host to host")
        for name, memory in used:
            if step.kind == HOST:
                require(memory == HOST, at, f"a host step over {name}, which lies in memory {memory}")
            elif step.kind == "graph":
                require(memory != HOST, at, f"a graph step over {name}, which lies in memory host")


def check_order(
    program: Program, where: str, aliases: Mapping[int, Alias] = MappingProxyType({}), changed: Collection[int] = ()
) -> None:
    """Raises manifest-invalid unless every step, and the call in the end, reads what was written before.

    These are inputs of the call, weights and state, and outputs of earlier steps.  Every value is written once, and by no step the
    call's inputs; a copy leaves weights and the call's inputs as they are.  Those inputs that the call changes, at the positions
    `changed`, may be copied over as a whole, and no later step reads what was there.  What the `aliases`, by output, lie in is
    written.
    """
    given = set(program.inputs)
    written = given | {index for index, value in enumerate(program.values) if value.memory in PERSISTENT}
    made: dict[int, int] = {}
    inputs = Spans.of(program.values, program.inputs)
    changing = {program.values[program.inputs[index]]: program.inputs[index] for index in changed}
    gone: set[int] = set()
    for place, step in enumerate(program.steps):
        at = f"{where}.steps[{place}]"
        for index in step.inputs:
            require(index in written, at, f"reads value {index}, which nothing has written")
            require(index not in gone, at, f"reads value {index}, which an earlier step has written over")
        for index in set(step.outputs):
            require(index not in given, at, f"writes value {index}, an input of the call")
            require(index not in made, at, f"writes value {index}, which steps[{made.get(index)}] has written")
            made[index] = place
        written.update(step.outputs)
        if step.kind == "copy":
            target = program.values[step.outputs[0]]
            require(target.memory != "weights", at, "copies into memory weights")
            if target in changing:
                gone.add(changing[target])
                continue
            over = inputs.over(target.memory, *extent(target))
            require(over is None, at, f"copies over value {over}, an input of the call")
    for place, index in enumerate(program.outputs):
        alias = aliases.get(place)
        if alias is not None and alias.memory == "outputs":
            index = program.outputs[alias.index]
        elif alias is not None:
            continue
        require(index in written, f"{where}.outputs[{place}]", f"value {index}, which nothing has written")
