"""Fewer kernels where one row is computed, as when a language model computes one token: options of Inductor for a GPU.

A kernel in a chain takes 1.3 to 3 us on an H100, however little it does (torch 2.11).  A token of a GPT (12 layers, width 768,
bfloat16) takes 64 kernels instead of 137, and 202 us instead of 366.

Private interfaces (torch 2.11, 2.13): the options `post_grad_custom_post_pass` and `score_fusion_memory_threshold`,
`CustomGraphPass`, `get_hash_for_files`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from . import attention, repeated_reductions, row_blocks

JOINING = 8
"""Two kernels are fused if they read at least this many bytes in common: one index is enough.  Inductor's default is 10."""


def fewer_kernels(*, ahead: bool) -> dict[str, Any]:
    """Returns the options.  `ahead`: attention prefetches the next weights into the L2 cache.  Set it if kernels do not start
    before the previous one ends (no programmatic dependent launch)."""
    return {"post_grad_custom_post_pass": FewerKernels(ahead), "score_fusion_memory_threshold": JOINING}


class FewerKernels(CustomGraphPass):
    """A pass after those of Inductor.  Changes a graph in place."""

    def __init__(self, ahead: bool) -> None:
        self._ahead = ahead

    def __call__(self, graph: Graph) -> None:
        attention.attend_at_once(graph, ahead=self._ahead)
        row_blocks.mark(graph)
        repeated_reductions.repeat_reductions(graph)

    def uuid(self) -> Any:
        return get_hash_for_files(tuple([str(path) for path in sorted(Path(__file__).parent.glob("*.py"))]), str(self._ahead))
