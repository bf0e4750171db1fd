"""Exports models whose Python branches on the truth value of tensors: exports every path, and joins the paths with `torch.cond`.

`program` is the entry.  It calls `tree`: there `explore` finds the paths, `lines` traces one, `joins` finds where two continue
alike, and `merge` makes one program.  `verify` compares every path with eager PyTorch.  `model/tracing/way.py` forces the answers
of one path (a *way*), and `model/devices/path_reads.py` sees the branches.
"""

MAX_PATHS = 64
"""Default of the most paths through a model's Python code that are exported; each costs an export."""
