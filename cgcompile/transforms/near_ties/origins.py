"""Tracks which selected index each element of a tensor comes from, through operators that move elements.

The information is stored for the elements of a storage, so all its views share it, also after a write in place.  An element that is
an index times a number, plus another number, still comes from that index.  After any other arithmetic, or arithmetic of two
indices, the origin is unknown.  The information also contains the comparison that decided about an element, for example in a filter
of unlikely tokens.  Elementwise operators keep this comparison, but not the index.

Private interfaces (torch 2.11, 2.13): `torch.multiprocessing.reductions.StorageWeakRef`, `UntypedStorage._cdata`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...util.tolerance import tolerance

aten = torch.ops.aten

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


class Known:
    """The information about a storage.  `error`: the largest bound of the floating dtypes that computed its values.  `origins`,
    int64 (3, elements): the number of the selected index, its factor, and the number of the comparison that decided about the
    element; -1 for none.  `origins` is None if no element has an origin."""

    __slots__ = ("error", "origins", "storage")

    def __init__(self, storage: StorageWeakRef) -> None:
        self.storage, self.error = storage, 0.0
        self.origins: Tensor | None = None


class Origins:
    """The information about all storages of a run."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def error(self, tensor: Tensor) -> float:
        """Returns the error bound of a tensor's values, 0 if nothing computed them."""
        record = self._of(tensor)
        return record.error if record else 0.0

    def error_of(self, args: Sequence[Any]) -> float:
        """Returns the largest bound of an operator's operands."""
        return max([self.error(argument) for argument in args if isinstance(argument, Tensor)], default=0.0)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns the origins of a tensor's elements, int64 (3, *shape), as a view, or None if there are none."""
        record = self._of(tensor)
        if record is None or record.origins is None or record.origins.shape[1] != _elements(tensor):
            return None
        return record.origins.as_strided((3, *tensor.shape), (record.origins.stride(0), *tensor.stride()), tensor.storage_offset())

    def write(self, tensor: Tensor, origins: Tensor | None) -> None:
        """Sets the origins of a tensor's elements: int64, broadcast to (3, *shape).  None clears them."""
        current = self.of(tensor)
        if current is None:
            if origins is None:
                return
            record = self._storage_record(tensor)
            record.origins = torch.full((3, _elements(tensor)), -1, dtype=torch.int64, device=tensor.device)
            current = self.of(tensor)
            assert current is not None
        current.copy_(nothing(tensor) if origins is None else origins)

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Records the origins and the error bound of an operator's results, or of the tensor that it writes to."""
        tensors = [leaf for leaf in _leaves((args, kwargs)) if _dense(leaf)]
        error = max((self.error(tensor) for tensor in tensors), default=0.0)
        written = _write_target(func, args, kwargs)
        shared = {tensor.untyped_storage()._cdata for tensor in tensors} if written is None else set()
        new_tensors = [leaf for leaf in _leaves(result) if _dense(leaf) and leaf.untyped_storage()._cdata not in shared]
        if written is None and not new_tensors:
            return  # views: the information of their storage does not change
        for output in [written] if written is not None else new_tensors:
            rounding = 0.0 if output.dtype in FLOAT8 else tolerance(output.dtype)
            if error or rounding:
                record = self._storage_record(output)
                record.error = max(record.error, error, rounding)
        if not any(self.of(tensor) is not None for tensor in tensors):
            return
        target = written if written is not None else result
        if isinstance(target, Tensor) and _dense(target):
            self.write(target, self._moved(func, args, kwargs, target))

    def _moved(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], target: Tensor) -> Tensor | None:
        """Returns the origins of an operator's result, (3, *shape), or None if they are unknown."""
        packet = func.overloadpacket.__name__
        rule = _RULES.get(packet.rstrip("_") if packet != "_to_copy" else packet)
        if rule is None:
            return None

        def of(value: Any, like: Tensor | None = None) -> Tensor:
            origins_of_value = self.of(value) if isinstance(value, Tensor) else None
            if origins_of_value is not None:
                return origins_of_value
            return nothing(value if isinstance(value, Tensor) else target if like is None else like)

        origins = rule(of, func, args, kwargs)
        return None if origins is None else _ranked(origins, target.dim()).to(target.device).expand(3, *target.shape)

    def _of(self, tensor: Tensor) -> Known | None:
        return self._known.get(tensor.untyped_storage()._cdata)

    def _storage_record(self, tensor: Tensor) -> Known:
        storage = tensor.untyped_storage()
        record = self._known.get(storage._cdata)
        if record is None:
            record = self._known[storage._cdata] = Known(StorageWeakRef(storage))
        return record


