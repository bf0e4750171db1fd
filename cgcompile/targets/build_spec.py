"""Records that all targets share during a build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgbundle.format.schema import (
    VERSION,
    DonatedRange,
    Donation,
    EntrySpec,
    FrozenWeight,
    IntKey,
    Manifest,
    Program,
    Provenance,
    Region,
    SelfTest,
    StateDimension,
    Target,
    Weight,
    World,
)

from ..bundle.ranks import Ranks
from ..export.programs import Programs
from ..model.flat_module import PREFIX
from ..model.source import ROWS, SEED, StateRows
from ..transforms.output_aliases import manifest_aliases
from ..transforms.prepared import Prepared
from .choice import Chosen, Options


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """The state of a build: the entries of one model, the donations between them, the options, and the target that was chosen.

    `ranks`: the processes that build the other ranks of a model over several devices.  A recorder records all entries together, in
    mappings by *build key* (see `build_key`).
    """

    entries: tuple[Prepared, ...]
    donations: tuple[Donation, ...]
    options: Options
    chosen: Chosen
    torch_version: str
    ranks: Ranks | None = None

    @property
    def first(self) -> Prepared:
        """The first entry.  All entries have the same module, weights and state."""
        return self.entries[0]

    @property
    def programs(self) -> Programs:
        """The programs of all entries, by build key."""
        first, *others = self.entries
        if not others:
            return first.programs
        by_key = self.by_key({entry.name: entry.programs.by_key for entry in self.entries})
        return Programs(by_key=by_key, dynamic=False)

    @property
    def baked(self) -> dict[str, str]:
        """Weights whose values Python read while an entry was exported: name -> the file:line that read it."""
        return {name: where for entry in reversed(self.entries) for name, where in entry.exported.baked.items()}

    @property
    def placements(self) -> dict[IntKey, Mapping[str, str]]:
        """The nodes that must run on the host, by build key (see `Prepared`)."""
        return self.by_key({entry.name: entry.placements for entry in self.entries})

    def calls(self, seed: int = SEED) -> dict[IntKey, tuple[torch.Tensor, ...]]:
        """Returns the tensors of an example call, by build key."""
        return self.by_key({entry.name: {key: entry.exported.inputs_at(key, seed) for key in entry.keys} for entry in self.entries})

    def entry_by_key(self) -> dict[IntKey, Prepared]:
        """Returns the entry of every build key."""
        return self.by_key({entry.name: dict.fromkeys(entry.keys, entry) for entry in self.entries})

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


def manifest_of(spec: BuildSpec, parts: ManifestParts, origin: Provenance) -> Manifest:
    """Returns the manifest."""
    names = [row.name for row in parts.weights]
    generator = next((entry.generator for entry in spec.entries if entry.generator), "")
    entries = [
        EntrySpec(
            name=entry.name,
            dimensions=entry.dimensions,
            inputs=entry.signature.inputs,
            mutated_inputs=entry.written,
            mutated_buffers=tuple(sorted([names.index(name.removeprefix(PREFIX)) for name in entry.changes])),
            outputs=entry.signature.outputs,
            aliases=manifest_aliases(entry.aliases, parts.weights),
            data_sizes=entry.signature.data_sizes,
            call=entry.signature.call,
            parameters=entry.signature.parameters,
            result=entry.signature.result,
            programs=entry_parts.programs,
            findings=entry.findings,
            self_test=entry_parts.self_test,
        )
        for entry, entry_parts in zip(spec.entries, parts.entries, strict=True)
    ]
    return Manifest(
        version=VERSION,
        name=spec.first.source.name,
        target=parts.target,
        entries=tuple(entries),
        weights=parts.weights,
        random=names.index(generator.removeprefix(PREFIX)) if generator else None,
        frozen=parts.frozen,
        memories=parts.memories,
        state_dimensions=tuple([_dimension(row, names) for row in spec.first.source.rows]),
        regions=parts.regions,
        module_state=parts.module_state,
        donations=spec.donations,
        donated=parts.donated,
        allowed=tuple(sorted(spec.options.allow)),
        world=parts.world,
        provenance=origin,
        files=(),
    )


def _dimension(rows: StateRows, names: Sequence[str]) -> StateDimension:
    count = ROWS + rows.name
    return StateDimension(
        name=rows.name, weights=tuple(sorted(map(names.index, rows.buffers))), most=rows.most,
        count=names.index(count) if count in names else None,
    )  # fmt: skip
