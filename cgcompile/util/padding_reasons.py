"""Why a dimension is not padded: what the proof of padding prints, what that means, and what to do about it.

`transforms/padding` proves and words the reasons; the table is here, where nothing imports torch.
"""

from __future__ import annotations

from typing import NamedTuple

HEADLINE = "Why a dimension is never padded, so that calls of other sizes than the recorded ones are refused."

ALWAYS = (
    "recording the sizes that are needed (`--sizes seq=9,16,64`) always helps. Else it depends on the reason, which `build` and "
    "`inspect` print under `padding`; where an operator is named, so is its line"
)


class PaddingReason(NamedTuple):
    """A reason as it is printed for a dimension called seq, and others like it."""

    printed: str
    meaning: str
    cure: str


REASONS = (
    PaddingReason(
        "`sum joins what lies along seq (model.py:14: ...)`; so `mean`, `amax`, `softmax`, ...",
        "that operator reads what is filled up, and zeros there are not nothing: a mean divides by their number, a maximum of "
        "negative numbers becomes 0, a softmax gives them weight",
        "hide them before that line with an input that is 0 there: `(x * mask).sum(1) / mask.sum(1)`, "
        "`scores.masked_fill(mask == 0, -inf)` before `softmax` or `amax`",
    ),
    PaddingReason(
        "the same, though there is a mask that hides where it is True",
        "a short call is filled up with zeros, its mask too: this one then shows what is filled up. PyTorch's "
        "`key_padding_mask` is of this kind",
        'turn it round, so that zero means "hidden": `inputs()` draws `True` where a token counts, and `forward()` uses `~mask`, '
        "as in `key_padding_mask=~mask`",
    ),
    PaddingReason(
        "the same, though zero in the mask means hidden",
        "something is added after the mask was used, a bias say; or a value that depends on the padded rows decides for all; or "
        "attention adds a mask of floats to its scores, where 0 hides nothing",
        "use the mask last before the sum; give attention a mask of dtype bool, `mask != 0`",
    ),
    PaddingReason(
        "`...; output 'y' changes by 1.0e-01 where a trial with seq=15 was filled up with zeros to 16`",
        "the model's own outputs differ, too, in eager PyTorch; the operator before it, where there is one, is the first that does",
        "as for that operator; often there is no mask among the inputs at all, or the last position is read, `x[:, -1]`: give its "
        "index as an input",
    ),
    PaddingReason(
        "`view fails (RuntimeError) (model.py:16: ...)`, or another operator that `fails`",
        "your model runs; that operator does not at the sizes, or over the layouts, that the proof compares",
        "write that step otherwise: `reshape` for `view`; own attention as "
        "`F.scaled_dot_product_attention(q, k, v, attn_mask=(mask != 0)[:, None, None, :])`",
    ),
    PaddingReason(
        "`what scan makes of padded entries along seq is not known`",
        "the operator runs a function of yours for every entry, and the proof does not look into it",
        "write it without that operator, or record the sizes",
    ),
    PaddingReason(
        "`the model fails (...) at seq=5`",
        "the module cannot run at a size between the declared ones",
        "take out what the size decides, or declare only sizes that it takes",
    ),
    PaddingReason(
        "`... cannot be compared at two sizes`, `... exported per size ...`",
        "Python, or an operator, does other things at each size",
        "no `if` and no `int()` of that size in `forward()`",
    ),
    PaddingReason(
        "`output 'y' has a shape of its own`, `an output does not begin with what lies along seq`",
        "the call's part of an output is not its beginning: it was flipped, or laid behind something",
        "return it in the call's order",
    ),
    PaddingReason(
        "`output 'y' is a part of an input`",
        "it would show the frame, and not your tensor",
        "return a `clone()`",
    ),
    PaddingReason(
        "`forward() writes to its buffer 'cache'`, `... to its input 'x'`, `draws random numbers`",
        "a padded call would write, or draw, more than yours",
        "none: record the sizes; a decoder's batch has lanes that stand empty",
    ),
)
