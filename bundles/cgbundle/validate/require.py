"""How a broken invariant of the manifest is told."""

from __future__ import annotations

from ..errors import BundleError


def require(holds: bool, where: str, message: str) -> None:
    """Raises manifest-invalid, naming the field, unless `holds`."""
    if not holds:
        raise BundleError("manifest-invalid", f"{where}: {message}")
