"""The decoder of shares.py on one GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import shares


def model() -> nn.Module:
    """Returns the complete model, as rank 0 of one."""
    return shares.decoder.model(0, 1)


inputs = shares.inputs
