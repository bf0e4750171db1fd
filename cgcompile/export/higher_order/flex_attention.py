"""Replaces flex_attention by matrix products, the score function over all positions, and a softmax, as in torch's
`math_attention` (torch/_higher_order_ops/flex_attention.py).

torch cannot save the operator (2.11, 2.13: SerializeError), and no compiler for CPUs accepts it.

Private interfaces (torch 2.11, 2.13): the order of its arguments, `make_fx`, and `ModIndex`, which reads a tensor at a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .inline import Results, body_of, fake_mode, inline


def flex_attention(module: GraphModule, node: Node) -> Results | None:
    """Expands flex_attention(query, key, value, score, block_mask, scale, options, buffers of the score, buffers of the mask)."""
    mode = fake_mode(node)
    if mode is None:
        return None
    query, key, value, score, block_mask, scale = node.args[:6]
    of_score, of_mask = [list(group) for group in (*node.args[7:9], (), ())][:2]
    functions = body_of(module, score), body_of(module, block_mask[-1])
    if None in functions:
        return None
    scored, masked = [_scalar_function(function) for function in functions if function is not None]
    used_outputs = {user.args[1] for user in node.users}

    def attend(q: Any, k: Any, v: Any, *buffers: Any) -> tuple[Any, ...]:
        buffer_pair = buffers[: len(of_score)], buffers[len(of_score) :]
        return _attention(q, k, v, scored, masked, scale, *buffer_pair, used_outputs)

    operands = [query, key, value, *of_score, *of_mask]
    values = [operand.meta["val"] if isinstance(operand, Node) else operand for operand in operands]
    with mode, torch.no_grad():
        traced = make_fx(attend)(*values)
    traced.graph.eliminate_dead_code()
    return inline(module, traced, operands, node)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scored: Callable[..., torch.Tensor],
    masked: Callable[..., torch.Tensor],
    scale: float,
    of_score: Sequence[Any],
    of_mask: Sequence[Any],
    used_outputs: set[Any],
) -> tuple[Any, ...]:
    """Computes the operator's outputs: the result, the logarithm of the sum (base 2), and the largest score divided by ln 2.
    `used_outputs`: numbers of the outputs that are used."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = [t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (key, value)]
    scores = _product(query.to(exact), key.to(exact).transpose(-2, -1)) * scale
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    allowed = _over_positions(masked, (), len(of_mask))(*places, *of_mask)
    scores = _over_positions(scored, (0,), len(of_score))(scores, *places, *of_score).to(exact)
    scores = torch.where(allowed, scores, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    stable_max = torch.where(largest == float("-inf"), 0.0, largest)  # rows without an allowed position give zeros
    weights = torch.exp(scores - stable_max)
    total = weights.sum(-1, keepdim=True)
    mixed = _product((weights / torch.where(total == 0, 1.0, total)).to(query.dtype), value)
    unit = 1 / 0.6931471805599453
    sums = ((stable_max + torch.log(total)).squeeze(-1) * unit) if 1 in used_outputs else None
    return mixed, sums, largest.squeeze(-1) * unit if 2 in used_outputs else None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Computes `left @ right` of tensors with four axes.  A trace of `matmul` in torch 2.11 specializes declared dimensions."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _over_positions(function: Callable[..., torch.Tensor], prefix: tuple[int, ...], buffers: int) -> Callable[..., torch.Tensor]:
    """Vectorizes a function of one score and its position over all positions: batch, head, row, column."""
    for axis in reversed(range(4)):
        function = torch.vmap(function, in_dims=(*prefix, *[0 if dim == axis else None for dim in range(4)], *[None] * buffers))
    return function


def _scalar_function(body: GraphModule) -> Callable[..., torch.Tensor]:
    """Returns the graph of the score or the mask as a function.  The graph reads tensors at a position (`bias[head]`) with
    `ModIndex`, which only vmap can run; the function uses `aten.index`."""

    def run(*arguments: Any) -> torch.Tensor:
        output: torch.Tensor = _Indexing(body).run(*arguments)
        return output[0] if isinstance(output, tuple | list) else output

    return run


class _Indexing(torch.fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if getattr(target, "name", lambda: "")() == "flat_apply" and any("ModIndex" in str(argument) for argument in args):
            tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
            return torch.ops.aten.index.Tensor(tensors[0], tensors[1:])
        return super().call_function(target, args, dict(kwargs))
