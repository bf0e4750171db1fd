"""The partitioner: an exported program and the nodes that must run on the host -> as few alternating regions as possible.

    cuts, units      the order and the cuts, for operations that are only numbers and kinds (no torch)
    roles, writes    what a node of the program is, and which operations writes to memory tie together
    split            an exported program and placements -> Partition
    modules, sizing  one module per region at the sizes of one int_key
    crossing         what is copied between the regions, and sentences for findings
    errors           refusals

Importing this package is cheap: torch is imported when one of its functions is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .crossing import Crossing, crossings, effect_of
    from .modules import region_modules
    from .split import Merged, Part, Partition, partition

__all__ = ["Crossing", "Merged", "Part", "Partition", "crossings", "effect_of", "partition", "region_modules"]

_HOMES = {
    "Crossing": "crossing",
    "Merged": "split",
    "Part": "split",
    "Partition": "split",
    "crossings": "crossing",
    "effect_of": "crossing",
    "partition": "split",
    "region_modules": "modules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
