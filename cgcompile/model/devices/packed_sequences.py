"""Traces packed sequences as padded sequences, which have the same numbers, and sizes that do not depend on data.

In PyTorch, a packed sequence holds the rows of all sequences, ordered by position, and the batch size of each position.  Here it
holds the rows of all positions, also after the end of a sequence, and a mask.  Operations on single rows keep this form.  Any other
operation gets the rows of eager PyTorch, which the mask selects.  Their number depends on data.

A recurrent layer runs on padded sequences.  For the backward direction, each sequence is reversed within its length.  Outputs and
hidden states are gathered at the last position.  The cell state of an LSTM stays constant after the end of a sequence: an extra
input column opens the forget gate and closes the input gate there.

Private interfaces (torch 2.11, 2.13): `torch._VF`; the local name `total_length` of `pad_packed_sequence`; `permute_hidden`,
`_all_weights` and `proj_size` of recurrent modules.  Their `forward`, and `torch.nn.utils.rnn.invert_permutation`, are replaced
while a call is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from cgbundle.cpu.host_region import ASSERTS

from ...errors import ModelError
from ..user_code import here

PACK, PAD = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence

ELSEWHERE = object()

SATURATED = 1e4
"""In every floating dtype, sigmoid(SATURATED) is 1 and sigmoid(-SATURATED) is 0."""


def _functions(*names: str) -> frozenset[Any]:
    return frozenset([getattr(owner, name) for owner in (torch, torch.Tensor, F) for name in names if hasattr(owner, name)])


ELEMENTWISE = _functions(
    "abs", "add", "clamp", "clone", "contiguous", "cos", "detach", "div", "divide", "dropout", "elu", "exp", "float", "gelu",
    "half", "hardtanh", "bfloat16", "double", "leaky_relu", "log", "masked_fill", "mish", "mul", "multiply", "neg", "pow", "relu",
    "relu6", "rsub", "selu", "sigmoid", "silu", "sin", "softplus", "sqrt", "square", "sub", "subtract", "tanh", "to",
    "true_divide", "where", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
    "__pow__", "__neg__",
)  # fmt: skip
"""Functions that compute each element separately."""

ROW_BY_ROW = _functions("embedding", "layer_norm", "linear", "rms_norm")
"""Functions that compute each row of their first argument separately."""

LAST_AXIS = _functions("softmax", "log_softmax")
"""Functions that compute each row separately, along the axis `dim`."""

QUESTIONS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "layout", "requires_grad", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "ndim")
) | _functions("dim", "is_floating_point", "is_complex", "get_device")  # fmt: skip
"""Properties and methods whose result does not depend on the number of rows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Packed sequences: `steps` x `batch` positions.  `valid` masks the positions within `lengths`, on the device."""

    steps: Any
    batch: Any
    lengths: torch.Tensor
    valid: torch.Tensor


class PackedSequences:
    """The packed sequences of one call: the rows and the batch sizes, by tensor.  Handles traced calls, and with `padded` also
    calls with data: padding has sequences of length 0, which eager PyTorch does not support."""

    def __init__(self, padded: bool) -> None:
        self._padded = padded
        self._rows: Any = WeakTensorKeyDictionary()
        self._sizes: Any = WeakTensorKeyDictionary()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Handles rows like other tensors inside this context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def concern(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether an operation creates or uses a packed sequence."""
        if self._paused or (get_proxy_mode() is None and not self._padded):
            return False
        if func is PACK:
            return True
        return bool(self._rows or self._sizes) and any(self._packing(leaf) for leaf in pytree.tree_leaves((args, kwargs)))

    def operate(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operation for which `concern` is true.  The operations inside are tracked like the user's."""
        if func is PACK:
            return self._pack(*args, **kwargs)
        if func is PAD and self._pair(args[0], args[1]):
            return self._pad(*args, **kwargs)
        if func in QUESTIONS:
            return NotImplemented
        if func is torch.Tensor.size and args[0] in self._sizes and _total_length() is not ELSEWHERE:
            return self._sizes[args[0]].steps  # pad_packed_sequence() checks total_length
        packing = self._row_wise(func, args, kwargs)
        if packing is None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.as_eager, (args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        if [tensor._version for tensor in tensors] != versions:
            text = f"{func.__name__} writes in place, which is not supported with rows of a packed sequence"
            raise ModelError("data-dependent-shape", f"{here()[0]}: {text}")
        if packing is not None:
            self._rows[result] = packing
        return result

    def as_eager(self, tensor: torch.Tensor) -> torch.Tensor:
        """Converts rows or batch sizes to those that eager PyTorch has: without padding.  Other tensors do not change."""
        if (packing := self._rows.get(tensor)) is not None:
            return tensor[packing.valid.reshape(-1)]
        return tensor[tensor > 0] if tensor in self._sizes else tensor

    def layer(self, module: Any, sequence: PackedSequence, states: Any) -> Any:
        """Runs a recurrent module on a packed sequence.  Returns NotImplemented for a sequence that is not tracked."""
        data, sizes, sorted_indices, unsorted_indices = sequence
        packing = self._pair(data, sizes)
        if packing is None:
            return NotImplemented
        states = None if states is None else module.permute_hidden(states, sorted_indices)
        with self.paused():
            rows, last = _run(module, data, packing, states)
        self._rows[rows] = packing
        return PackedSequence(rows, sizes, sorted_indices, unsorted_indices), module.permute_hidden(last, unsorted_indices)

    def _packing(self, leaf: Any) -> Packing | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        packing: Packing | None = self._rows.get(leaf) or self._sizes.get(leaf)
        return packing

    def _pair(self, data: Any, sizes: Any) -> Packing | None:
        """Returns the packing, if rows and batch sizes belong to the same one, else None."""
        packing: Packing | None = self._rows.get(data) if isinstance(data, torch.Tensor) else None
        return packing if packing is not None and self._sizes.get(sizes) is packing else None

    def _row_wise(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packing | None:
        """Returns the packing of the result, if the operation computes each row separately, else None."""
        rows = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf in self._rows]
        others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf not in self._rows]
        packings = {id(self._rows[leaf]): self._rows[leaf] for leaf in rows}
        if len(packings) != 1 or any(leaf in self._sizes for leaf in others) or "out" in kwargs:
            return None
        (packing,) = packings.values()
        ndim = rows[0].dim()
        if func in ELEMENTWISE:
            same_ndim = all(leaf.dim() == ndim for leaf in rows) and all(leaf.dim() < ndim for leaf in others)
            return packing if same_ndim and not (func is F.dropout and (args[3:] or kwargs.get("inplace"))) else None
        rows_first = len(rows) == 1 and bool(args) and rows[0] is args[0]
        if func in LAST_AXIS:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return packing if rows_first and isinstance(axis, int) and axis % ndim else None
        if func in (F.layer_norm, torch.layer_norm) and len(kwargs.get("normalized_shape", args[1])) >= ndim:
            return None
        return packing if func in ROW_BY_ROW and rows_first and (ndim > 1 or func in (F.embedding, torch.embedding)) else None

    def _pack(self, tensor: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of all positions, and the batch sizes, which are 0 after the longest sequence."""
        tensor = tensor.transpose(0, 1) if batch_first else tensor
        steps, batch = tensor.shape[:2]
        if lengths.dim() != 1 or lengths.shape[0] != batch:
            raise RuntimeError(f"Expected `len(lengths)` to be equal to batch_size, but got {list(lengths.shape)}")
        if lengths.device.type == "cpu":
            _assert(lengths.max() <= steps, "no sequence is longer than the input")
        device_lengths = lengths.to(tensor.device)
        valid = torch.arange(steps, device=tensor.device)[:, None] < device_lengths
        packing = Packing(steps=steps, batch=batch, lengths=device_lengths, valid=valid)
        rows, sizes = tensor.contiguous().view(steps * batch, *tensor.shape[2:]), valid.sum(1).cpu()
        self._rows[rows], self._sizes[sizes] = packing, packing
        return rows, sizes

    def _pad(
        self, data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts rows back to a padded tensor and its lengths.  Without a total length, eager PyTorch's result is as long as the
        longest sequence.  An assertion checks that the longest sequence has the full length."""
        packing = self._rows[data]
        if _total_length() is None:
            text = "the longest sequence is as long as the input; give pad_packed_sequence() total_length= otherwise"
            _assert(packing.lengths.max() == packing.steps, text)
        padded = _filled(data, packing, value)
        if total != packing.steps:
            padded = torch.cat([padded, padded.new_full((total - packing.steps, *padded.shape[1:]), value)])
        return padded.transpose(0, 1) if batch_first else padded, packing.lengths.cpu()


def _assert(holds: torch.Tensor, text: str) -> None:
    where, line = here()
    torch.ops.aten._assert_async.msg(holds.cpu(), f"{where}: {ASSERTS}: {text}: {line}")


def _total_length() -> Any:
    """Returns the total length that the user passes to `pad_packed_sequence`, or ELSEWHERE outside of that function."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is pad_packed_sequence.__code__:
            return frame.f_locals["total_length"]
        frame = frame.f_back  # type: ignore[assignment]
    return ELSEWHERE


def _filled(rows: torch.Tensor, packing: Packing, value: float) -> torch.Tensor:
    """Returns steps x batch x ..., with `value` after the end of each sequence."""
    valid = packing.valid.reshape(-1, *[1] * (rows.dim() - 1))  # a flat mask needs no guards on strides
    return torch.where(valid, rows, value).reshape(packing.steps, packing.batch, *rows.shape[1:])


def _run(module: Any, data: torch.Tensor, packing: Packing, states: Any) -> tuple[torch.Tensor, Any]:
    """Runs a recurrent module.  Returns the outputs as rows, and the last states."""
    steps, batch, is_lstm = packing.steps, packing.batch, isinstance(module, nn.LSTM)
    directions = 2 if module.bidirectional else 1
    if states is None:
        widths = [module.proj_size or module.hidden_size, *([module.hidden_size] if is_lstm else [])]
        states = [data.new_zeros(module.num_layers * directions, batch, width) for width in widths]
    states = list(states) if is_lstm else [states[0] if isinstance(states, list) else states]
    time = torch.arange(steps, device=data.device)[:, None]
    backwards = torch.where(packing.valid, packing.lengths - 1 - time, time)[:, :, None]
    ends = (packing.lengths - 1).clamp(min=0)[None, :, None]
    rows = _filled(data, packing, 0.0)
    last: list[list[torch.Tensor]] = []
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            rows = F.dropout(rows, module.dropout)
        directions_rows = []
        for direction in range(directions):
            at = layer * directions + direction
            weights = [getattr(module, name) for name in module._all_weights[at]]
            ordered_rows = rows.gather(0, backwards.expand(rows.shape)) if direction else rows
            outputs, *cell = _layer(module, ordered_rows, packing, weights, [state[at : at + 1] for state in states])
            hidden = outputs.gather(0, ends.expand(1, *outputs.shape[1:]))
            last.append([torch.where(packing.lengths[:, None] > 0, hidden, states[0][at : at + 1]), *cell])
            directions_rows.append(outputs.gather(0, backwards.expand(outputs.shape)) if direction else outputs)
        rows = torch.cat(directions_rows, 2) if directions > 1 else directions_rows[0]
    joined = tuple([torch.cat(layers) for layers in zip(*last, strict=True)])
    return rows.reshape(steps * batch, rows.shape[2]), joined if is_lstm else joined[0]


def _layer(
    module: Any, rows: torch.Tensor, packing: Packing, weights: list[torch.Tensor], states: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs one layer in one direction.  Returns the outputs, and for an LSTM the last cell states."""
    options = (weights, module.bias, 1, 0.0, False, False, False)
    if not isinstance(module, nn.LSTM):
        name = "gru" if isinstance(module, nn.GRU) else f"rnn_{module.nonlinearity}"
        return [getattr(torch._VF, name)(rows, states[0], *options)[0]]
    width = module.hidden_size
    gates = [-SATURATED, SATURATED, 0.0, 0.0]  # in, forget, cell, out
    column = torch.cat([rows.new_full((width, 1), gate) for gate in gates])
    after_end = packing.valid.logical_not()[:, :, None].to(rows.dtype)
    options = ([torch.cat([weights[0], column], 1), *weights[1:]], *options[1:])
    outputs, _, cell = torch._VF.lstm(torch.cat([rows, after_end], 2), states, *options)
    return [outputs, cell]


@contextmanager
def layers_of_packed_sequences(active: Callable[[], PackedSequences | None]) -> Iterator[None]:
    """Inside this context, recurrent modules run packed sequences with the PackedSequences that `active` returns.  A traced
    permutation is inverted by comparisons, because Triton has no kernel for the scatter that torch uses."""
    kinds: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN)
    originals = [kind.forward for kind in kinds]

    def replaced(plain: Any) -> Any:
        def forward(module: Any, input: Any, hx: Any = None) -> Any:
            packed = active() if isinstance(input, PackedSequence) else None
            result = NotImplemented if packed is None else packed.layer(module, input, hx)
            return plain(module, input, hx) if result is NotImplemented else result

        return forward

    original_invert = rnn.invert_permutation

    def inverse(permutation: torch.Tensor | None) -> torch.Tensor | None:
        if permutation is None or get_proxy_mode() is None:
            return original_invert(permutation)
        places = torch.arange(permutation.shape[0], device=permutation.device)
        return (permutation == places[:, None]).to(torch.int64).argmax(1)

    for kind, plain in zip(kinds, originals, strict=True):
        kind.forward = replaced(plain)
    rnn.invert_permutation = inverse
    try:
        yield
    finally:
        for kind, plain in zip(kinds, originals, strict=True):
            kind.forward = plain
        rnn.invert_permutation = original_invert
