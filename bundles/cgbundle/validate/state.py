"""Invariants of state and its rows, random numbers, output aliases, and donations."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import BundleError
from ..format import limits
from ..format.safetensors import ALIGNMENT
from ..format.schema import DTYPES, HOST, MEMORIES, PERSISTENT, STATE, Alias, Donation, EntrySpec, Manifest, Program, Value
from ..format.shapes import Spans, extent, is_dense, layout, span
from . import require, require_apart, require_whole_calls
from .programs import points, written

if TYPE_CHECKING:
    from ..format.table import Table


def check_state(manifest: Manifest) -> None:
    """Raises manifest-invalid unless every state buffer has its own bytes and tensor, and the state of the random numbers is int64
    [2]."""
    total, ranges = dict(manifest.memories).get(STATE, 0), []
    users = Counter([weight.tensor for weight in manifest.weights])
    for index, weight in enumerate(manifest.weights):
        if weight.memory == STATE:
            where, end = f"weights[{index}]", weight.offset + span(weight)
            require(weight.offset % ALIGNMENT == 0, f"{where}.offset", "is not aligned")
            require(end <= total, f"{where}.offset", f"outside memory {STATE}")
            ranges.append((weight.offset, end, f"{where}.offset"))
            require(
                users[weight.tensor] == 1, f"{where}.tensor", f"{weight.tensor!r} is another weight's, too, and calls change it"
            )
    for index, region in enumerate(manifest.regions):
        there = any(manifest.weights[weight].memory == STATE for _, weight in region.constants)
        here = manifest.target.kind == "cpu" or not there
        require(here, f"regions[{index}].constants", "a host region over state, which lies on the GPU")
    require_apart(ranges, f"overlaps another row of memory {STATE}")
    if manifest.random is not None:
        require(manifest.random < len(manifest.weights), "random", f"no weight {manifest.random}")
        row = manifest.weights[manifest.random]
        fits = (row.memory, row.dtype, row.shape) == (STATE, "int64", (2,))
        require(fits, "random", f"weight {row.name!r} is not two integers of memory {STATE}")


def check_state_dimensions(manifest: Manifest) -> None:
    """Raises manifest-invalid unless state with a variable number of rows comes after all other state, starts as zeros, and is part
    of no program value or alias. Ranks must not have it. Needs `check_state`."""
    weights, names, varying = manifest.weights, [row.name for row in manifest.state_dimensions], set[int]()
    require(len(set(names)) == len(names) and "" not in names, "state_dimensions", f"unnamed, or one occurs twice: {names}")
    require(manifest.world is None, "world", "must be absent: the state has a variable number of rows")
    counts = [row.count for row in manifest.state_dimensions if row.count is not None]
    for place, row in enumerate(manifest.state_dimensions):
        where = f"state_dimensions[{place}]"
        chosen = [*row.weights, *([] if row.count is None else [row.count])]
        known = all(index < len(weights) and weights[index].memory == STATE for index in chosen)
        require(known and bool(row.weights), where, "is of weights that are no state")
        require(row.weights == tuple(sorted({*row.weights})), f"{where}.weights", "not ascending, or one occurs twice")
        others = varying | {manifest.random, *counts}
        require(others.isdisjoint(row.weights), f"{where}.weights", "one belongs to two dimensions, or is a count or random state")
        varying |= set(row.weights)
        least = [(*weights[index].shape, 0)[0] for index in row.weights]
        require(
            0 < min(least) == max(least) <= limits.STATE_ROWS, f"{where}.weights", f"have {sorted({*least})} rows, not all as many"
        )
        for index in row.weights:
            packed = weights[index].zeros and is_dense(weights[index].shape, weights[index].strides)
            require(packed, f"{where}.weights", f"{weights[index].name!r} is not zeros, row behind row")
        fits = row.most is None or least[0] <= row.most <= limits.STATE_ROWS
        require(fits, f"{where}.most", f"{row.most}, and there are {least[0]} rows at least")
        if row.count is not None:
            kept = weights[row.count]
            fits = (kept.dtype, kept.shape) == ("int64", (1,)) and row.count != manifest.random and not kept.zeros
            require(fits and counts.count(row.count) == 1, f"{where}.count", f"{kept.name!r} is no number of rows")
    begin = min(weights[index].offset for index in varying)
    for index, weight in enumerate(weights):
        before = weight.memory != STATE or index in varying or weight.offset + span(weight) <= begin
        require(before, f"weights[{index}].offset", "lies behind state that has any number of rows")
    for number, entry in enumerate(manifest.entries):
        at = f"entries[{number}]"
        require(not set(counts) & {*entry.mutated_buffers}, f"{at}.mutated_buffers", "a number of rows, which calls read")
        aliased = any(alias.memory == STATE and alias.index in varying | set(counts) for alias in entry.aliases)
        require(not aliased, f"{at}.aliases", "an output is a part of state that has any number of rows")
        for place, program in enumerate(entry.programs):
            inside = any(value.memory == STATE and extent(value)[1] > begin for value in program.values)
            require(not inside, f"{at}.programs[{place}].values", "one lies in state that has any number of rows")


def check_rows_of_recording(manifest: Manifest, table: Table) -> None:
    """Raises table-invalid if a memset or memcpy accesses state with variable rows, relocation-invalid if a kernel has an address
    behind its minimum rows."""
    varying = [manifest.weights[index] for dimension in manifest.state_dimensions for index in dimension.weights]
    ends = sorted([(weight.offset, weight.offset + span(weight)) for weight in varying])
    begin, state = ends[0][0], MEMORIES.index(STATE)
    sets = zip(table.memset_memory, table.memset_offset, strict=True)
    copies = zip(table.memcpy_memory, table.memcpy_offset, strict=True)
    if any(memory == state and offset >= begin for memory, offset in (*sets, *copies)):
        raise BundleError("table-invalid", f"{table.where}: a memset or memcpy in state that has any number of rows")
    for memory, offset in zip(table.relocation_memory, table.relocation_offset, strict=True):
        if memory == state and offset >= begin and offset >= ends[bisect_right(ends, (offset, 1 << 64)) - 1][1]:
            text = f"byte {offset} of memory state lies behind the fewest rows of what is there"
            raise BundleError("relocation-invalid", f"{table.where}: nodes.relocations: {text}")


def check_changes(manifest: Manifest, entry: EntrySpec) -> None:
    """Raises manifest-invalid unless `mutated_buffers` are state weights, and calls that change state are not padded or chunked."""
    state = {index for index, weight in enumerate(manifest.weights) if weight.memory == STATE}
    changes = list(entry.mutated_buffers)
    fits = changes == sorted(set(changes)) and set(changes) <= state
    require(fits, "mutated_buffers", "are not ascending weights of memory state")
    if any(index != manifest.random for index in changes):
        require_whole_calls(entry, "calls change state")


def check_aliases(manifest: Manifest, entry: EntrySpec) -> None:
    """Raises manifest-invalid if two aliases have the same output, or one shares memory with another alias."""
    outputs = [alias.output for alias in entry.aliases]
    require(outputs == sorted(set(outputs)), "aliases", "not ascending, or an output occurs twice")
    counts = {"inputs": len(entry.inputs), "outputs": len(entry.outputs)}
    shared = set(outputs)
    for place, alias in enumerate(entry.aliases):
        where = f"aliases[{place}]"
        require(alias.output < len(entry.outputs), f"{where}.output", f"no output {alias.output}")
        known = alias.index < counts.get(alias.memory, len(manifest.weights))
        require(known, f"{where}.index", f"no number {alias.index} of the {alias.memory}")
        if alias.memory in ("weights", STATE):
            require(manifest.weights[alias.index].memory == alias.memory, f"{where}.index", "that weight is in another memory")
        loose = alias.memory != "outputs" or (alias.index not in shared and alias.index != alias.output)
        require(loose, f"{where}.index", "an output that is an alias itself")


def check_alias_spans(manifest: Manifest, entry: EntrySpec) -> None:
    """Raises manifest-invalid unless every alias is inside its base at every int_key. Aliases, programs and weights must be
    valid."""
    for alias in entry.aliases:
        there = alias.memory not in PERSISTENT or manifest.weights[alias.index].memory != HOST
        require(there, "aliases", f"output {alias.output} shares memory with a weight that is not on the GPU")
        for index, program in enumerate(entry.programs):
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
    """The value that an alias shares memory with in a program."""
    if alias.memory in PERSISTENT:
        row = manifest.weights[alias.index]
        return Value(dtype=row.dtype, shape=row.shape, strides=row.strides, memory=row.memory, offset=row.offset)
    return program.values[(program.inputs if alias.memory == "inputs" else program.outputs)[alias.index]]


def check_donations(manifest: Manifest) -> None:
    """Raises manifest-invalid unless each donation connects an output and an input with the same layout at some int_keys, and on a
    GPU no other entry uses the outputs' memory. The entries must be valid."""
    donations, entries = manifest.donations, {entry.name: entry for entry in manifest.entries}
    rows = [(donation.source, donation.output, donation.target, donation.input) for donation in donations]
    require(rows == sorted(set(rows)), "donations", "not ascending, or one occurs twice")
    for place, donation in enumerate(donations):
        where = f"donations[{place}]"
        for kind, name in (("source", donation.source), ("target", donation.target)):
            require(name in entries, f"{where}.{kind}", f"no entry {name!r}")
        source, target = entries[donation.source], entries[donation.target]
        require(
            0 <= donation.output < len(source.outputs), f"{where}.output", f"{donation.source!r} has no output {donation.output}"
        )
        require(0 <= donation.input < len(target.inputs), f"{where}.input", f"{donation.target!r} has no input {donation.input}")
        output, wanted = source.outputs[donation.output], target.inputs[donation.input]
        require(output.dtype == wanted.dtype, where, f"an output of dtype {output.dtype}, that input takes {wanted.dtype}")
        shared = any(alias.output == donation.output and alias.memory != "outputs" for alias in source.aliases)
        require(not shared, f"{where}.output", "shares memory with an input, a weight or state")
        require(donation.input not in target.mutated_inputs, f"{where}.input", "calls write to it")
        sized = any(donation.output in (row.output, row.count) for row in source.data_sizes)
        require(not sized, f"{where}.output", "has a size that depends on data")
    total = 0
    for place, donation in enumerate(donations):
        sources, targets = entries[donation.source].programs, entries[donation.target].programs
        total += len(sources) + len(targets)
        require(total <= limits.CHAINED, "donations", f"{total} programs, more than the limit of {limits.CHAINED} in all")
        source_layouts = Counter([layout(program.values[program.outputs[donation.output]]) for program in sources])
        target_layouts = Counter([layout(program.values[program.inputs[donation.input]]) for program in targets])
        pairs = sum(count * target_layouts[memory_layout] for memory_layout, count in source_layouts.items())
        require(pairs > 0, f"donations[{place}]", "output and input are laid out alike at no int_keys")
        total += pairs
        require(total <= limits.CHAINED, "donations", f"{total} pairs of programs, more than the limit of {limits.CHAINED} in all")
    _check_donated(manifest)


