"""Plans the replays for the shapes of a call, with slices of every input and output; `pieces` chooses the recorded sizes. Guards
compare dtypes, devices and shapes with the signature; errors name the input, the axis, expected and actual. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from ..errors import CallError
from ..format.schema import Dimension, EntrySpec, Size, TensorSpec
from ..format.shapes import evaluate, linear, text
from ..tensors.library import Descriptor

Slices = tuple[slice, ...]
Shape = tuple[int, ...]

POLICIES = ("pad", "chunk", "error")


class Part(NamedTuple):
    """One replay: position of its program; slices and recorded shape of each input; for each output the valid slices and their
    place in the call's output."""

    program: int
    inputs: tuple[tuple[Slices, Shape], ...]
    outputs: tuple[tuple[Slices, Slices], ...]


class Plan(NamedTuple):
    """`exact`: one recorded key serves the call as it is. `shapes`: of the call's outputs."""

    exact: bool
    shapes: tuple[Shape, ...]
    parts: tuple[Part, ...]


def plan(entry: EntrySpec, shapes: Sequence[Sequence[int]], on_miss: str) -> Plan:
    """Raises input-shape, dimension-disagrees, key-missing."""
    sizes, names = call_sizes(entry, shapes), [dimension.name for dimension in entry.dimensions]
    keys = {program.key: index for index, program in enumerate(entry.programs)}
    replays: Sequence[Sequence[tuple[int, int, int]]] = [[(0, size, size) for size in sizes]]
    if sizes not in keys:
        replays = pieces(entry.dimensions, sizes, on_miss, partial(where_declared, entry))
    parts = []
    for piece in replays:
        starts, lengths, recorded = [{name: chunk[field] for name, chunk in zip(names, piece, strict=True)} for field in range(3)]
        inputs = [(_ranges(spec.shape, starts, lengths), _shape(spec, recorded)) for spec in entry.inputs]
        outputs = [
            (tuple([slice(0, size) for size in _shape(spec, lengths)]), _ranges(spec.shape, starts, lengths))
            for spec in entry.outputs
        ]
        parts.append(Part(keys[tuple(recorded.values())], tuple(inputs), tuple(outputs)))
    whole = dict(zip(names, sizes, strict=True))
    exact = len(parts) == 1 and sizes in keys
    return Plan(exact, tuple([_shape(spec, whole) for spec in entry.outputs]), tuple(parts))


def number_of_key(entry: EntrySpec, key: tuple[int, ...]) -> int:
    """The position of an int_key's program. Raises key-missing with the recorded keys."""
    keys = [program.key for program in entry.programs]
    if not isinstance(key, tuple) or key not in keys:
        known = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
        raise CallError("key-missing", f"expected a recorded int_key ({known}), got {key!r}")
    return keys.index(key)


def _shape(spec: TensorSpec, sizes: dict[str, int]) -> Shape:
    return tuple([evaluate(size, sizes) for size in spec.shape])


def _ranges(shape: Sequence[Size], starts: dict[str, int], lengths: dict[str, int]) -> Slices:
    ranges = []
    for size in shape:
        rule = linear(size)
        start = rule[1] * starts[rule[0]] if rule else 0
        ranges.append(slice(start, start + evaluate(size, lengths)))
    return tuple(ranges)


# --- guards ---------------------------------------------------------------------------------------------------------


