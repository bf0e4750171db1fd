"""Invariants of what lasts from call to call: state, the state of the random numbers, outputs that share memory, and chains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ..format import limits
from ..format.json_text import is_sha256
from ..format.safetensors import ALIGNMENT
from ..format.schema import DTYPES, Alias, Manifest, Program, Value
from ..format.spans import HOST_ONLY, Spans, extent, layout, span
from .lifetimes import changed_state
from .require import require, require_whole_calls
from .steps import PERSISTENT

STATE = "state"
CONSTANT, FOLDED, BAKED = "constant", "folded", "baked"
SHARED = ("inputs", "outputs", "weights", STATE)


def check_state(manifest: Manifest) -> None:
    """Raises manifest-invalid unless every buffer that calls change has bytes and a tensor of its own.  The state of the random
    numbers is two integers of memory state."""
    total = dict(manifest.memories).get(STATE, 0)
    rows = [(index, weight) for index, weight in enumerate(manifest.weights) if weight.memory == STATE]
    users = Counter([weight.tensor for weight in manifest.weights])
    places = []
    for index, weight in rows:
        where = f"weights[{index}]"
        size = span(weight)
        require(weight.offset >= 0 and weight.offset % ALIGNMENT == 0, f"{where}.offset", "is not aligned")
        require(weight.offset + size <= total, f"{where}.offset", f"outside memory {STATE}")
        places.append((weight.offset, weight.offset + size, where))
        require(users[weight.tensor] == 1, f"{where}.tensor", f"{weight.tensor!r} is another weight's, too, and calls change it")
    for index, region in enumerate(manifest.regions):
        there = [weight for _, weight in region.constants if manifest.weights[weight].memory == STATE]
        here = manifest.target.kind == "cpu" or not there
        require(here, f"regions[{index}].constants", "a host region over state, which lies on the GPU")
    for (_, end, _), (begin, _, where) in zip(sorted(places), sorted(places)[1:], strict=False):
        require(end <= begin, f"{where}.offset", f"overlaps another row of memory {STATE}")
    if manifest.random != -1:
        known = 0 <= manifest.random < len(manifest.weights)
        require(known, "random", f"no weight {manifest.random}")
        row = manifest.weights[manifest.random]
        fits = (row.memory, row.dtype, row.shape) == (STATE, "int64", (2,))
        require(fits, "random", f"weight {row.name!r} is not two integers of memory {STATE}")


def check_changes(manifest: Manifest) -> None:
    """Raises manifest-invalid unless `changes` are weights of memory state, and no call of an entry that changes any is padded or
    cut.  Before format version 5 calls may change all state."""
    state = [index for index, weight in enumerate(manifest.weights) if weight.memory == STATE]
    changes = changed_state(manifest)
    require(changes == sorted(set(changes)) and set(changes) <= set(state), "changes", "are not ascending weights of memory state")
    if any(index != manifest.random for index in changes):
        require_whole_calls(manifest, "calls change state")


def check_fixed(manifest: Manifest) -> None:
    """Raises manifest-invalid unless `fixed` are ascending weights with a known reason each.  Before format version 6 there are
    none: what an update may change is not known."""
    positions = [row.weight for row in manifest.fixed]
    for place, row in enumerate(manifest.fixed):
        where = f"fixed[{place}]"
        ascends = row.weight > (positions[place - 1] if place else -1)
        require(ascends and row.weight < len(manifest.weights), f"{where}.weight", "is no weight, or not ascending")
        kept = manifest.weights[row.weight].memory == STATE
        fits = row.reason == STATE if kept else row.reason in (CONSTANT, FOLDED, BAKED)
        require(fits, f"{where}.reason", f"{row.reason!r} of a weight of memory {manifest.weights[row.weight].memory}")
        require(bool(row.where) == (row.reason == BAKED), f"{where}.where", f"{row.where!r} of a weight that is {row.reason}")
        require(is_sha256(row.sha256), f"{where}.sha256", "is no SHA-256 in lower-case hexadecimal")


def check_aliases(manifest: Manifest) -> None:
    """Raises manifest-invalid unless every alias names an output, once, and something that is no alias itself."""
    outputs = [alias.output for alias in manifest.aliases]
    require(outputs == sorted(set(outputs)), "aliases", "not ascending, or an output stands twice")
    counts = {"inputs": len(manifest.inputs), "outputs": len(manifest.outputs)}
    shared = set(outputs)
    for place, alias in enumerate(manifest.aliases):
        where = f"aliases[{place}]"
        require(alias.memory in SHARED, f"{where}.memory", f"unknown memory {alias.memory!r}")
        require(0 <= alias.output < len(manifest.outputs), f"{where}.output", f"no output {alias.output}")
        known = 0 <= alias.index < counts.get(alias.memory, len(manifest.weights))
        require(known, f"{where}.index", f"no number {alias.index} of the {alias.memory}")
        if alias.memory in ("weights", STATE):
            require(manifest.weights[alias.index].memory == alias.memory, f"{where}.index", "that weight lies elsewhere")
        loose = alias.memory != "outputs" or (alias.index not in shared and alias.index != alias.output)
        require(loose, f"{where}.index", "an output that is an alias itself")


def check_alias_spans(manifest: Manifest) -> None:
    """Raises manifest-invalid unless at every int_key every alias lies inside of what it shares memory with.  The manifest's
    aliases, programs and weights are sound, each in itself."""
    for alias in manifest.aliases:
        on_gpu = alias.memory in PERSISTENT and manifest.target.kind == "cuda"
        there = not on_gpu or manifest.weights[alias.index].offset != HOST_ONLY
        require(there, "aliases", f"output {alias.output} shares memory with a weight that is not on the GPU")
        for index, program in enumerate(manifest.programs):
            value, base = program.values[program.outputs[alias.output]], base_of(manifest, program, alias)
            where = f"programs[{index}].outputs[{alias.output}]"
            begin = value.offset
            if manifest.target.kind == "cuda":
                require(value.memory == base.memory, where, f"an alias in memory {value.memory}, of something in {base.memory}")
                begin -= base.offset
            whole = begin % DTYPES[value.dtype] == 0
            require(whole, where, f"begins {begin} bytes into what it shares memory with, inside of an element")
            inside = begin >= 0 and begin + span(value) <= span(base)
            require(inside, where, "lies outside of what it shares memory with")


def base_of(manifest: Manifest, program: Program, alias: Alias) -> Value:
    """What an alias shares memory with in a program, as a value."""
    if alias.memory in PERSISTENT:
        row = manifest.weights[alias.index]
        return Value(dtype=row.dtype, shape=row.shape, strides=row.strides, memory=row.memory, offset=row.offset)
    return program.values[(program.inputs if alias.memory == "inputs" else program.outputs)[alias.index]]


def check_chains(each: Sequence[Manifest]) -> None:
    """Raises manifest-invalid unless every chain leads from an output to an input that is laid out alike at some int_keys, and on a
    GPU the outputs lie where no other entry's programs do.  `each`: a manifest for every entry, sound in itself."""
    chains, entries = each[0].chains, {manifest.entry: manifest for manifest in each}
    rows = [(chain.source, chain.output, chain.target, chain.input) for chain in chains]
    require(rows == sorted(set(rows)), "chains", "not ascending, or one stands twice")
    for place, chain in enumerate(chains):
        where = f"chains[{place}]"
        for kind, name in (("source", chain.source), ("target", chain.target)):
            require(name in entries, f"{where}.{kind}", f"no entry {name!r}")
        source, target = entries[chain.source], entries[chain.target]
        require(0 <= chain.output < len(source.outputs), f"{where}.output", f"{chain.source!r} has no output {chain.output}")
        require(0 <= chain.input < len(target.inputs), f"{where}.input", f"{chain.target!r} has no input {chain.input}")
        made, taken = source.outputs[chain.output], target.inputs[chain.input]
        require(made.dtype == taken.dtype, where, f"an output of dtype {made.dtype}, that input takes {taken.dtype}")
        shared = any(alias.output == chain.output and alias.memory != "outputs" for alias in source.aliases)
        require(not shared, f"{where}.output", "shares memory with an input, a weight or state")
        require(chain.input not in target.written, f"{where}.input", "calls write to it")
        sized = any(chain.output in (row.output, row.count) for row in source.data_sizes)
        require(not sized, f"{where}.output", "has a size that depends on data")
    total = 0
    for place, chain in enumerate(chains):
        makers, takers = entries[chain.source].programs, entries[chain.target].programs
        total += len(makers) + len(takers)
        require(total <= limits.CHAINED, "chains", f"{total} programs, more than the limit of {limits.CHAINED} in all")
        made_as = Counter([layout(program.values[program.outputs[chain.output]]) for program in makers])
        taken_as = Counter([layout(program.values[program.inputs[chain.input]]) for program in takers])
        pairs = sum(count * taken_as[each] for each, count in made_as.items())
        require(pairs > 0, f"chains[{place}]", "output and input are laid out alike at no int_keys")
        total += pairs
        require(total <= limits.CHAINED, "chains", f"{total} pairs of programs, more than the limit of {limits.CHAINED} in all")
    _check_reserved(each)