def _check_donated(manifest: Manifest) -> None:
    """On a GPU each donating entry has its own part of the arena for the donated outputs."""
    sources: dict[str, set[int]] = {}
    for donation in manifest.donations if manifest.target.kind == "cuda" else ():
        sources.setdefault(donation.source, set()).add(donation.output)
    names = [row.entry for row in manifest.donated]
    require(sorted(names) == sorted(sources), "donated", f"is for {names}, the donations' sources are {sorted(sources)}")
    arena, ranges = dict(manifest.memories).get("arena", 0), []
    for index, row in enumerate(manifest.donated):
        require(row.offset + row.bytes <= arena, f"donated[{index}]", "outside memory arena")
        ranges.append((row.offset, row.offset + row.bytes, f"donated[{index}]"))
    require_apart(ranges, "overlaps another row")
    parts = {row.entry: (row.offset, row.offset + row.bytes) for row in manifest.donated}
    for number, entry in enumerate(manifest.entries):
        others = donated_by_others(manifest, entry.name)
        for place, program in enumerate(entry.programs):
            at = f"entries[{number}].programs[{place}]"
            for index, value in enumerate(program.values):
                over = others.over(value.memory, *extent(value))
                require(over is None, f"{at}.values[{index}]", "lies in a part of the arena that another entry donates")
            for output in sources.get(entry.name, ()):
                value = program.values[program.outputs[output]]
                (begin, end), (first, last) = extent(value), parts[entry.name]
                inside = not span(value) or (value.memory == "arena" and first <= begin and end <= last)
                require(inside, f"{at}.outputs[{output}]", "is donated, and lies outside of its entry's part")


