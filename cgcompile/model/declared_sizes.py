"""Converts the sizes that the user passes to sizes per declared dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from cgbundle.errors import did_you_mean

from ..errors import BuildError, ModelError
from ..util.model_file import closest


class SavedDimension(NamedTuple):
    """A dimension of a saved program.  `axes` are the input axes with this size, such as `input_ids.0`.  The program was exported
    for sizes from `low` to `high` (None: no limit)."""

    name: str
    axes: tuple[str, ...]
    low: int
    high: int | None


SizesOption = Sequence[int] | Sequence[str] | Mapping[str, Any] | str
"""[1, 8], {"batch": [1, 8]}, "1,8", or ["batch=1,8", "seq=32"].

For several entries: {"decode": [1, 8]}, {"decode": {"batch": [1, 8]}} or ["decode:batch=1,8"].  Sizes without an entry apply to all
entries that declare the dimension.  [1, 8] needs a single dimension in all entries.
"""

Inputs = Callable[..., Any] | Mapping[str, Callable[..., Any]]
"""A function that creates example inputs for `forward`, or such a function for each entry."""


def sizes_of_entries(option: SizesOption, dimensions: Mapping[str, Sequence[str]]) -> dict[str, SizesOption]:
    """Returns the sizes of each entry.  `dimensions` maps entries to their dimensions.  Raises sizes-invalid."""
    if isinstance(option, Mapping):
        parts = [
            (name if name in dimensions else "", sizes if name in dimensions else {name: sizes}) for name, sizes in option.items()
        ]
    else:
        items = [option] if isinstance(option, str) else list(option)
        if items and not any(isinstance(item, str) for item in items):
            items = [",".join(map(str, items))]
        parts = [_entry_of(item, dimensions) for item in items]
    if len(dimensions) == 1 and not any(entry for entry, _ in parts):
        return dict.fromkeys(dimensions, option)
    by_entry: dict[str, dict[str, Sequence[int]]] = {entry: {} for entry in dimensions}
    for entry, part in sorted(parts, key=lambda part: not part[0]):
        entries = [entry] if entry else [name for name in dimensions if _names_one_of(part, dimensions[name])]
        if not entries:
            raise BuildError(
                "sizes-invalid", f"sizes: {_first_text(part)} names no entry (there are {', '.join(dimensions)})",
                "name the entry: --sizes decode:batch=1,8",
            )  # fmt: skip
        for name in entries:
            for dimension, sizes in _pairs(part, dimensions[name], None, name):
                if entry and dimension in by_entry[name]:
                    raise BuildError("sizes-invalid", f"sizes: dimension {dimension!r} of {name!r} is given twice")
                by_entry[name].setdefault(dimension, sizes)
    return dict(by_entry)


def _entry_of(item: Any, dimensions: Mapping[str, Sequence[str]]) -> tuple[str, Any]:
    """Splits `decode:batch=1,8` into the entry, or "", and `batch=1,8`."""
    entry, colon, rest = str(item).partition(":")
    if not colon:
        names = {name for group in dimensions.values() for name in group}  # a single dimension need not be named
        return "", [item if "=" in str(item) or len(names) != 1 else f"{next(iter(names))}={item}"]
    name = entry.strip()
    if name not in dimensions:
        raise BuildError(
            "sizes-invalid",
            f"sizes: there is no entry {name!r}{did_you_mean(name, dimensions)} (there are {', '.join(dimensions)})",
        )
    return name, [rest]


def _names_one_of(part: Any, dimensions: Sequence[str]) -> bool:
    if isinstance(part, Mapping):
        return bool(part.keys() & set(dimensions))
    return str(part[0]).partition("=")[0].strip() in dimensions


def _first_text(part: Any) -> str:
    return repr(next(iter(part)))


def declared_sizes(
    option: SizesOption, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None = None, entry: str = ""
) -> dict[str, tuple[int, ...]]:
    """Returns ascending sizes of every dimension, in declared order.  For a `saved` program (None for a model file), an axis such
    as `input_ids.0` can be used as the name of its dimension.  `entry` names the entry if there are several.  Raises sizes-invalid,
    and size-excluded for sizes that the program was not exported for."""
    try:
        return _declared(option, dimensions, saved, entry)
    except BuildError as error:
        if not entry:
            raise
        raise BuildError("sizes-invalid", f"entry {entry!r}: {error}", error.hint) from None


def _declared(
    option: SizesOption, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str
) -> dict[str, tuple[int, ...]]:
    pairs = _pairs(option, dimensions, saved, entry)
    by_name: dict[str, tuple[int, ...]] = {}
    for given_name, sizes in pairs:
        name = next((dimension.name for dimension in saved or () if given_name in dimension.axes), given_name)
        if name not in dimensions:
            listed, suggestion = ", ".join(dimensions) or "none", closest(name, dimensions)
            meant = f" (did you mean {suggestion}?)" if suggestion else ""
            raise BuildError(
                "sizes-invalid",
                f"sizes: there is no declared dimension {name!r}{meant} (declared: {listed})",
                "dimensions are the parameters of inputs()" if saved is None else _axes_text(saved) or STATIC,
            )
        if name in by_name:
            raise BuildError("sizes-invalid", f"sizes: dimension {name!r} is given twice")
        if not sizes:
            raise BuildError("sizes-invalid", f"sizes: no size for dimension {name!r}", f"add {_example([name], entry)}")
        for size in sizes:
            if size < 1:
                raise BuildError("sizes-invalid", f"sizes: {name}={size} is not a positive whole number")
        doubles = sorted({size for size in sizes if list(sizes).count(size) > 1})
        if doubles:
            raise BuildError("sizes-invalid", f"sizes: {name}={doubles[0]} is given twice")
        by_name[name] = tuple(sorted(sizes))
    if missing := [name for name in dimensions if name not in by_name]:
        named = " and ".join(map(repr, missing))
        raise BuildError(
            "sizes-invalid", f"sizes: no size for dimension{'s' * (len(missing) > 1)} {named}", f"add {_example(missing, entry)}"
        )
    for dimension in saved or ():
        for size in by_name[dimension.name]:
            if size < dimension.low or (dimension.high is not None and size > dimension.high):
                limits = f"min={dimension.low}" + ("" if dimension.high is None else f", max={dimension.high}")
                limits += f" ({_axes_text([dimension])})"
                raise ModelError(
                    "size-excluded",
                    f"sizes: {dimension.name}={size} is excluded: the program was exported for {limits}",
                    "export it again with another torch.export.Dim",
                )
    return {name: by_name[name] for name in dimensions}


def assumed_sizes(
    dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, preferred: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Returns `preferred` sizes for all dimensions, clamped to the range of a saved program."""
    limits = {dimension.name: (dimension.low, dimension.high) for dimension in saved or ()}
    sizes = {}
    for name in dimensions:
        low, high = limits.get(name, (1, None))
        sizes[name] = tuple(sorted({max(low, size if high is None else min(size, high)) for size in preferred}))
    return sizes


