"""Selects the variant for a machine: that of its GPU, else the one that uses most of its processor. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import BundleError, CallError, MachineError, meant
from .schema import EntrySpec, Manifest, Target

CALLED_ALIKE = ("name", "dimensions", "mutated_inputs", "data_sizes", "call", "parameters", "result")
"""Fields of an entry that are equal in all variants of a bundle."""


def variant_name(target: Target) -> str:
    """`sm_90`, `x86-64-v3`, or `x86_64` for processors like the one that built it."""
    return target.level or target.arch


def named_variant(targets: Sequence[Target], name: str) -> int:
    """The position of a variant. Raises option-refused."""
    names = [variant_name(target) for target in targets]
    if name not in names:
        known = f"the variants {', '.join(names)}" if len(names) > 1 else names[0]
        raise CallError("option-refused", f"variant={name!r}: the bundle has {known}{meant(name, names)}")
    return names.index(name)


def fitting_variant(targets: Sequence[Target], gpu: str, machine: str, flags: Collection[str]) -> int:
    """The position of the variant for a GPU ("sm_90", "" without one), the machine as in `uname -m`, and its processor flags.
    Raises wrong-machine."""
    for number, target in enumerate(targets):
        if target.kind == "cuda" and target.arch.rstrip("af") == gpu:
            return number
    fits = [
        (len(target.features), -number)
        for number, target in enumerate(targets)
        if target.kind == "cpu" and target.arch == machine and set(target.features) <= set(flags)
    ]
    if fits:
        return -max(fits)[1]
    here = f"its GPU is {gpu}" if gpu else "it has no GPU"
    names = ", ".join([variant_name(target) for target in targets])
    text = (
        f"no variant of the bundle runs on this machine: there are {names}; {here}, and its processor lacks what those for CPUs use"
    )
    raise MachineError("wrong-machine", text, "build the bundle with a variant for this machine: --target sm_90,x86-64-v3")


def check_variants(manifests: Sequence[Manifest]) -> None:
    """Raises manifest-invalid unless all variants have distinct names, the same signature, and the same self-test."""
    names = [variant_name(manifest.target) for manifest in manifests]
    for number, manifest in enumerate(manifests):
        where = f"variants[{number}]"
        if names.index(names[number]) != number:
            raise BundleError("manifest-invalid", f"{where}.target: a second variant for {names[number]}")
        if manifest.world is not None:
            raise BundleError("manifest-invalid", f"{where}.world: a model over several devices has no variants")
        first = manifests[0]
        if [_called(entry) for entry in manifest.entries] != [_called(entry) for entry in first.entries]:
            raise BundleError("manifest-invalid", f"{where}.entries: have other names than those of {names[0]}")
        if manifest.files != first.files or manifest.provenance != first.provenance or manifest.name != first.name:
            raise BundleError("manifest-invalid", f"{where}: has another name, origin or other files than {names[0]}")
        if _state(manifest) != _state(first):
            raise BundleError("manifest-invalid", f"{where}.weights: has other state than {names[0]}")


def _state(manifest: Manifest) -> list[tuple[int, str]]:
    return [(at, row.name) for at, row in enumerate(manifest.weights) if row.memory == "state"]


def _called(entry: EntrySpec) -> tuple[object, ...]:
    specs = [[(spec.name, spec.dtype, spec.shape) for spec in side] for side in (entry.inputs, entry.outputs)]
    return (*[getattr(entry, field) for field in CALLED_ALIKE], *specs)
