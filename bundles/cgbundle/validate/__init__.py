"""Every invariant of a bundle. `contents.check_loaded` has the checks of a load, `bundle.check_bundle` all checks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from ..errors import BundleError
from ..format.schema import EntrySpec


def require(holds: bool, where: str, message: str) -> None:
    """Raises manifest-invalid with the field's path unless `holds`."""
    if not holds:
        raise BundleError("manifest-invalid", f"{where}: {message}")


def require_whole_calls(entry: EntrySpec, reason: str) -> None:
    """Raises manifest-invalid if calls may be padded or chunked."""
    for index, dimension in enumerate(entry.dimensions):
        whole = dimension.pad == "no" and not dimension.chunk
        require(whole, f"dimensions[{index}].pad", f"{dimension.name} is padded or chunked, and {reason}")


def require_apart(ranges: Iterable[tuple[int, int, str]], message: str) -> None:
    """Raises manifest-invalid if (begin, end, field) ranges overlap, with the field of the later one."""
    for (_, end, _), (begin, _, where) in pairwise(sorted(ranges)):
        require(end <= begin, where, message)
