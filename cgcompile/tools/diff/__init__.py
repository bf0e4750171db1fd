"""What differs between two bundles, from their files alone: no GPU, no torch.

`open_bundle` and `compare` are the whole.  `reading` reads what is needed, `differences` is what comes out and how rows are set
side by side, `manifests` compares what the manifests say, `graphs` kernels and recordings and `nodes` two nodes of these,
`contents` the tensors and all other files.

Two builds of one model with the same versions and options do not differ: where and when a bundle was built (`UNCOUNTED`) is left
out, and so are bytes of parameters that no kernel reads.  Everything else counts, also what a later version of the format adds.
"""

from __future__ import annotations

from .comparing import UNCOUNTED, compare
from .differences import Difference
from .reading import Bundle, open_bundle

__all__ = ["UNCOUNTED", "Bundle", "Difference", "compare", "open_bundle"]
