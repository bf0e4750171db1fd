"""Exports models whose Python branches on the truth value of tensors: exports every path, and joins the paths with `torch.cond`.

`program` is called first.  It calls `tree`: there `explore` finds the paths, `lines` traces a path, `joins` finds where two paths
run the same operations again, and `merge` builds one program.  `verify` compares every path with eager PyTorch.
`model/tracing/way.py` forces the answers of one path (a *way*), and `model/devices/path_reads.py` detects the branches.
"""

MAX_PATHS = 64
"""Default maximum number of paths through a model's Python code.  Each costs an export."""
