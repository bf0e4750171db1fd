"""Kernels that begin before the one in front of them has ended: CUDA's programmatic dependent launch (sm_90 and later).

A kernel lets the next one begin as soon as all its own blocks have begun (`griddepcontrol.launch_dependents`).  That one reads
what no kernel of its chain has written so far: weights, and what earlier calls or turns of a loop left in a cache.  Then it waits
until the earlier kernel has ended and its writes are seen (`griddepcontrol.wait`); all else stands behind the wait.  A kernel ends
after its wait, so that what comes third may rely on the first.  The first kernel of a chain begins when all before it has ended.

Products on tensor cores begin when all before them has ended, as without any of this.  Their blocks are large, about one for each
multiprocessor, and read in a loop, so that nothing of them can be early.  Where they began early, a step of Llama-8B with 32 lanes
took 8.8 ms, and takes 7.4 since; the times of its kernels by themselves add up to 7.2 (H100).  Probably their blocks lay unevenly.

Only a kernel whose next node waits may let it begin.  Behind one that did, a kernel that does not wait read stale bytes, although
their edge was a full one (the condition of a loop; H200, driver 580.159).

Sources: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, `griddepcontrol`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..lowered import (
    TEMPORARY,
    Allocate,
    Copy,
    Event,
    Exchange,
    Fill,
    KernelVariant,
    Launch,
    Lowered,
    LoweredProgram,
    Pointer,
    Release,
    SetCondition,
)

LOWEST = 90
"""The first compute capability that has it."""

WAIT, BEGIN_NEXT = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"

OWN = "gdc_", "griddepcontrol"
"""What stands in the text of a kernel that does so by itself."""

ALONE = "launch_cooperative_grid", "num_ctas"
"""Options of kernels whose blocks have to run at once, and that are left as they are."""

PRODUCT = "tl.dot("
"""What stands in the text of kernels for tensor cores."""

LOAD = "tl.load"

EARLY = {"tl.program_id", "tl.arange", "tl.full", "tl.broadcast_to", LOAD}
"""Calls that may stand before the wait, and `.to`: those of indices, and of what is read at them."""


def begin_early(program: LoweredProgram) -> LoweredProgram:
    """The same program.  Launches of which one follows the other overlap, where both kernels can be made to."""
    lowered = program.lowered
    able = [_can_take_part(variant) for variant in lowered.variants]
    # weights and inputs that the program does not write to, whatever its kernels hand on
    kept = {number for number, buffer in enumerate(lowered.buffers) if buffer.kind != TEMPORARY} - set(lowered.written)
    read = [_only_read(variant) for variant in lowered.variants]
    begin_next: set[int] = set()
    settled: dict[int, set[str]] = {}  # of what waits: the arguments that its chain has not written to
    for region in program.regions:
        before = -1  # the launch in front, if its kernel is able
        changed: set[int] = set()  # buffers that the chain may have written to
        for number in range(region.start, region.stop):
            event = lowered.events[number]
            if not _is_node(event):
                continue
            if before >= 0 and _waits(lowered, event, able):
                begin_next.add(before)
                settled[number] = {name for name, buffer in _pointers(lowered, event) if buffer not in changed}
            else:
                changed = set()
            if isinstance(event, Launch) and able[event.variant]:
                before = number
                changed |= {buffer for name, buffer in _pointers(lowered, event) if name not in read[event.variant]} - kept
            else:
                before = -1
    return replace(program, lowered=_overlapping(lowered, begin_next, settled))


def _is_node(event: Event) -> bool:
    """Whether something stands in a graph for it, or it ends a graph."""
    match event:
        case Allocate() | Release():
            return False
        case Launch():
            return all(event.grid)
        case Copy() | Exchange():
            return event.nbytes > 0
        case Fill():
            return event.count > 0
    return True


def _waits(lowered: Lowered, event: Event, able: Sequence[bool]) -> bool:
    if isinstance(event, Launch):
        return able[event.variant] and PRODUCT not in lowered.variants[event.variant].source
    return isinstance(event, SetCondition)


def _can_take_part(variant: KernelVariant) -> bool:
    options, function = dict(variant.options), _function(variant)
    alone = options.get(ALONE[0], False) or options.get(ALONE[1], 1) != 1
    return not alone and function is not None and not any(instruction in variant.source for instruction in OWN)


def _overlapping(lowered: Lowered, begin_next: Collection[int], settled: Mapping[int, set[str]]) -> Lowered:
    """A kernel stands in the program once for each of its parts in a chain: it begins one, is one's next, or both.  It reads early
    what is `settled` in all launches of a part, by the numbers of those that wait."""
    parts = [(event.variant, number in settled, number in begin_next) for number, event in _launches(lowered)]
    early: dict[tuple[int, bool, bool], set[str]] = {}
    for part, (number, _) in zip(parts, _launches(lowered), strict=True):
        settled_names = settled.get(number, set())
        early[part] = early.get(part, settled_names) & settled_names
    places = {part: place for place, part in enumerate(early)}
    events = list(lowered.events)
    for part, (number, event) in zip(parts, _launches(lowered), strict=True):
        events[number] = replace(event, variant=places[part])
    variants = [_in_chain(lowered.variants[variant], names, waits, begins) for (variant, waits, begins), names in early.items()]
    return replace(lowered, variants=tuple(variants), events=tuple(events))


def _launches(lowered: Lowered) -> list[tuple[int, Launch]]:
    return [(number, event) for number, event in enumerate(lowered.events) if isinstance(event, Launch)]


def _pointers(lowered: Lowered, event: Event) -> list[tuple[str, int]]:
    """The arguments of a launch that point to buffers, and these."""
    if not isinstance(event, Launch):
        return []
    names = [name for name, type_ in lowered.variants[event.variant].signature if type_ != "constexpr"]
    named_arguments = zip(names, event.arguments, strict=True)
    return [(name, value.buffer) for name, value in named_arguments if isinstance(value, Pointer)]


def _in_chain(variant: KernelVariant, settled: Collection[str], waits: bool, begins_next: bool) -> KernelVariant:
    function = _function(variant)
    if function is None or not (waits or begins_next):
        return variant
    body, lines = function.body, variant.source.splitlines()
    starts = [body[0].lineno, *[_end(statement) + 1 for statement in body[:-1]]]
    texts = [lines[start - 1 : _end(statement)] for start, statement in zip(starts, body, strict=True)]
    pointers = {name for name, type_ in variant.signature if type_.startswith("*")}
    early = _early(function, pointers - set(settled)) if waits else set()
    body_lines = [line for number in sorted(early) for line in texts[number]]
    body_lines += [" " * body[0].col_offset + line for line, here in ((BEGIN_NEXT, begins_next), (WAIT, waits)) if here]
    body_lines += [line for number, text in enumerate(texts) if number not in early for line in text]
    source = "\n".join([*lines[: starts[0] - 1], *body_lines, *lines[_end(body[-1]) :], ""])
    return replace(variant, source=source, begins_next=begins_next)


def _function(variant: KernelVariant) -> ast.FunctionDef | None:
    """The kernel, if each of its statements has lines of its own."""
    functions = [node for node in ast.parse(variant.source).body if isinstance(node, ast.FunctionDef) and node.name == variant.name]
    if not functions:
        return None
    ends = [functions[0].lineno, *[_end(statement) for statement in functions[0].body]]
    apart = all(end < statement.lineno for end, statement in zip(ends, functions[0].body, strict=False))
    return functions[0] if apart else None


def _end(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def _early(function: ast.FunctionDef, written: Collection[str]) -> set[int]:
    """The positions of statements that compute an index or read at one, among those before the first that is no assignment to a
    name; `written`: arguments that nothing may be read from yet."""
    stores = _names(function, ast.Store)
    unknown = {*written, *stores}
    early: set[int] = set()
    read_late: set[str] = set()
    for number, statement in enumerate(function.body):
        target = _target(statement)
        if target is None:
            break
        read = set(_names(statement, ast.Load))
        calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
        known = not read & unknown and all(_may_be_early(call) for call in calls)
        if known and stores.count(target) == 1 and target not in read_late:
            early.add(number)
            unknown.discard(target)
        else:
            read_late |= read
    return early


def _only_read(variant: KernelVariant) -> set[str]:
    """The arguments that stand nowhere but in addresses of loads."""
    function = _function(variant)
    if function is None:
        return set()
    loads = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == LOAD and node.args]
    addresses = [load.args[0] for load in loads]
    plain = [
        address
        for address in addresses
        if all(_may_be_early(node.func) for node in ast.walk(address) if isinstance(node, ast.Call))
    ]
    name_ids = {id(node) for address in plain for node in ast.walk(address) if isinstance(node, ast.Name)}
    others = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and id(node) not in name_ids}
    return {argument.arg for argument in function.args.args} - others


def _target(statement: ast.stmt) -> str | None:
    """The name that a statement assigns to, if it does nothing else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _names(tree: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)]


def _may_be_early(called: ast.expr) -> bool:
    return ast.unparse(called) in EARLY or (isinstance(called, ast.Attribute) and called.attr == "to")
