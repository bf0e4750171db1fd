"""Selects the variant for a machine: that of its GPU, else the one that uses most features of its processor. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import BundleError, CallError, MachineError, did_you_mean
from .schema import EntrySpec, Manifest, Target

CALLED_ALIKE = ("name", "dimensions", "mutated_inputs", "data_sizes", "call", "parameters", "result")
"""Fields of an entry that are equal in all variants of a bundle."""


def variant_name(target: Target) -> str:
    """`sm_90`, `x86-64-v3`, or `x86_64` for processors like the one that built it."""
    return target.level or target.arch


def named_variant(targets: Sequence[Target], name: str) -> int:
    names = [variant_name(target) for target in targets]
    if name not in names:
        known = f"the variants {', '.join(names)}" if len(names) > 1 else names[0]
        raise CallError("option-refused", f"variant={name!r}: the bundle has {known}{did_you_mean(name, names)}")
    return names.index(name)


def fitting_variant(targets: Sequence[Target], gpu: str, machine: str, flags: Collection[str]) -> int:
    """The position of the variant for a GPU ("sm_90", "" without one), the machine as in `uname -m`, and its processor flags.
    Raises wrong-machine."""
    fits = []
    for number, target in enumerate(targets):
        if target.kind == "cuda" and target.arch.rstrip("af") == gpu:
            return number
        if target.kind == "cpu" and target.arch == machine and set(target.features) <= set(flags):
            fits.append((len(target.features), -number))
    if fits:
        return -max(fits)[1]
    names, here = ", ".join(map(variant_name, targets)), f"its GPU is {gpu}" if gpu else "it has no GPU"
    text = f"there are {names}; {here}, and its processor lacks what those for CPUs use"
    hint = "build the bundle with a variant for this machine: --target sm_90,x86-64-v3"
    raise MachineError("wrong-machine", f"no variant of the bundle runs on this machine: {text}", hint)


def check_variants(manifests: Sequence[Manifest]) -> None:
    """Raises manifest-invalid unless all variants have distinct names, the same signature, and the same self-test."""
    first, *_ = manifests
    names = [variant_name(manifest.target) for manifest in manifests]
    for number, manifest in enumerate(manifests):
        reason = ""
        if names.index(names[number]) != number:
            reason = f".target: a second variant for {names[number]}"
        elif manifest.world is not None:
            reason = ".world: a model over several devices has no variants"
        elif [_called(entry) for entry in manifest.entries] != [_called(entry) for entry in first.entries]:
            reason = f".entries: have other names than those of {names[0]}"
        elif (manifest.files, manifest.provenance, manifest.name) != (first.files, first.provenance, first.name):
            reason = f": has another name, origin or other files than {names[0]}"
        elif _state(manifest) != _state(first):
            reason = f".weights: has other state than {names[0]}"
        if reason:
            raise BundleError("manifest-invalid", f"variants[{number}]{reason}")


def _state(manifest: Manifest) -> list[tuple[int, str]]:
    return [(at, row.name) for at, row in enumerate(manifest.weights) if row.memory == "state"]


def _called(entry: EntrySpec) -> tuple[object, ...]:
    specs = [[(spec.name, spec.dtype, spec.shape) for spec in side] for side in (entry.inputs, entry.outputs)]
    return (*[getattr(entry, field) for field in CALLED_ALIKE], *specs)
