"""Exports models whose Python branches on the truth value of tensors: exports every path, and joins the paths with `torch.cond`."""

MAX_PATHS = 64
"""Default of the most paths through a model's Python code that are exported; each costs an export."""