def nothing(tensor: Tensor) -> Tensor:
    """Returns the origins of elements that come from no index."""
    return torch.tensor(-1, device=tensor.device).expand(3, *tensor.shape)


Of = Callable[..., Tensor]


def _each_row(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Applies an operator that moves elements of its first argument, by sizes or indices, to all rows of the origins."""
    return torch.stack([func(row, *args[1:], **kwargs) for row in of(args[0]).unbind(0)])


def _same_rows(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return of(args[0])


def _copied(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return of(args[1])


def _joined(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    parts = [of(tensor).unbind(0) for tensor in args[0]]
    return torch.stack([func(list(rows), *args[1:], **kwargs) for rows in zip(*parts, strict=True)])


def _where(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    condition, one, other = _together(of(args[0]), of(args[1]), of(args[2]))
    return _decided_by(torch.where(args[0], one, other), condition)


def _filled(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    rows, condition = _together(of(args[0]), of(args[1]))
    return _decided_by(torch.where(args[1], -1, rows), condition)


def _decided_by(rows: Tensor, condition: Tensor) -> Tensor:
    """Returns the origins of elements about which a condition decided."""
    return torch.stack([rows[0], rows[1], torch.where(condition[2] >= 0, condition[2], rows[2])])


def _together(*origins: Tensor) -> tuple[Tensor, ...]:
    """Broadcasts the origins of operands to each other."""
    rank = max(origin.dim() for origin in origins) - 1
    return tuple(torch.broadcast_tensors(*[_ranked(origin, rank) for origin in origins]))


def _ranked(origins: Tensor, rank: int) -> Tensor:
    """Adds leading axes, so that the origins are those of a tensor with `rank` axes."""
    return origins.reshape(3, *[1] * (rank + 1 - origins.dim()), *origins.shape[1:])


def _elementwise(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Handles operators of one or two operands: the result is no index, but keeps the comparison that decided about the operand."""
    operands = [of(argument) for argument in args[:2] if isinstance(argument, Tensor)]
    rows = operands[0] if len(operands) == 1 else _only_one(*operands)
    return torch.stack([torch.full_like(rows[0], -1), rows[1], rows[2]])


def _index_put(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Handles index_put(self, indices, values, accumulate)."""
    if (len(args) > 3 and args[3]) or kwargs.get("accumulate"):
        return None
    pairs = zip(of(args[0]).unbind(0), of(args[2]).unbind(0), strict=True)
    return torch.stack([aten.index_put.default(row, args[1], value) for row, value in pairs])


def _scattered(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Handles scatter(self, dim, index, src), also with a number instead of src."""
    if "reduce" in kwargs or len(args) > 4:
        return None
    rows, values = of(args[0]).unbind(0), of(args[3], args[2]).unbind(0)
    return torch.stack(
        [aten.scatter.src(row, args[1], args[2], value.contiguous()) for row, value in zip(rows, values, strict=True)]
    )


def _inserted(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Handles slice_scatter and select_scatter(self, src, ...)."""
    functional = getattr(torch.ops.aten, func.overloadpacket.__name__).default
    pairs = zip(of(args[0]).unbind(0), of(args[1]).unbind(0), strict=True)
    return torch.stack([functional(row, value, *args[2:], **kwargs) for row, value in pairs])


def _padded(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return torch.stack([aten.constant_pad_nd.default(row, args[1], -1) for row in of(args[0]).unbind(0)])


def _scaled(sign: int) -> Callable[..., Tensor]:
    """Returns the rule of add and sub, which add a number to an index.  `sign`: that of the second operand."""

    def rule(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        factor = sign * kwargs.get("alpha", 1)
        return _only_one(of(args[0]), _times(of(args[1]), factor))

    return rule


def _subtracted(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Handles rsub(self, other): other - self."""
    return _only_one(_times(of(args[0]), -kwargs.get("alpha", 1)), of(args[1]))


def _multiplied(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return _only_one(_times(of(args[0]), args[1]), _times(of(args[1]), args[0]))


def _negated(of: Of, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return _times(of(args[0]), -1)


def _times(origins: Tensor, factor: Any) -> Tensor:
    """Returns the origins of indices times an integer that is not 0."""
    if not isinstance(factor, Tensor):
        is_int = isinstance(factor, int)
        factor = torch.tensor(factor if is_int else 0, device=origins.device)
    elif factor.is_floating_point() or factor.is_complex():
        factor = torch.zeros((), dtype=torch.int64, device=origins.device)
    origins = _ranked(origins, max(origins.dim() - 1, factor.dim()))
    number, scale, comparisons = torch.broadcast_tensors(origins[0], origins[1] * factor, origins[2])
    return torch.stack([torch.where((number >= 0) & (scale != 0), number, -1), scale, comparisons])


def _only_one(one: Tensor, other: Tensor) -> Tensor:
    """Combines the origins of two operands: keeps an index, or a comparison, of elements for which only one operand has one."""
    one, other = _together(one, other)

    def of_one(row: int) -> Tensor:
        both = (one[row] >= 0) & (other[row] >= 0)
        return torch.where(both, -1, torch.maximum(one[row], other[row]))

    return torch.stack([of_one(0), torch.where(one[0] >= 0, one[1], other[1]), of_one(2)])


_RULES: dict[str, Callable[..., Tensor | None]] = {
    **dict.fromkeys(("clone", "_to_copy", "contiguous", "lift_fresh_copy", "to"), _same_rows),
    **dict.fromkeys(
        ("gather", "index", "index_select", "take", "repeat", "flip", "roll", "view_copy", "unfold_copy", "as_strided_copy",
         "expand_copy", "permute_copy", "slice_copy", "select_copy", "_unsafe_index", "_unsafe_view", "_reshape_alias"),
        _each_row,
    ),
    "copy": _copied,
    **dict.fromkeys(("cat", "stack"), _joined),
    "where": _where,
    "masked_fill": _filled,
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put),
    "scatter": _scattered,
    **dict.fromkeys(("slice_scatter", "select_scatter"), _inserted),
    "constant_pad_nd": _padded,
    "add": _scaled(1),
    "sub": _scaled(-1),
    "rsub": _subtracted,
    "mul": _multiplied,
    "neg": _negated,
    **dict.fromkeys(
        ("div", "pow", "exp", "log", "sigmoid", "tanh", "maximum", "minimum", "clamp", "bitwise_and", "bitwise_or", "bitwise_not",
         "logical_and", "logical_or", "logical_not", "nan_to_num"),
        _elementwise,
    ),
    **dict.fromkeys(("_softmax", "_log_softmax"), _elementwise),
}  # fmt: skip
"""Rules by operator, in place or not.  A rule returns the origins of the result."""


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [leaf for entry in value for leaf in _leaves(entry)] if not isinstance(value, str) and hasattr(value, "__iter__") else []


def _elements(tensor: Tensor) -> int:
    """Returns how many elements of a tensor's dtype its storage holds."""
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def _dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _write_target(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the tensor that an operator writes to, the first of several, or None."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor) and _dense(value):
                return value
    return None
