"""Finds what a CUDA graph cannot replay in a model.  Each rule is a pure function over the exported program.

`rules` is the table of rules, and says how to add one.  `findings` runs them and refuses a build.  `host_placement` says which
operations run on the host.  Two kinds of refusals come later: an operation without a Triton kernel (`offline/lower/coverage.py`),
and nodes of a captured graph that a bundle cannot hold (`capture/worker/graph_nodes.py`).
"""

from __future__ import annotations

from .findings import Checked, check, refuse

__all__ = ["Checked", "check", "refuse"]
