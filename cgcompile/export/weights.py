"""Parameters, buffers and constants of an exported program."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram


def weight_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """By their names in the program.  Constants are non-persistent buffers and literals in forward()."""
    named = {**program.state_dict, **program.constants}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
