"""Reasons why a dimension is not padded: the printed text, its meaning, and what to do.

`transforms/padding` finds the reasons and prints them.  The table is here because this module does not import torch.
"""

from __future__ import annotations

from typing import NamedTuple

HEADLINE = "Why a dimension is never padded, so that only the recorded sizes work."

ALWAYS = (
    "recording the sizes that you need (`--sizes seq=9,16,64`) always helps. Otherwise it depends on the reason, which `build` and "
    "`inspect` print under `padding`, with the operator and its line if there is one"
)


class PaddingReason(NamedTuple):
    """A reason as printed for a dimension called seq."""

    printed: str
    meaning: str
    cure: str


REASONS = (
    PaddingReason(
        "`sum combines elements along seq (model.py:14: ...)`; also `mean`, `amax`, `softmax`, ...",
        "the operator reads the padded elements, and zeros change its result: a mean divides by their number, a maximum of "
        "negative numbers becomes 0, a softmax gives them weight",
        "hide the padded elements before that line with an input that is 0 there: `(x * mask).sum(1) / mask.sum(1)`, "
        "`scores.masked_fill(mask == 0, -inf)` before `softmax` or `amax`",
    ),
    PaddingReason(
        "the same, although there is a mask that hides elements where it is True",
        "the mask of a short call is padded with zeros too, and such a mask does not hide the padded elements. PyTorch's "
        "`key_padding_mask` is of this kind",
        'invert the mask, so that zero means "hidden": `inputs()` draws `True` for real tokens, and `forward()` uses `~mask`, '
        "as in `key_padding_mask=~mask`",
    ),
    PaddingReason(
        "the same, although `forward()` makes the mask itself: from lengths, or from a padding token other than 0",
        "a short call is padded with zeros, and such a mask does not hide them: lengths stay as they are and may be larger than "
        "the call, and token 0 counts as a real token",
        "let `inputs()` give the mask, `torch.ones(batch, seq, dtype=torch.bool)`, and use it in `forward()`: "
        "`key_padding_mask=~mask`; or make it from tokens where 0 is padding, `key_padding_mask=ids == 0`",
    ),
    PaddingReason(
        "the same, although zero in the mask means hidden",
        "an operator after the mask adds a value, such as a bias; or a comparison of a padded value affects all rows; or attention "
        "adds a mask of floats to its scores, where 0 hides nothing",
        "apply the mask directly before the sum; use a mask of dtype bool in attention, `mask != 0`",
    ),
    PaddingReason(
        "`embedding_bag combines elements along ids`, `embedding_bag fails`",
        "offsets say where a bag begins: zeros would add ids to the last bag, and bags that begin at 0",
        "give every bag a row of ids, `(batch, n)`, without offsets, and `nn.EmbeddingBag(..., padding_idx=0)`",
    ),
    PaddingReason(
        "`...; output 'y' changes by 1.0e-01 where a trial with seq=15 was padded with zeros to 16`",
        "an output of the model in eager PyTorch differs after padding; the operator before it, if there is one, is the first that "
        "differs",
        "as for that operator; often the inputs have no mask, or the model reads the last position, `x[:, -1]`: pass its index as "
        "an input",
    ),
    PaddingReason(
        "`view fails (RuntimeError) (model.py:16: ...)`, or another operator that `fails`",
        "the model runs, but this operator fails at the sizes or layouts that the proof compares",
        "use another operator: `reshape` instead of `view`; "
        "`F.scaled_dot_product_attention(q, k, v, attn_mask=(mask != 0)[:, None, None, :])` instead of your own attention",
    ),
    PaddingReason(
        "`the effect of scan on padded elements along seq is not known`",
        "the operator calls your function for every element, and the proof does not analyze that function",
        "use other operators, or record the sizes",
    ),
    PaddingReason(
        "`the model fails (...) at seq=5`",
        "the model does not work at a size between the declared ones",
        "remove the code that depends on the size, or declare only sizes that work",
    ),
    PaddingReason(
        "`... cannot be compared at two sizes`, `... exported per size ...`",
        "Python code, or an operator, works differently at each size",
        "remove `if` and `int()` of that size from `forward()`",
    ),
    PaddingReason(
        "`output 'y' has the unexpected shape [3, 4]`, `an output does not begin with the elements along seq`",
        "the rows of the call are not the first rows of the output: the model flipped it, or put other rows before them",
        "return the rows in the order of the call",
    ),
    PaddingReason(
        "`output 'y' is a part of an input`",
        "the output would be a part of the padded input, not of your tensor",
        "return a `clone()`",
    ),
    PaddingReason(
        "`forward() writes to its buffer 'cache'`, `... to its input 'x'`, `draws random numbers`",
        "a padded call would write to more elements, or draw more numbers",
        "record the sizes; for a decoder, leave lanes of the batch empty",
    ),
)

MIXED = " combines elements along "

MASK_CURE = (
    "or hide padded elements before that line: let inputs() give a mask that is True for real tokens, and use it in forward(), as "
    "in key_padding_mask=~mask"
)


BAG_CURE = "or give every bag a row of ids, (batch, n), without offsets, and nn.EmbeddingBag(..., padding_idx=0)"


def short_cure(reason: str) -> str:
    """Returns what to do about a printed reason, beside recording more sizes, or "" if `cgcompile explain padding` must be read."""
    if reason.startswith("embedding_bag "):
        return BAG_CURE
    return MASK_CURE if MIXED in reason else ""