def _axes_text(saved: Sequence[SavedDimension]) -> str:
    """Returns text such as `dim0 is axis 0 of ids and axis 0 of mask; ...`."""
    phrases = []
    for dimension in saved:
        axes = [f"axis {axis} of {path}" for path, _, axis in [axis_path.rpartition(".") for axis_path in dimension.axes]]
        phrases += [f"{dimension.name} is {' and '.join(axes)}"] if axes else []
    return "; ".join(phrases)


def count_keys(sizes: Mapping[str, Mapping[str, Sequence[int]]], limit: int) -> int:
    """Returns the number of int_keys of all entries.  Raises too-many-keys if it is larger than `limit`."""
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
    option: SizesOption, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str
) -> list[tuple[str, list[int]]]:
    if isinstance(option, Mapping):
        return [(name, [_integer(size) for size in sizes]) for name, sizes in option.items()]
    if isinstance(option, str):
        option = [option]
    items = list(option)
    if items and all(isinstance(item, str) for item in items):
        return [_parse(str(item), dimensions, saved, entry) for item in items]
    if not items:
        return []
    return [(_only_dimension(dimensions, saved, entry), [_integer(item) for item in items])]


def _parse(text: str, dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str) -> tuple[str, list[int]]:
    name, equals, rest = text.partition("=")
    if not equals:
        name, rest = _only_dimension(dimensions, saved, entry), text
    return name.strip(), [_integer(part.strip()) for part in rest.split(",")] if rest.strip() else []


def _integer(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise BuildError("sizes-invalid", f"sizes: {value!r} is not a whole number") from None


def _example(missing: Sequence[str], entry: str) -> str:
    words = " ".join(f"--sizes {entry}{':' if entry else ''}{name}=1,8" for name in missing)
    literal = "{" + ", ".join(f"{name!r}: [1, 8]" for name in missing) + "}"
    return f"{words}; in Python sizes={f'{{{entry!r}: {literal}}}' if entry else literal}"


STATIC = "the program was exported with fixed shapes: leave --sizes out, or export it with dynamic_shapes="


def _only_dimension(dimensions: Sequence[str], saved: Sequence[SavedDimension] | None, entry: str) -> str:
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
