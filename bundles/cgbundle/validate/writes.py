"""Where the memsets and memcpys of a recording may write: to the arena, and to inputs and state that calls change.

A kernel writes where its code does, which no table says: of kernels only what they are given is checked, in lifetimes.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import BundleError
from ..format.schema import Manifest, Program
from ..format.spans import Cover, extent, span
from .lifetimes import written

if TYPE_CHECKING:
    from ..tables.table import Table

KEPT = {
    "weights": "which no call changes",
    "state": "not all of it in one buffer that `changes` names",
    "inputs": "not all of it in one input that `written` names",
}
"""Memories whose contents are not the recording's to change, and what is wrong with a write there."""


def changed_state(manifest: Manifest) -> list[int]:
    """Positions of the weights that calls of the manifest's entry change.  Before format version 5 they may change all state."""
    if manifest.format >= 5:
        return list(manifest.changes)
    return [index for index, weight in enumerate(manifest.weights) if weight.memory == "state"]


def changed_rows(manifest: Manifest) -> list[tuple[str, int, int]]:
    """(memory, first byte, the one behind the last) of the state that calls of the manifest's entry change."""
    rows = [manifest.weights[index] for index in changed_state(manifest)]
    return [(row.memory, row.offset, row.offset + span(row)) for row in rows]


def writable(manifest: Manifest, program: Program) -> Cover:
    """What the recordings of an entry's program may write to beside the arena; `manifest` is the entry's.

    Beside state and inputs that calls change, these are values that copy steps put into memory inputs.  They lie over no input that
    calls leave as it is: `check_order` holds.
    """
    chosen = [program.inputs[index] for index in manifest.written]
    chosen += [index for step in program.steps if step.kind == "copy" for index in step.outputs]
    values = [program.values[index] for index in chosen]
    rows = [(value.memory, *extent(value)) for value in values if value.memory == "inputs"]
    return Cover([*rows, *changed_rows(manifest)])


def check_targets(table: Table, allowed: Cover) -> None:
    """Raises table-invalid where a memset or memcpy writes to weights, or to inputs or state outside of `allowed`: from its first
    byte to its last, in every graph and body of the recording.  `table` is sound: `check_recording` holds."""
    for number, (memory, begin, size) in enumerate(written(table)):
        if memory in KEPT and not allowed.holds(memory, begin, begin + size):
            text = f"writes bytes {begin} to {begin + size} of memory {memory}, {KEPT[memory]}"
            raise BundleError("table-invalid", f"{table.where}: nodes[{_position(table, number)}]: {text}")


def _position(table: Table, number: int) -> int:
    """Where among the nodes the `number`-th of the memsets and, behind them, the memcpys stands."""
    from ..tables.table import MEMCPY, MEMSET

    kinds = bytes(table.kind)
    return [position for wanted in (MEMSET, MEMCPY) for position, kind in enumerate(kinds) if kind == wanted][number]
