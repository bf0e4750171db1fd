"""Exports of models whose forward() asks autograd for derivatives: forces of an energy, residuals of an equation, densities.

torch.export traces above autograd.  What torch.autograd.grad() computes below it is not traced: export finds values without
a history and stops.  An export below autograd traces each operator of the derivative.

Private interface of torch: `torch.export._trace._export(pre_dispatch=False)`.  Run with torch 2.13; that of
2.11 has the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export._trace import _export
from torch.utils._pytree import tree_map_only

UNTRACED = "We found a fake tensor in the exported program constant's list"
"""What torch.export says (2.11, 2.13) about a value that it has not traced."""


BACKWARD = "Cannot backprop through mirrored meta"
"""What torch says (2.11, 2.13) where backward() meets a value that has only a shape."""


def export(module: torch.nn.Module, tensors: Sequence[torch.Tensor], dynamic: Any) -> ExportedProgram:
    """The program of `module`.  A model that asks autograd for derivatives is traced once more, below autograd."""
    try:
        return torch.export.export(module, tuple(tensors), dynamic_shapes=dynamic, strict=False)
    except RuntimeError as error:
        if UNTRACED not in str(error):
            raise
    # detached inputs are leaves of no earlier call's graph; export would trace the derivative of outputs that have a history
    fresh = tuple([tensor.detach() for tensor in tensors])
    with _outputs_without_history(module):
        return _export(module, fresh, dynamic_shapes=dynamic, strict=False, pre_dispatch=False)


@contextmanager
def _outputs_without_history(module: torch.nn.Module) -> Iterator[None]:
    def detach(_module: torch.nn.Module, _inputs: Any, outputs: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    handle = module.register_forward_hook(detach)
    try:
        yield
    finally:
        handle.remove()
