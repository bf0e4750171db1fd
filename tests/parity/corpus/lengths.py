"""Sequences of different lengths: packed, sliced at a position in a tensor, jagged, masked, gathered, indexed."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..case import case, ragged

_case = partial(case, kind="lengths")

SHAPE, SELECT, FOLLOWER = "data-dependent-shape", "data-dependent-select", "data-dependent-follower"


class RepeatByTensor(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x[:, 0].repeat_interleave(lengths, dim=0).sum(0)


class PackedLstm(nn.Module):
    """A recurrent network over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return self.lstm(packed)[1][0][0]


class PackAndUnpack(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return pad_packed_sequence(packed, batch_first=True, total_length=6)[0]


class LengthMask(nn.Module):
    """The mean over the valid tokens of each sequence."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return (x * mask[..., None]).sum(1) / lengths[:, None]


class SelectByItem(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        last = lengths.max().item() - 1
        torch._check(last >= 0)
        torch._check(last < x.shape[1])
        return x[:, last] * 2


class NarrowByItem(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        torch._check(longest >= 0)
        torch._check(longest <= x.shape[1])
        return x.narrow(1, 0, longest).sum(1)


class SliceByItem(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        return x[:, :longest].sum(1)


class RangeByItem(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        return torch.arange(longest, device=x.device).sum() + x


class LastToken(nn.Module):
    """The hidden state at the end of each sequence."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0], device=x.device), lengths - 1]


class IndexSelect(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x.index_select(1, lengths - 1)


class SplitByItem(nn.Module):
    """Splits a prompt from the tokens generated after it."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        prompt = lengths[0].item()
        torch._check(prompt >= 0)
        torch._check(prompt <= 6)
        head, tail = torch.split(x, [prompt, 6 - prompt], dim=1)
        return head.sum(1) + tail.sum(1)


class NestedToPadded(nn.Module):
    """Sequences of different lengths as one jagged tensor."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        return torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets).to_padded_tensor(0.0)


class JaggedToPadded(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        return torch.ops.aten._jagged_to_padded_dense_forward(x.flatten(0, 1), [offsets], [6], 0.0)


CASES = (
    _case(RepeatByTensor, ragged, SHAPE, FOLLOWER),
    _case(PackedLstm, ragged, "device-copy", "cpu-operation"),
    _case(PackAndUnpack, ragged, "device-copy", "cpu-operation"),
    _case(LengthMask, ragged, near=("data-dependent-shape",)),
    _case(SelectByItem, ragged, SELECT, FOLLOWER),
    _case(NarrowByItem, ragged, SELECT, FOLLOWER),
    _case(SliceByItem, ragged, SELECT, FOLLOWER),
    _case(RangeByItem, ragged, "host-scalar", FOLLOWER),
    _case(LastToken, ragged, near=("data-dependent-select",)),
    _case(IndexSelect, ragged, near=("data-dependent-select",)),
    _case(SplitByItem, ragged, "host-scalar", FOLLOWER),
    _case(NestedToPadded, ragged, "export-differs"),
    _case(JaggedToPadded, ragged, near=("incompatible-operator",)),
)
