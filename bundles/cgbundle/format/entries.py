"""The entries of a bundle: found by name, with their programs, and what they donate to each other.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..errors import EntryMissing, meant
from .schema import Donation, EntrySpec, Manifest, Program
from .spans import layout

FORWARD = "forward"
"""The entry that a bundle has where the model names none, and that a call of the program itself goes to."""


def entry_named(manifest: Manifest, name: str = "") -> EntrySpec:
    """An entry, by default the first.  Raises entry-missing."""
    entry = next((entry for entry in manifest.entries if entry.name == name), None) if name else manifest.entries[0]
    if entry is None:
        raise missing_entry(name, [entry.name for entry in manifest.entries])
    return entry


def missing_entry(name: str, entries: Collection[str]) -> EntryMissing:
    """The error of a name that none of `entries` has."""
    near = meant(name, entries) if isinstance(name, str) else ""
    return EntryMissing("entry-missing", f"the bundle has no entry {name!r}{near}, but {', '.join(entries)}")


def missing_attribute(owner: object, name: str, entries: Collection[str]) -> AttributeError:
    """The same of an attribute of `owner`, whose entries are attributes."""
    found = f"no attribute {name!r}{meant(name, entries)}, and the bundle no entry but {', '.join(entries)}"
    return AttributeError(f"{type(owner).__name__!r} object has {found}")


def all_programs(manifest: Manifest) -> tuple[Program, ...]:
    """The programs of all entries, in the order of these."""
    return tuple([program for entry in manifest.entries for program in entry.programs])


def donating_programs(manifest: Manifest) -> Iterator[tuple[Donation, int, int]]:
    """(donation, program of its source, program of its target) for all programs between which the output is laid out as the input.

    Programs are counted over all entries.  The donations' names and numbers are sound.
    """
    first, numbers = 0, {}
    for entry in manifest.entries:
        numbers[entry.name] = first, entry
        first += len(entry.programs)
    for donation in manifest.donations:
        (begin, source), (start, target) = numbers[donation.source], numbers[donation.target]
        takers: dict[object, list[int]] = {}
        for number, program in enumerate(target.programs, start):
            takers.setdefault(layout(program.values[program.inputs[donation.input]]), []).append(number)
        for number, program in enumerate(source.programs, begin):
            for taker in takers.get(layout(program.values[program.outputs[donation.output]]), ()):
                yield donation, number, taker
