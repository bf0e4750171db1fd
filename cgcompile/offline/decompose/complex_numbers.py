"""Computes with pairs of real tensors instead of complex ones, for which Inductor has no kernels.

When a program is retraced, operations that take or return complex numbers run on `Pair`s.  Composite operators (`fft_rfft`, `stft`,
`real`) are first traced, each separately.  The operators that they consist of need an entry in `RULES` or `EACH`.  Inputs and
results of a program stay complex, and are refused because they have no kernel.

Private interfaces (torch 2.11, 2.13): `FakeTensorMode`, `make_fx`, `torch.func.functionalize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Node
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import ModelError
from .fourier import inverse_short_time, to_complex, to_complex_halves, to_real

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Pair:
    """Real and imaginary part, of the same shape."""

    real: Tensor
    imag: Tensor


def is_complex(node: Node) -> bool:
    """Whether an operation of a program takes or returns complex numbers."""
    values = [node.meta.get("val"), [operand.meta.get("val") for operand in node.all_input_nodes]]
    plain = isinstance(node.target, torch._ops.OpOverload)
    return plain and any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in tree_leaves(values))


def run_on_pairs(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation with a `Pair` for every complex tensor.  Raises operator-without-kernel for an operator without a rule."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Pair | Tensor)]
    return _OnPairs(_parts(target, args, kwargs)).run(*tensors)


def joined(value: Any) -> Any:
    """The complex tensor of a `Pair`; any other value unchanged."""
    return torch.complex(value.real, value.imag) if isinstance(value, Pair) else value


def _parts(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphModule:
    """Returns the graph of the operators that an operator consists of.  Traces it in another thread, because the modes of the
    current trace are thread-local."""
    leaves, spec = torch.utils._pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Pair | Tensor)]
    layouts = [_layout(leaves[index]) for index in places]

    def run(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for index, tensor in zip(places, tensors, strict=True):
            filled[index] = tensor
        own_args, own_kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        return WHOLE.get(target, target)(*own_args, **own_kwargs)

    def trace() -> GraphModule:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fake_tensors = [torch.empty_strided(*layout, dtype=dtype, device=device) for *layout, dtype, device in layouts]
            traced: GraphModule = make_fx(torch.func.functionalize(run, remove="mutations"))(*fake_tensors)
            return traced

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(trace).result()


def _layout(value: Pair | Tensor) -> tuple[Any, ...]:
    """(sizes, strides, dtype, device)"""
    if isinstance(value, Pair):
        return tuple(value.real.shape), value.real.stride(), value.real.dtype.to_complex(), value.real.device
    return tuple(value.shape), value.stride(), value.dtype, value.device


class _OnPairs(Interpreter):
    """Runs operators that are not decomposed further on pairs."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # keeps torch from adding lines to the text of exceptions

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        values = [self.env[node] for node in self._node.all_input_nodes if node in self.env]
        output = self._node.meta.get("val")
        pairs = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Pair) or (isinstance(leaf, Tensor) and leaf.is_complex())]
        returns_complex = any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in tree_leaves(output))
        if not (pairs or returns_complex) or not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        args, kwargs = tree_map(_split, (args, kwargs))
        if target in RULES:
            return RULES[target](*args, **kwargs)
        if target in EACH:
            return _both_parts(EACH[target] or target, args, kwargs)
        raise ModelError("operator-without-kernel", f"{str(target).removesuffix('.default')} of complex numbers")

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)


def _split(value: Any) -> Any:
    """A complex tensor, such as a weight or an input, as a pair of views; any other value unchanged."""
    if isinstance(value, Tensor) and value.is_complex():
        parts = torch.view_as_real(value)
        return Pair(parts.select(-1, 0), parts.select(-1, 1))
    return value


