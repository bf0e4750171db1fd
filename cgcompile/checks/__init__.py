"""Finds the parts of a model that a CUDA graph cannot replay.  Each rule is a pure function over the exported program.

`rules` is the table of rules, and says how to add one.  `findings` runs the rules, and stops a build.  `host_placement` decides
which operations run on the host.  Later stages also refuse models: for an operation without a Triton kernel
(`offline/lower/coverage.py`), and for nodes of a captured graph that a bundle cannot hold (`capture/worker/graph_nodes.py`).
"""

from __future__ import annotations

from .findings import Checked, check, refuse

__all__ = ["Checked", "check", "refuse"]
