"""The differences between cgcompile's verdict and PyTorch's, with reasons.

They are those of torch 2.13; with other versions other verdicts differ.
"""

from __future__ import annotations

TORCH = "2.13"

COPIED = "supported: the recording changes its static buffer, and the runtime copies that back to the caller's tensor"
LITERAL = (
    "only the `cudagraphs` backend, which takes a literal for work of the CPU; Inductor makes it a constant of the kernel, "
    "and we a weight on the GPU"
)
DETERMINISTIC = (
    "earlier versions of PyTorch listed scatters under deterministic algorithms, where they sort and may wait for the GPU; "
    "2.13 does not"
)

CONDITIONAL = (
    "PyTorch records the parts before and after it, and asks the condition on the CPU; a bundle's graph has a conditional node"
)

BRANCHES = "PyTorch breaks its graph where Python asks a tensor; here every way through Python is a branch of one program"

NUMBERS = "PyTorch stops where int() or float() asks a tensor; here the number stays a tensor"

DIFFERENCES: dict[str, str] = {
    # cgcompile flags less
    "cache-in-an-input": COPIED,
    "write-to-input": COPIED,
    "write-to-view-of-input": COPIED,
    "top-p": LITERAL,
    "literal-on-the-device": LITERAL,
    "literal-moved": LITERAL,
    "scalar-of-the-cpu": LITERAL,
    "table-in-an-attribute": LITERAL,
    "rotary-complex": LITERAL,
    "positions-moved": ("only the `cudagraphs` backend; Inductor makes positions where they are used, on the GPU, and so do we"),
    "scan": (
        "PyTorch makes a loop of it, whose counter is on the CPU; the export unrolls a scan with a fixed number of steps "
        "(cgcompile/export/higher_order/loops.py)"
    ),
    "write-by-mask": (
        "PyTorch flags every index_put with a mask; Inductor lowers one mask and one number as a masked fill, and its scheduler "
        "leaves that in the graph, as we do"
    ),
    "cond": CONDITIONAL,
    "while-loop": CONDITIONAL,
    "branch-on-sum": BRANCHES,
    "early-exit": BRANCHES,
    "compare-whole": BRANCHES,
    "largest-as-int": NUMBERS,
    "scale-as-float": NUMBERS,
    "loss-scale": "the build computes what follows from a buffer that no call writes to; an update takes no other value of it",
    # cgcompile flags more
    "custom-operator-on-the-host": "the user asked for it with --fallback-op",
    "add-by-index-in-order": DETERMINISTIC,
    "scatter-add-in-order": DETERMINISTIC,
}
"""Case -> reason."""

ELSEWHERE: dict[str, str] = {
    "too-many-keys": "it concerns the sizes that a build is asked for, not the model",
    "small-region": "it concerns the partition, which comes after the checks",
    "assert-scalar": "torch.export moves every assertion to the line that made the number, where the number's own finding is",
}
"""Rules without a case, with reasons."""
