"""Sizes as the user gives them -> sizes per declared dimension.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from cgbundle.errors import meant

from ..errors import BuildError, ModelError
from ..util.model_file import closest


class SavedDimension(NamedTuple):
    """A dimension of a saved program: the axes that it is the size of, such as `input_ids.0`, and the sizes it was exported for
    (`high` is None without a limit)."""

    name: str
    axes: tuple[str, ...]
    low: int
    high: int | None


Given = Sequence[int] | Sequence[str] | Mapping[str, Any] | str
"""[1, 8], {"batch": [1, 8]}, "1,8", or ["batch=1,8", "seq=32"].

Of several entries {"decode": [1, 8]}, {"decode": {"batch": [1, 8]}}, or ["decode:batch=1,8"].  What names no entry holds for all
that declare the dimension, and [1, 8] where all declare the same one.
"""

Inputs = Callable[..., Any] | Mapping[str, Callable[..., Any]]
"""What makes example inputs: a function for `forward`, or one for each method that is an entry."""


def sizes_of_entries(given: Given, dimensions: Mapping[str, Sequence[str]]) -> dict[str, Given]:
    """What was given for each of the entries, whose dimensions these are.  Raises sizes-invalid."""
    if isinstance(given, Mapping):
        parts = [
            (name if name in dimensions else "", sizes if name in dimensions else {name: sizes}) for name, sizes in given.items()
        ]
    else:
        items = [given] if isinstance(given, str) else list(given)
        if items and not any(isinstance(item, str) for item in items):
            items = [",".join(map(str, items))]
        parts = [_entry_of(item, dimensions) for item in items]
    if len(dimensions) == 1 and not any(entry for entry, _ in parts):
        return dict.fromkeys(dimensions, given)
    found: dict[str, dict[str, Sequence[int]]] = {entry: {} for entry in dimensions}
    for entry, part in sorted(parts, key=lambda part: not part[0]):
        own = [entry] if entry else [name for name in dimensions if _names_one_of(part, dimensions[name])]
        if not own:
            raise BuildError(
                "sizes-invalid", f"sizes: {_shown(part)} is of no entry (there are {', '.join(dimensions)})",
                "name the entry: --sizes decode:batch=1,8",
            )  # fmt: skip
        for name in own:
            for dimension, sizes in _pairs(part, dimensions[name], None, name):
                if entry and dimension in found[name]:
                    raise BuildError("sizes-invalid", f"sizes: dimension {dimension!r} of {name!r} is given twice")
                found[name].setdefault(dimension, sizes)
    return dict(found)


def _entry_of(item: Any, dimensions: Mapping[str, Sequence[str]]) -> tuple[str, Any]:
    """(entry, "" where none is named; the rest) of `decode:batch=1,8`."""
    entry, colon, rest = str(item).partition(":")
    if not colon:
        names = {name for own in dimensions.values() for name in own}  # one that all have need not be named
        return "", [item if "=" in str(item) or len(names) != 1 else f"{next(iter(names))}={item}"]
    name = entry.strip()
    if name not in dimensions:
        raise BuildError(
            "sizes-invalid", f"sizes: {name!r} is no entry{meant(name, dimensions)} (there are {', '.join(dimensions)})"
        )
    return name, [rest]


def _names_one_of(part: Any, dimensions: Sequence[str]) -> bool:
    """Whether what names no entry is about one of these dimensions."""
    if isinstance(part, Mapping):
        return bool(part.keys() & set(dimensions))
    return str(part[0]).partition("=")[0].strip() in dimensions


def _shown(part: Any) -> str:
    return repr(next(iter(part)))


def declared_sizes(
    given: Given, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None = None, entry: str = ""
) -> dict[str, tuple[int, ...]]:
    """Ascending sizes of every dimension, in declared order.  One of a `saved` program (None: it is a model file) may be called
    by an axis, `input_ids.0`.
    `entry` names the one of several that they are of.

    Raises sizes-invalid, and size-excluded for what a program was not exported for.
    """
    try:
        return _declared(given, dimensions, saved, entry)
    except BuildError as error:
        if not entry:
            raise
        raise BuildError("sizes-invalid", f"entry {entry!r}: {error}", error.hint) from None


def _declared(
    given: Given, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str
) -> dict[str, tuple[int, ...]]:
    pairs = _pairs(given, dimensions, saved, entry)
    found: dict[str, tuple[int, ...]] = {}
    for called, sizes in pairs:
        name = next((each.name for each in saved or () if called in each.axes), called)
        if name not in dimensions:
            known, near = ", ".join(dimensions) or "none", closest(name, dimensions)
            meant = f" (did you mean {near}?)" if near else ""
            raise BuildError(
                "sizes-invalid",
                f"sizes: {name!r} is no declared dimension{meant} (declared: {known})",
                "dimensions are the parameters of inputs()" if saved is None else _standing(saved) or STATIC,
            )
        if name in found:
            raise BuildError("sizes-invalid", f"sizes: dimension {name!r} is given twice")
        if not sizes:
            raise BuildError("sizes-invalid", f"sizes: no size for dimension {name!r}", f"add {_example([name], entry)}")
        for size in sizes:
            if size < 1:
                raise BuildError("sizes-invalid", f"sizes: {name}={size} is not a positive whole number")
        doubles = sorted({size for size in sizes if list(sizes).count(size) > 1})
        if doubles:
            raise BuildError("sizes-invalid", f"sizes: {name}={doubles[0]} is given twice")
        found[name] = tuple(sorted(sizes))
    if missing := [name for name in dimensions if name not in found]:
        named = " and ".join(map(repr, missing))
        raise BuildError(
            "sizes-invalid", f"sizes: no size for dimension{'s' * (len(missing) > 1)} {named}", f"add {_example(missing, entry)}"
        )
    for each in saved or ():
        for size in found[each.name]:
            if size < each.low or (each.high is not None and size > each.high):
                limits = f"min={each.low}" + ("" if each.high is None else f", max={each.high}")
                raise ModelError(
                    "size-excluded",
                    f"sizes: {each.name}={size} is excluded: the program was exported for {limits} ({_standing([each])})",
                    "export it again with another torch.export.Dim",
                )
    return {name: found[name] for name in dimensions}


def assumed_sizes(
    dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, wanted: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Sizes for all dimensions where nobody gave any: those that are `wanted`, moved to what a saved program was exported for."""
    limits = {each.name: (each.low, each.high) for each in saved or ()}
    found = {}
    for name in dimensions:
        low, high = limits.get(name, (1, None))
        found[name] = tuple(sorted({max(low, size if high is None else min(size, high)) for size in wanted}))
    return found


