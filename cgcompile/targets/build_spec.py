"""Records that all targets share during a build."""

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
"""Per int_key, the nodes of its program that must run on the host in a bundle for a GPU, with the reasons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryBuild:
    """An entry of the model, with its sizes per declared dimension."""

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
        """The int_keys of the entry, in order."""
        return tuple(all_keys(self.sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """The input of a build: the entries of one model, the donations between them, and the options.

    `recorder`: as in `choice.Chosen`.  `ranks`: the processes that build the other ranks of a model over several devices.  The
    other fields are options of `build`.  A recorder records all entries together, in mappings by *build key* (see `build_key`).
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
        """Weights whose values Python read while an entry was exported: name -> the file:line that read it."""
        return {name: where for entry in reversed(self.entries) for name, where in entry.prepared.baked.items()}

    def by_key(self, by_entry: Mapping[str, Mapping[IntKey, Any]]) -> dict[IntKey, Any]:
        """Merges mappings by int_key, one per entry, into one mapping by build key."""
        return {
            build_key(self, number, key): by_entry[entry.name][key]
            for number, entry in enumerate(self.entries)
            for key in entry.keys
            if key in by_entry[entry.name]
        }

    def of_entry(self, number: int, by_build_key: Mapping[IntKey, Any]) -> dict[IntKey, Any]:
        """Selects the values of entry number `number` from a mapping by build key, and returns them by int_key."""
        keys = {key: build_key(self, number, key) for key in self.entries[number].keys}
        return {key: by_build_key[build] for key, build in keys.items() if build in by_build_key}


class EntryKey(tuple[int, ...]):
    """The build key of one of several entries: the entry's number, then the sizes.  `str` names the entry."""

    entry: str

    def __str__(self) -> str:
        return f"{self.entry} {tuple(self[1:])}"


def build_key(spec: BuildSpec, number: int, key: IntKey) -> IntKey:
    """Returns the build key of an int_key of entry number `number`: the int_key itself if there is a single entry."""
    if len(spec.entries) == 1:
        return key
    entry_key = EntryKey((number, *key))
    entry_key.entry = spec.entries[number].name
    return entry_key


def entry_of(key: IntKey) -> str:
    """Returns the name of the entry in a build key, or "" if the model has a single entry."""
    return key.entry if isinstance(key, EntryKey) else ""


def own_key(key: IntKey) -> IntKey:
    """Returns the int_key of a build key."""
    return tuple(key[1:]) if isinstance(key, EntryKey) else key


def key_label(key: IntKey) -> str:
    """Returns a build key as part of a file name: `8x128`, `decode-8x128`, or "" for a model without dimensions."""
    sizes = "x".join(map(str, own_key(key)))
    return "-".join(filter(None, [entry_of(key), sizes]))


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryParts:
    """The manifest fields of one entry that depend on the target."""

    programs: tuple[Program, ...]
    self_test: SelfTest


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestParts:
    """The manifest fields that depend on the target; `entries` has the order of BuildSpec.  The files that these fields name are in
    the stage folder."""

    target: Target
    weights: tuple[Weight, ...]
    frozen: tuple[FrozenWeight, ...]
    memories: tuple[tuple[str, int], ...]
    regions: tuple[Region, ...]
    module_state: str
    entries: tuple[EntryParts, ...]
    donated: tuple[DonatedRange, ...] = ()
    world: World | None = None
