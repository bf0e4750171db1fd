"""Every invariant of a bundle: the compiler checks before it publishes, the loader before it runs.
One file per part of the manifest.
"""

from __future__ import annotations

from ..errors import BundleError
from ..format.schema import EntrySpec


def require(holds: bool, where: str, message: str) -> None:
    """Raises manifest-invalid, naming the field, unless `holds`."""
    if not holds:
        raise BundleError("manifest-invalid", f"{where}: {message}")


def require_whole_calls(entry: EntrySpec, reason: str) -> None:
    """Raises manifest-invalid where a call may be padded or chunked."""
    for index, dimension in enumerate(entry.dimensions):
        whole = dimension.pad == "no" and not dimension.chunk
        require(whole, f"dimensions[{index}].pad", f"{dimension.name} is padded or chunked, and {reason}")
