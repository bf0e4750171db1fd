"""Finds what a CUDA graph cannot replay in a model.  Each rule is a pure function over the exported program.

`rules` is the table of rules.  `findings` runs them and refuses a build.  `host_placement` says which operations run on the host.
"""

from __future__ import annotations

from .findings import Checked, check, refuse

__all__ = ["Checked", "check", "refuse"]
