"""New weights for a loaded program, checked against the manifest before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..errors import CallError
from ..format.schema import FrozenWeight, Manifest, Weight
from ..validate.memories import BAKED, CONSTANT, FOLDED
from .contents import Contents, NamedContents, contents_of, files_of, invalid

REASONS = {
    CONSTANT: "is a constant of the model, and not in its state_dict",
    FOLDED: "was folded: compiled code holds values that were computed from it",
    BAKED: "was read by Python at {where} while the bundle was built, which went on by its value",
    "state": "is state, which calls change",
}

HINTS = {
    CONSTANT: "leave it out",
    FOLDED: "build the bundle again with the new weights",
    BAKED: "build the bundle again with the new weights",
    "state": "leave it out; `program.state` writes state",
}


def update(manifest: Manifest, programs: Sequence[Sequence[Any]], weights: object, *, partial: bool) -> None:
    """`Program.update` of one program, or of copies on several devices: of each the `Backend`s of its sessions, the
    loaded one's first.

    The weights are brought to every device before they change on any.
    """
    _check_names(weights if isinstance(weights, Mapping) else (), manifest)  # before the values: what stands under them is none
    contents = contents_of(weights)
    chosen = [checked(manifest, contents, backends[0].device, partial=partial) for backends in programs]
    files = files_of(contents.values())

    def change(number: int) -> None:
        if number < len(programs):
            backends = programs[number]
            backends[0].update(chosen[number], backends, files, lambda: change(number + 1))

    change(0)


def checked(manifest: Manifest, named: NamedContents, device: int | None, *, partial: bool) -> dict[int, Contents]:
    """The new contents by the positions of weights, of tied ones by the first one's.  `device`: the program's.

    Raises update-invalid and update-refused, naming the weight.
    """
    _check_names(named, manifest)
    rows = {row.name: (index, row) for index, row in enumerate(manifest.weights)}
    fixed = _fixed(manifest)
    first: dict[str, int] = {}
    for index, row in enumerate(manifest.weights):
        first.setdefault(row.tensor, index)
    chosen: dict[int, tuple[str, Contents]] = {}
    kept: list[tuple[str, Contents, Weight, FrozenWeight]] = []
    for name, contents in named.items():
        index, row = rows[name]
        _check_kind(name, contents, row, device)
        if row.tensor in fixed:
            kept.append((name, contents, row, fixed[row.tensor]))
        else:
            _check_tied(name, contents, row, chosen.setdefault(first[row.tensor], (name, contents)))
    if not partial:
        _check_complete(manifest, fixed, chosen)
    for arguments in kept:  # the dearest check is the last
        _check_kept(*arguments)
    return {index: contents for index, (_, contents) in chosen.items()}


def updatable(manifest: Manifest) -> tuple[list[str], dict[str, str]]:
    """The names of the weights that an update changes, and of the others with the reasons, as `FrozenWeight` has them."""
    fixed = _fixed(manifest)
    names = [row.name for row in manifest.weights if row.tensor not in fixed]
    return names, {row.name: fixed[row.tensor].reason for row in manifest.weights if row.tensor in fixed}


def _fixed(manifest: Manifest) -> dict[str, FrozenWeight]:
    """By the tensor."""
    known = {manifest.weights[row.weight].tensor: row for row in manifest.frozen}
    state = [(index, row.tensor) for index, row in enumerate(manifest.weights) if row.memory == "state"]
    return {tensor: FrozenWeight(weight=index, reason="state", sha256="") for index, tensor in state} | known


def _check_names(listed: Iterable[object], manifest: Manifest) -> None:
    """Raises update-invalid for names that are none of the bundle's."""
    known = dict.fromkeys(row.name for row in manifest.weights)
    names = [name for name in listed if isinstance(name, str)]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise _unknown(unknown, names, known)


PACKED = "_packed_params"
"""The module that a quantized layer of torch.ao keeps its weights in, packed: a bundle has them as plain tensors of that module."""

UNPACK = (
    "a state_dict has a quantized layer's weights packed: give the layer's weight().int_repr(), weight().q_scale() and bias() "
    "under these names"
)


def _unknown(name: str, listed: Sequence[str], known: Collection[str]) -> CallError:
    from difflib import get_close_matches  # only where something is wrong

    layer = name.partition(PACKED)[0] if PACKED in name.split(".") else name[: name.rfind(".") + 1]
    packed = [weight for weight in known if weight.startswith(f"{layer}{PACKED}.")]
    near = packed or get_close_matches(name, known, 1, 0.5)
    names = ", ".join(map(repr, near or list(known)[:3])) + ("" if near else " ...")
    return invalid(f"the program has no weight {name!r}, but {names}", UNPACK if packed else _prefix(name, listed, known))


def _prefix(name: str, names: Sequence[str], known: Collection[str]) -> str:
    """What to do where all names are given with a prefix too many, as DistributedDataParallel has them, or without one; else ""."""
    parts = name.split(".")
    for prefix in [".".join(parts[:count]) + "." for count in range(1, len(parts))]:
        if all(weight.startswith(prefix) for weight in names) and name.removeprefix(prefix) in known:
            return f"remove the prefix {prefix!r} from the names"
    for prefix in sorted({weight.removesuffix(name) for weight in known if weight.endswith(f".{name}")}):
        if all(prefix + weight in known for weight in names):
            return f"put the prefix {prefix!r} before the names"
    return ""


def _check_kind(name: str, contents: Contents, row: Weight, device: int | None) -> None:
    if contents.dtype != row.dtype:
        raise invalid(f"weight {name!r}: expected {row.dtype}, got {contents.dtype}")
    if contents.shape != row.shape:
        raise invalid(f"weight {name!r}: expected shape {list(row.shape)}, got {list(contents.shape)}")
    if contents.device not in (None, device):
        here = "the CPU" if device is None else f"the CPU or CUDA device {device}"
        raise invalid(f"weight {name!r}: expected a tensor on {here}, got one on device {contents.device}")


def _check_tied(name: str, contents: Contents, row: Weight, other: tuple[str, Contents]) -> None:
    if other[1] is contents:
        return
    mine, theirs = [(value.file, value.begin, value.address, value.strides) for value in (contents, other[1])]
    if mine != theirs and contents.digest(row) != other[1].digest(row):
        raise invalid(f"weights {other[0]!r} and {name!r} are one tensor in the model, and differ")


def _check_complete(manifest: Manifest, fixed: Mapping[str, FrozenWeight], chosen: Mapping[int, tuple[str, Contents]]) -> None:
    there = {manifest.weights[index].tensor for index in chosen}
    missing = [row for row in manifest.weights if row.tensor not in there and row.tensor not in fixed]
    names = list({row.tensor: row.name for row in reversed(missing)}.values())[::-1]
    if names:
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        raise invalid(
            f"weight {names[0]!r} is missing{more}", "give all weights, or say partial=True to replace those that are given"
        )


def _check_kept(name: str, contents: Contents, row: Weight, fixed: FrozenWeight) -> None:
    if contents.digest(row) != fixed.sha256:
        reason = REASONS[fixed.reason].format(where=fixed.where)
        raise CallError("update-refused", f"weight {name!r} {reason}, and what is given differs", HINTS[fixed.reason])