def _standing(saved: Sequence[SavedDimension]) -> str:
    """`dim0 is axis 0 of ids and axis 0 of mask; ...`."""
    told = []
    for each in saved:
        axes = [f"axis {axis} of {path}" for path, _, axis in [named.rpartition(".") for named in each.axes]]
        told += [f"{each.name} is {' and '.join(axes)}"] if axes else []
    return "; ".join(told)


def count_keys(sizes: Mapping[str, Mapping[str, Sequence[int]]], limit: int) -> int:
    """The number of int_keys of all entries.  Raises too-many-keys beyond `limit`."""
    keys = sum(prod(len(values) for values in size.values()) for size in sizes.values())
    if keys > limit:
        factors = " + ".join(" x ".join(f"{len(values)} {name}" for name, values in size.items()) or "1" for size in sizes.values())
        raise BuildError(
            "too-many-keys",
            f"sizes: {factors} makes {keys} int_keys, more than {limit}",
            f"give fewer sizes, or allow it with --max-keys {keys}",
        )
    return keys


def _pairs(
    given: Given, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str
) -> list[tuple[str, list[int]]]:
    if isinstance(given, Mapping):
        return [(name, [_whole(size) for size in sizes]) for name, sizes in given.items()]
    if isinstance(given, str):
        given = [given]
    items = list(given)
    if items and all(isinstance(item, str) for item in items):
        return [_parse(str(item), dimensions, saved, entry) for item in items]
    if not items:
        return []
    return [(_only(dimensions, saved, entry), [_whole(item) for item in items])]


def _parse(text: str, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str) -> tuple[str, list[int]]:
    name, equals, rest = text.partition("=")
    if not equals:
        name, rest = _only(dimensions, saved, entry), text
    return name.strip(), [_whole(part.strip()) for part in rest.split(",")] if rest.strip() else []


def _whole(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise BuildError("sizes-invalid", f"sizes: {value!r} is not a whole number") from None


def _example(missing: Sequence[str], entry: str) -> str:
    words = " ".join(f"--sizes {entry}{':' if entry else ''}{name}=1,8" for name in missing)
    given = "{" + ", ".join(f"{name!r}: [1, 8]" for name in missing) + "}"
    return f"{words}; in Python sizes={f'{{{entry!r}: {given}}}' if entry else given}"


STATIC = "the program was exported with fixed shapes: leave --sizes out, or export it with dynamic_shapes="


def _only(dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str) -> str:
    if len(dimensions) == 1:
        return dimensions[0]
    if not dimensions:
        raise BuildError(
            "sizes-invalid",
            "sizes: the model declares no dimension",
            "inputs() takes no parameter: leave --sizes out" if saved is None else STATIC,
        )
    raise BuildError(
        "sizes-invalid",
        f"sizes: the model declares {len(dimensions)} dimensions ({', '.join(dimensions)}): name each",
        f"for example {_example(dimensions, entry)}",
    )
