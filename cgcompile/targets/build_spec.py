"""What the targets' halves of a build share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cgbundle.format.schema import (
    Dimension,
    DonatedRange,
    Donation,
    FrozenWeight,
    IntKey,
    Program,
    Region,
    SelfTest,
    Target,
    Weight,
    World,
)

from ..bundle.ranks import Ranks
from ..export.programs import Programs
from ..model.source import Source, all_keys
from ..transforms.prepared import Prepared

Placements = Mapping[IntKey, Mapping[str, str]]
"""By int_key, the nodes of its program that must be on the host beside a GPU, with the reasons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryBuild:
    """An entry of the model, and its sizes per declared dimension."""

    source: Source
    prepared: Prepared
    sizes: dict[str, tuple[int, ...]]
    dimensions: tuple[Dimension, ...]
    placements: Placements

    @property
    def name(self) -> str:
        return self.source.entry

    @property
    def keys(self) -> tuple[IntKey, ...]:
        """Its int_keys, in order."""
        return tuple(all_keys(self.sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """What is built: the entries of one model, the donations between them, and how.  `recorder` is that of `targets.Chosen`;
    the rest, `allow` too, are options of `build`.  `ranks`: the processes that build the others of a model over several devices.

    A recorder works on all entries together, in mappings by *build key*: see `build_key`.
    """

    entries: tuple[EntryBuild, ...]
    donations: tuple[Donation, ...]
    target: str
    recorder: str
    lower: str
    specialize: str
    prove: str
    prove_budget: float
    autotune_timeout: float | None
    allow: tuple[str, ...]
    standalone: bool | None
    torch_version: str
    ranks: Ranks | None = None

    @property
    def programs(self) -> Programs:
        """The programs of all entries, by build key."""
        first, *others = self.entries
        if not others:
            return first.prepared.programs
        by_key = self.by_key({entry.name: entry.prepared.programs.by_key for entry in self.entries})
        return Programs(by_key=by_key, dynamic=False)

    @property
    def baked(self) -> dict[str, str]:
        """The weights whose values Python got while an entry was exported, by name, with the file:line that asked."""
        return {name: where for entry in reversed(self.entries) for name, where in entry.prepared.baked.items()}

    def by_key(self, by_entry: Mapping[str, Mapping[IntKey, Any]]) -> dict[IntKey, Any]:
        """What every entry has by int_key, as one mapping by build key."""
        return {
            build_key(self, number, key): by_entry[entry.name][key]
            for number, entry in enumerate(self.entries)
            for key in entry.keys
            if key in by_entry[entry.name]
        }

    def of_entry(self, number: int, by_build_key: Mapping[IntKey, Any]) -> dict[IntKey, Any]:
        """Of a mapping by build key, what is of entry number `number`, by its int_keys."""
        keys = {key: build_key(self, number, key) for key in self.entries[number].keys}
        return {key: by_build_key[build] for key, build in keys.items() if build in by_build_key}


class EntryKey(tuple[int, ...]):
    """An int_key of one of several entries: the entry's number, and the sizes.  As a text it names the entry."""

    entry: str

    def __str__(self) -> str:
        return f"{self.entry} {tuple(self[1:])}"


def build_key(spec: BuildSpec, number: int, key: IntKey) -> IntKey:
    """The key that entry number `number` has during a build for an int_key: itself where there is no other entry."""
    if len(spec.entries) == 1:
        return key
    entry_key = EntryKey((number, *key))
    entry_key.entry = spec.entries[number].name
    return entry_key


def entry_of(key: IntKey) -> str:
    """The entry of a build key, "" where there is no other one."""
    return key.entry if isinstance(key, EntryKey) else ""


def own_key(key: IntKey) -> IntKey:
    """The int_key of a build key."""
    return tuple(key[1:]) if isinstance(key, EntryKey) else key


def key_label(key: IntKey) -> str:
    """A build key in the name of a file: `8x128`, `decode-8x128`, "" for a model without dimensions."""
    sizes = "x".join(map(str, own_key(key)))
    return "-".join(filter(None, [entry_of(key), sizes]))


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryParts:
    """The fields of one entry that depend on the target."""

    programs: tuple[Program, ...]
    self_test: SelfTest


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestParts:
    """The fields of the manifest that depend on the target, `entries` as in BuildSpec; the files they name are in the stage."""

    target: Target
    weights: tuple[Weight, ...]
    frozen: tuple[FrozenWeight, ...]
    memories: tuple[tuple[str, int], ...]
    regions: tuple[Region, ...]
    module_state: str
    entries: tuple[EntryParts, ...]
    donated: tuple[DonatedRange, ...] = ()
    world: World | None = None