def donating_programs(manifest: Manifest) -> Iterator[tuple[Donation, int, int]]:
    """Yields (donation, source program, target program) for programs whose output and input have the same layout. Programs are
    counted over all entries. The donations must be valid."""
    first, numbers = 0, {}
    for entry in manifest.entries:
        numbers[entry.name] = first, entry
        first += len(entry.programs)
    for donation in manifest.donations:
        (begin, source), (start, target) = numbers[donation.source], numbers[donation.target]
        readers: dict[object, list[int]] = {}
        for number, program in enumerate(target.programs, start):
            readers.setdefault(layout(program.values[program.inputs[donation.input]]), []).append(number)
        for number, program in enumerate(source.programs, begin):
            for reader in readers.get(layout(program.values[program.outputs[donation.output]]), ()):
                yield donation, number, reader


def check_untouched(table: Table, reserved: Spans) -> None:
    """Raises table-invalid if the recording uses the arena's parts for donated outputs of other entries."""
    for memory, begin, size in (*written(table), *[(memory, begin, 1) for memory, begin in points(table)]):
        if reserved.over(memory, begin, begin + size) is not None:
            text = f"a node uses byte {begin} of memory {memory}, which is reserved for another entry"
            raise BundleError("table-invalid", f"{table.where}: {text}")


def donated_by_others(manifest: Manifest, entry: str) -> Spans:
    """The parts of memory arena for outputs that other entries donate."""
    rows = enumerate(manifest.donated)
    return Spans(("arena", row.offset, row.offset + row.bytes, number) for number, row in rows if row.entry != entry)
