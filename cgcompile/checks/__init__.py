"""What a model does that a CUDA graph cannot replay, as findings: pure functions over the exported program, a rule each.
`rules` is the table; `findings` runs it and refuses; `host_placement` says what runs on the host.
"""

from __future__ import annotations

from .findings import Checked, check, refuse

__all__ = ["Checked", "check", "refuse"]
