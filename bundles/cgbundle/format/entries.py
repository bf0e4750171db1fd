"""The entries of a bundle, each as a manifest of its own.  Pure.

The manifest of an entry says of the whole bundle what the bundle's own does, and has no other entries.  So all that looks at a call
(guards, dispatch, outputs, the exam) reads a manifest, whether a bundle has one entry or several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace

from ..errors import EntryMissing, meant
from .schema import Chain, Entry, Manifest, Program
from .spans import layout

FORWARD = "forward"
"""The entry that a bundle has where the model names none, and that a call of the program itself goes to."""

_OWN = tuple([field.name for field in fields(Entry) if field.name != "name"])
"""What every entry has for itself."""


def each_entry(manifest: Manifest) -> tuple[Manifest, ...]:
    """A manifest for each entry, in order."""
    if not manifest.entries:
        return (manifest,)
    return (replace(manifest, entries=()), *[_alone(manifest, entry) for entry in manifest.entries])


def one_entry(manifest: Manifest, name: str = "") -> Manifest:
    """The manifest of an entry, by default of the first.  Raises entry-missing."""
    each = each_entry(manifest)
    found = next((one for one in each if one.entry == name), None) if name else each[0]
    if found is None:
        raise missing_entry(name, [one.entry for one in each])
    return found


def missing_entry(name: str, entries: Collection[str]) -> EntryMissing:
    """The error of a name that none of `entries` has."""
    near = meant(name, entries) if isinstance(name, str) else ""
    return EntryMissing("entry-missing", f"the bundle has no entry {name!r}{near}, but {', '.join(entries)}")


def missing_attribute(owner: object, name: str, entries: Collection[str]) -> AttributeError:
    """The same of an attribute of `owner`, whose entries are attributes."""
    found = f"no attribute {name!r}{meant(name, entries)}, and the bundle no entry but {', '.join(entries)}"
    return AttributeError(f"{type(owner).__name__!r} object has {found}")


def with_entries(each: tuple[Manifest, ...]) -> Manifest:
    """The bundle's manifest, given one for each of its entries."""
    first, *others = each
    rows = [Entry(name=other.entry, **{name: getattr(other, name) for name in _OWN}) for other in others]
    return replace(first, entries=tuple(rows))


def all_programs(manifest: Manifest) -> tuple[Program, ...]:
    """The programs of all entries, in the order of these."""
    return (*manifest.programs, *[program for entry in manifest.entries for program in entry.programs])


def chained_programs(each: Sequence[Manifest]) -> Iterator[tuple[Chain, int, int]]:
    """(chain, program of its source, program of its target) for all programs between which the output is laid out as the input.

    Programs are counted over all entries, given a manifest for each.  The chains' names and numbers are sound.
    """
    first, numbers = 0, {}
    for manifest in each:
        numbers[manifest.entry] = first, manifest
        first += len(manifest.programs)
    for chain in each[0].chains:
        (begin, source), (start, target) = numbers[chain.source], numbers[chain.target]
        takers: dict[object, list[int]] = {}
        for number, program in enumerate(target.programs, start):
            takers.setdefault(layout(program.values[program.inputs[chain.input]]), []).append(number)
        for number, program in enumerate(source.programs, begin):
            for taker in takers.get(layout(program.values[program.outputs[chain.output]]), ()):
                yield chain, number, taker


def _alone(manifest: Manifest, entry: Entry) -> Manifest:
    own = {name: getattr(entry, name) for name in _OWN}
    return replace(manifest, entry=entry.name, entries=(), **own)