def _check_reserved(each: Sequence[Manifest]) -> None:
    """On a GPU each source of a chain has a part of the arena to itself, in which the chains' outputs lie."""
    first = each[0]
    made: dict[str, set[int]] = {}
    for chain in first.chains if first.target.kind == "cuda" else ():
        made.setdefault(chain.source, set()).add(chain.output)
    names = [row.entry for row in first.reserved]
    require(sorted(names) == sorted(made), "reserved", f"is for {names}, the chains' sources are {sorted(made)}")
    arena, places = dict(first.memories).get("arena", 0), []
    for index, row in enumerate(first.reserved):
        inside = row.offset >= 0 and row.bytes >= 0 and row.offset + row.bytes <= arena
        require(inside, f"reserved[{index}]", "outside memory arena")
        places.append((row.offset, row.offset + row.bytes, index))
    for (_, end, _), (begin, _, index) in pairwise(sorted(places)):
        require(end <= begin, f"reserved[{index}]", "overlaps another row")
    parts = {row.entry: (row.offset, row.offset + row.bytes) for row in first.reserved}
    for number, manifest in enumerate(each):
        at = f"entries[{number - 1}]." if number else ""
        others = reserved_for_others(first, manifest.entry)
        for place, program in enumerate(manifest.programs):
            for index, value in enumerate(program.values):
                over = others.over(value.memory, *extent(value))
                where = f"{at}programs[{place}].values[{index}]"
                require(over is None, where, "lies in a part of the arena that is reserved for another entry")
            for output in made.get(manifest.entry, ()):
                value = program.values[program.outputs[output]]
                (begin, end), (first_byte, past) = extent(value), parts[manifest.entry]
                kept = not span(value) or (value.memory == "arena" and first_byte <= begin and end <= past)
                require(
                    kept, f"{at}programs[{place}].outputs[{output}]", "is chained, and lies outside of its entry's reserved part"
                )


def reserved_for_others(manifest: Manifest, entry: str) -> Spans:
    """The parts of memory arena that are reserved for other entries than `entry`."""
    rows = enumerate(manifest.reserved)
    return Spans(("arena", row.offset, row.offset + row.bytes, number) for number, row in rows if row.entry != entry)