def call_sizes(entry: EntrySpec, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sizes of the declared dimensions, in order, for inputs of `shapes`. Raises input-shape, dimension-disagrees."""
    sizes: dict[str, tuple[int, str]] = {}
    for spec, shape in zip(entry.inputs, shapes, strict=True):
        if len(shape) != len(spec.shape):
            expected = f"expected {len(spec.shape)} axes {signature(spec)}"
            raise CallError("input-shape", f"input {spec.name!r}: {expected}, got {len(shape)}: {list(shape)}")
        for axis, (size, actual) in enumerate(zip(spec.shape, shape, strict=True)):
            rule, where = linear(size), f"input {spec.name!r}, axis {axis}"
            if rule is None:
                if actual != size:
                    raise CallError("input-shape", f"{where}: expected {text(size)}, got {actual}; the input is {signature(spec)}")
                continue
            name, scale, offset = rule
            value, rest = divmod(actual - offset, scale)
            if rest or value < 0:
                raise CallError("input-shape", f"{where}: expected {text(size)}, but no value of {name} gives {actual}")
            first = sizes.setdefault(name, (value, where))
            if first[0] != value:
                message = f"{where}: expected {name}={first[0]} as in {first[1]}, got {value}"
                axes = f"the axes of {spec.name!r} that are {name} have to be equal"
                raise CallError("dimension-disagrees", message, axes if f"input {spec.name!r}," in first[1] else "")
    return tuple([sizes[dimension.name][0] for dimension in entry.dimensions])


def where_declared(entry: EntrySpec, dimension: str) -> str:
    """The first place of a dimension in a call: `input 'ids', axis 0`."""
    for spec in entry.inputs:
        for axis, size in enumerate(spec.shape):
            rule = linear(size)
            if rule and rule[0] == dimension:
                return f"input {spec.name!r}, axis {axis}"
    return dimension


def common_device(inputs: Sequence[TensorSpec], descriptors: Sequence[Descriptor], expected: int | None) -> int | None:
    """The device of all inputs: the CPU (None), or the program's CUDA device `expected`. Raises input-device."""
    device = descriptors[0][4]
    alike = device is None or device == expected
    for descriptor in descriptors:
        if descriptor[4] != device:
            alike = False
    if not alike:
        from ..tensors.input_errors import wrong_device  # only for failed calls

        raise wrong_device(inputs, descriptors, expected)
    return device


def signature(spec: TensorSpec) -> str:
    return "[" + ", ".join(text(size) for size in spec.shape) + "]"


# --- sizes that were not recorded ----------------------------------------------------------------------------------------


MOST_PIECES = 1 << 20  # replays of one call; the plan for a huge broadcast array would fill the memory


class Chunk(NamedTuple):
    """Along one dimension: `length` rows from `start`, served by the recorded `size` >= length."""

    start: int
    length: int
    size: int


Replay = tuple[Chunk, ...]  # a chunk for each dimension, in declared order
_LARGE = "call it with parts of its inputs"
_EMPTY = "answer an empty call yourself: a size of 1 is the least that a bundle can have"
_NO_POLICY = 'call with a recorded size, or load the bundle with on_miss="pad" or "chunk"'


def pieces(
    dimensions: Sequence[Dimension], sizes: Sequence[int], on_miss: str, where: Callable[[str], str] = str
) -> tuple[Replay, ...]:
    """The replays for a call with `sizes`. Each dimension is planned by itself, since recorded keys are the product of the
    dimensions' sizes. `where`: the place of a dimension for messages. Raises key-missing with a hint why the build does not allow
    padding or chunks."""
    chunks = []
    for dimension, size in zip(dimensions, sizes, strict=True):
        try:
            chunks.append(_chunks(dimension, size, on_miss))
        except CallError as error:
            raise CallError("key-missing", f"{where(dimension.name)}: {error}", error.hint) from None
    if prod(map(len, chunks)) > MOST_PIECES:
        raise CallError("key-missing", f"the call would take more than {MOST_PIECES} replays", _LARGE)
    return tuple(product(*chunks))


def _chunks(dimension: Dimension, size: int, on_miss: str) -> list[Chunk]:
    name, recorded = dimension.name, dimension.sizes
    smallest, largest, pads = recorded[0], recorded[-1], dimension.pad != "no"
    if size in recorded:
        return [Chunk(0, size, size)]
    if size < 1:
        raise CallError("key-missing", f"got {name}={size}: there is nothing to run", _EMPTY)
    if on_miss == "error":
        raise CallError("key-missing", f"expected a recorded {name} ({_list(dimension)}), got {size}", _NO_POLICY)
    most = MOST_PIECES * largest
    if size > most:
        raise CallError("key-missing", f"expected at most {name}={most}, {MOST_PIECES} replays, got {size}", _LARGE)
    if dimension.chunk and size > smallest and (on_miss == "chunk" or size > largest or not pads):
        if on_miss == "pad" and pads:  # the largest first
            whole, rest = divmod(size, largest)
            steps = [largest] * whole + ([_holding(recorded, rest)] if rest else [])
        else:
            steps = _fewest_wasted(recorded, size, exact=not pads)
        if steps:
            starts = accumulate(steps, initial=0)
            return [Chunk(start, min(step, size - start), step) for start, step in zip(starts, steps, strict=False)]
    if size <= largest and pads:
        return [Chunk(0, size, _holding(recorded, size))]
    raise _refusal(dimension, size)


def _holding(recorded: Sequence[int], size: int) -> int:
    return next(step for step in recorded if step >= size)


def _fewest_wasted(sizes: Sequence[int], size: int, *, exact: bool) -> list[int]:
    """Recorded sizes, largest first, with a sum of at least `size`: least excess, then fewest pieces; [] if `exact` and no sum
    fits. Dynamic programming over the last `largest**2` rows: above that an optimal sum always has the largest size (of any
    `largest` smaller pieces some sum to a multiple of it). A sum of smallest sizes wastes less than one, which limits the
    search."""
    smallest, largest = sizes[0], sizes[-1]
    bulk = max(0, (size - largest * largest) // largest)
    rest = size - bulk * largest
    last = rest if exact else rest + smallest - 1
    never = (last + 1, 0)
    best: list[tuple[int, int]] = [(0, 0)] + [never] * last  # total -> (pieces, last piece)
    for total in range(1, last + 1):
        for piece in sizes:
            if piece <= total and best[total - piece][0] + 1 < best[total][0]:
                best[total] = (best[total - piece][0] + 1, piece)
    reached = next((total for total in range(rest, last + 1) if best[total] != never), None)
    if reached is None:
        return []
    steps = [largest] * bulk
    while reached > 0:
        steps.append(best[reached][1])
        reached -= best[reached][1]
    return sorted(steps, reverse=True)


def _refusal(dimension: Dimension, size: int) -> CallError:
    """The reason may quote the model's source, so it is in the hint: servers send only the message to clients."""
    name, largest, why = dimension.name, dimension.sizes[-1], dimension.reason
    if dimension.chunk:
        expected, refused = f"a sum of recorded {name} ({_list(dimension)})", f"{name} cannot be padded"
    elif size > largest:
        expected, refused, why = f"at most {name}={largest}", f"a call cannot be chunked along {name}", dimension.not_chunked or why
    else:
        expected, refused = f"a recorded {name} ({_list(dimension)})", f"{name} cannot be padded"
    more = ", or more" if dimension.pad != "no" and size > largest else ""
    hint = f"build the bundle with {name}={size} among its --sizes{more} ({refused}: {why})"
    return CallError("key-missing", f"expected {expected}, got {size}, and {refused}", hint)


def _list(dimension: Dimension) -> str:
    return ", ".join(map(str, dimension.sizes))