def _both_parts(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Applies an operator to both parts.  For an operator that returns a list, returns a list of pairs."""
    real, imaginary = [target(*tree_map(part, tuple(args)), **tree_map(part, dict(kwargs))) for part in (_real, _imag)]
    if isinstance(real, Tensor):
        return Pair(real, imaginary)
    return [Pair(*parts) for parts in zip(real, imaginary, strict=True)]


def _real(value: Any) -> Any:
    return value.real if isinstance(value, Pair | complex) else value


def _imag(value: Any) -> Any:
    """The imaginary part of an argument.  A real value is returned as it is."""
    return value.imag if isinstance(value, Pair | complex) else value


def pair(value: Any, like: Pair | None = None) -> Pair:
    """Returns a real tensor or a number as a pair.  Numbers become tensors of the dtype and device of `like`."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, Tensor):
        return Pair(value, torch.zeros_like(value))
    number = complex(value)
    assert like is not None
    return Pair(*[torch.full((), part, dtype=like.real.dtype, device=like.real.device) for part in (number.real, number.imag)])


def multiply(a: Any, b: Any) -> Pair:
    if isinstance(a, Pair) and isinstance(b, Pair):
        return Pair(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
    if isinstance(b, Pair):
        a, b = b, a
    if isinstance(a, Pair):
        if isinstance(b, complex):
            return Pair(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
        return Pair(a.real * b, a.imag * b)
    return Pair(a * complex(b).real, a * complex(b).imag)  # a real tensor by a complex number


def divide(a: Any, b: Any) -> Pair:
    if isinstance(b, complex):
        return multiply(a, 1 / b)
    if not isinstance(b, Pair):
        return Pair(a.real / b, a.imag / b)
    return multiply(a, reciprocal(b))


def reciprocal(x: Pair) -> Pair:
    """Divides by the larger part first, because the square of a large or small number would overflow or underflow."""
    largest = torch.maximum(x.real.abs(), x.imag.abs())
    real, imag = x.real / largest, x.imag / largest
    square = real * real + imag * imag
    return Pair(real / square / largest, -imag / square / largest)


def add(a: Any, b: Any, *, alpha: Any = 1) -> Pair:
    scaled: Any = multiply(b, alpha) if isinstance(b, Pair) else b * alpha
    like = next((operand for operand in (a, scaled) if isinstance(operand, Pair)), None)
    if like is None:  # a real tensor and a complex number
        number = complex(scaled)
        return Pair(a + number.real, torch.full_like(a, number.imag))
    left, right = pair(a, like), pair(scaled, like)
    return Pair(left.real + right.real, left.imag + right.imag)


def subtract(a: Any, b: Any, *, alpha: Any = 1) -> Pair:
    return add(a, b, alpha=-alpha)


def added_product(x: Any, a: Any, b: Any, *, value: Any = 1) -> Pair:
    factors = multiply(a, b) if isinstance(a, Pair) or isinstance(b, Pair) else a * b
    return add(x, factors, alpha=value)


def product(operator: Any) -> Callable[..., Pair]:
    """Returns a matrix product of which either factor may be complex."""

    def multiplied(a: Any, b: Any) -> Pair:
        if not isinstance(a, Pair):
            return Pair(operator(a, b.real), operator(a, b.imag))
        if not isinstance(b, Pair):
            return Pair(operator(a.real, b), operator(a.imag, b))
        return Pair(operator(a.real, b.real) - operator(a.imag, b.imag), operator(a.real, b.imag) + operator(a.imag, b.real))

    return multiplied


def as_complex(x: Tensor) -> Pair:
    return Pair(x.select(-1, 0), x.select(-1, 1))


def polar(size: Tensor, angle: Tensor) -> Pair:
    return Pair(size * torch.cos(angle), size * torch.sin(angle))


def exponential(x: Pair) -> Pair:
    return polar(torch.exp(x.real), x.imag)


def full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Pair:
    part, number = (dtype or torch.complex64).to_real(), complex(value)
    return Pair(*[torch.full(size, component, dtype=part, device=device) for component in (number.real, number.imag)])


def filled(value: complex) -> Callable[..., Pair]:
    return lambda x, **more: Pair(torch.full_like(x.real, value.real), torch.full_like(x.real, value.imag))


def concatenate(operator: Any) -> Callable[..., Pair]:
    def concatenate_pairs(values: Sequence[Any], dim: int = 0) -> Pair:
        pairs = [pair(value) for value in values]
        return Pair(operator([number.real for number in pairs], dim), operator([number.imag for number in pairs], dim))

    return concatenate_pairs


def where(condition: Tensor, a: Any, b: Any) -> Pair:
    like = a if isinstance(a, Pair) else b
    left, right = pair(a, like), pair(b, like)
    return Pair(torch.where(condition, left.real, right.real), torch.where(condition, left.imag, right.imag))


def padded(x: Pair, lengths: Sequence[int], value: Any = 0) -> Pair:
    number = complex(value)
    return Pair(aten.constant_pad_nd(x.real, lengths, number.real), aten.constant_pad_nd(x.imag, lengths, number.imag))


def converted(x: Any, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    """Converts to another dtype.  A conversion to a real dtype keeps the real part, as in PyTorch."""
    if isinstance(x, Pair):
        if dtype is None:
            return x
        return Pair(x.real.to(dtype.to_real()), x.imag.to(dtype.to_real())) if dtype.is_complex else x.real.to(dtype)
    assert dtype is not None
    return pair(x.to(dtype.to_real()))


def copied(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """The values of `source` in the shape and dtype of `x`."""
    if not isinstance(x, Pair):
        return aten.copy(x, source.real)
    new = pair(source)
    return Pair(aten.copy(x.real, new.real), aten.copy(x.imag, new.imag))


def overwritten(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copies `source` into `x` in place; the parts of `x` may be views."""
    if not isinstance(x, Pair):
        return x.copy_(source.real)
    new = pair(source)
    return Pair(x.real.copy_(new.real), x.imag.copy_(new.imag))


def filled_with(x: Any, value: Any) -> Pair:
    number = value if isinstance(value, Tensor | Pair) else full((), value, dtype=x.real.dtype.to_complex(), device=x.real.device)
    return copied(x, number)


def replaced(operator: Any) -> Callable[..., Pair]:
    """Returns a function that replaces a part of `x` by `source`."""

    def replace_pairs(x: Any, source: Any, *where: Any, **more: Any) -> Pair:
        old, new = pair(x), pair(source)
        return Pair(operator(old.real, new.real, *where, **more), operator(old.imag, new.imag, *where, **more))

    return replace_pairs


def transformed(x: Pair, dim: Sequence[int], normalization: int, forward: bool) -> Pair:
    return Pair(*to_complex(x.real, x.imag, dim, normalization, forward))


def halves(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Pair:
    return Pair(*to_complex_halves(x, dim, normalization, onesided))


def returned(x: Pair, dim: Sequence[int], normalization: int, size: int) -> Tensor:
    return to_real(x.real, x.imag, dim, normalization, size)


def _unchanged(x: Any, *more: Any) -> Any:
    return x


WHOLE: dict[Any, Callable[..., Any]] = {aten.istft.default: inverse_short_time}
"""Operators that cannot be traced, and the functions that are traced instead."""

RULES: dict[Any, Callable[..., Any]] = {
    aten._fft_c2c.default: transformed,
    aten._fft_r2c.default: halves,
    aten._fft_c2r.default: returned,
    aten.view_as_real.default: lambda x: torch.stack([x.real, x.imag], -1),
    aten.view_as_complex.default: as_complex,
    aten.complex.default: Pair,
    aten.polar.default: polar,
    aten.abs.default: lambda x: torch.hypot(x.real, x.imag),
    aten.angle.default: lambda x: torch.atan2(x.imag, x.real),
    aten._conj.default: lambda x: Pair(x.real, -x.imag),
    aten._conj_physical.default: lambda x: Pair(x.real, -x.imag),
    aten.conj_physical.default: lambda x: Pair(x.real, -x.imag),
    aten.resolve_conj.default: _unchanged,
    aten.resolve_neg.default: _unchanged,
    aten.mul.Tensor: multiply,
    aten.mul.Scalar: multiply,
    aten.div.Tensor: divide,
    aten.div.Scalar: divide,
    aten.reciprocal.default: reciprocal,
    aten.add.Tensor: add,
    aten.add.Scalar: add,
    aten.sub.Tensor: subtract,
    aten.sub.Scalar: subtract,
    aten.rsub.Scalar: lambda x, other, alpha=1: subtract(pair(other, x), x, alpha=alpha),
    aten.addcmul.default: added_product,
    aten.exp.default: exponential,
    aten.mm.default: product(torch.mm),
    aten.bmm.default: product(torch.bmm),
    aten.cat.default: concatenate(torch.cat),
    aten.stack.default: concatenate(torch.stack),
    aten.where.self: where,
    aten.constant_pad_nd.default: padded,
    aten.copy.default: copied,
    aten.copy_.default: overwritten,
    aten.fill.Scalar: filled_with,
    aten.fill.Tensor: filled_with,
    aten.slice_scatter.default: replaced(aten.slice_scatter),
    aten.select_scatter.default: replaced(aten.select_scatter),
    aten.full.default: full,
    aten.zeros.default: lambda size, **more: full(size, 0, **more),
    aten.ones.default: lambda size, **more: full(size, 1, **more),
    aten.scalar_tensor.default: lambda value, **more: full((), value, **more),
    aten.zeros_like.default: filled(0j),
    aten.ones_like.default: filled(1 + 0j),
    aten._to_copy.default: converted,
}
"""The implementation of each operator on pairs."""

EACH: dict[Any, Any] = dict.fromkeys([
    aten.alias.default, aten.as_strided.default, aten.clone.default, aten.cumsum.default, aten.detach.default,
    aten.diagonal.default, aten.expand.default, aten.flip.default, aten.gather.default, aten.index.Tensor,
    aten.index_select.default, aten.lift_fresh_copy.default, aten.mean.default, aten.mean.dim, aten.neg.default,
    aten.permute.default, aten.repeat.default, aten.roll.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.sum.default,
    aten.sum.dim_IntList, aten.t.default, aten.transpose.int, aten.tril.default, aten.triu.default, aten.unbind.int,
    aten.unfold.default, aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
]) | {aten.transpose_.default: aten.transpose.int}  # fmt: skip
"""Operators that are applied to both parts.  If the value of an entry is not None, that operator is applied instead."""
