"""Names for addresses of a recording: a weight, an input, a value of the program, or `arena+4096`.  Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from cgbundle.format.schema import EntrySpec, Manifest, Program, Weight
from cgbundle.format.shapes import span


class Names:
    """The names of addresses in one program."""

    __slots__ = ("_known", "_program", "_roles", "_rows", "_starts")

    def __init__(self, manifest: Manifest, entry: EntrySpec, program: Program) -> None:
        self._program = program
        self._roles = roles(entry, program)
        self._rows = {memory: _laid_out(manifest.weights, memory) for memory in ("weights", "state")}
        self._starts = {memory: [begin for begin, _, _ in rows] for memory, rows in self._rows.items()}
        self._known: dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], str] = {}

    def of(self, memory: str, offset: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> str:
        """Returns the name of a byte of `memory` in a step that reads and writes the given values.

        Other values are ignored, because in other steps the arena contains other values.  A value that the step writes names only
        its first byte: before it is written, its memory may contain a value with another layout.
        """
        key = (memory, offset, reads, writes)
        if key not in self._known:
            self._known[key] = self._weight(memory, offset) if memory in self._rows else self._place(memory, offset, reads, writes)
        return self._known[key]

    def value(self, index: int) -> str:
        """Returns `input ids`, `output logits`, or `v3` for a value that is internal to the program."""
        return self._roles.get(index, f"v{index}")

    def _weight(self, memory: str, offset: int) -> str:
        row = bisect_right(self._starts[memory], offset) - 1
        if row >= 0:
            begin, end, name = self._rows[memory][row]
            if offset < end or offset == begin:
                prefix = "state " if memory == "state" else ""
                return prefix + name + _beyond(offset - begin)
        return f"{memory}+{offset}"

    def _place(self, memory: str, offset: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> str:
        place = f"{memory}+{offset}"
        labels = []
        for index in dict.fromkeys([*(self._program.inputs if memory == "inputs" else ()), *reads, *writes]):
            value = self._program.values[index]
            inside = value.offset < offset < value.offset + span(value) and (index in reads or index in self._program.inputs)
            if value.memory == memory and (value.offset == offset or inside):
                labels.append(self.value(index) + _beyond(offset - value.offset))
        if memory == "inputs" and labels and labels[0].startswith("input "):
            return labels[0]
        return f"{place} ({', '.join(labels)})" if labels else place


def roles(entry: EntrySpec, program: Program) -> dict[int, str]:
    """Maps positions in `program.values` to `input x`, `output y`, or both, for values that are inputs or outputs of the call."""
    texts: dict[int, str] = {}
    for kind, positions, specs in (("input", program.inputs, entry.inputs), ("output", program.outputs, entry.outputs)):
        for position, spec in zip(positions, specs, strict=True):
            texts[position] = f"{texts[position]}, {kind} {spec.name}" if position in texts else f"{kind} {spec.name}"
    return texts


def _laid_out(weights: Iterable[Weight], memory: str) -> list[tuple[int, int, str]]:
    """Returns (first byte, end, name) of the weights in `memory`, by address; for tied weights the first name."""
    rows: dict[int, tuple[int, int, str]] = {}
    for weight in weights:
        if weight.memory == memory:
            rows.setdefault(weight.offset, (weight.offset, weight.offset + span(weight), weight.name))
    return [rows[offset] for offset in sorted(rows)]


def _beyond(offset: int) -> str:
    return f"+{offset}" if offset else ""
