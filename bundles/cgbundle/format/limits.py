"""How large a bundle's parts may be: what reads or writes one takes its limits from here, and FORMAT.md lists them.

They lie far above real bundles, and so low that a hostile one is refused within a second and 300 MB.  Imports nothing.
"""

from __future__ import annotations

JSON_BYTES = 32 << 20
"""Bytes of manifest.json, and of the header of a safetensors file: ten thousand int_keys, or 100,000 tensors, need half of it."""

JSON_VALUES = 1_500_000
"""Commas, objects and lists in such a text: they say how much memory its values take."""

JSON_DEPTH = 256
"""Objects and lists inside each other: a tree of `TREE_DEPTH` has three of them a level."""

TREE_DEPTH = 64
"""Containers of a tree inside each other."""

TREE_FIELDS = 4096
"""Fields of a named tuple or a record."""

SIZE_DEPTH = 64
"""Operators of a size inside each other."""

SIZE_OPERATORS = 256
"""Operators of one size."""

SIZE_EVALUATIONS = 4_000_000
"""Sizes and operators of all inputs and outputs, times the int_keys, of all entries together."""

AXES = 64
"""Axes of a tensor, as in PyTorch."""

DIMENSIONS = 64
"""Declared dimensions."""

VARIANTS = 32
"""Variants of a bundle."""

ENTRIES = 64
"""Entries of a bundle."""

CHAINED = 1_000_000
"""Pairs of a program that gives an output and one that takes it where it lies, of all chains together, and programs of these."""

INTEGER = 1 << 63
"""Whole numbers are from -INTEGER on and below INTEGER; so are the bytes of a tensor, and where it ends."""

NAME = 1024
"""Characters of a name or path, all of them printable."""

PATH_PART = 255
"""Bytes between the slashes of a path."""

TEXT = 65536
"""Characters of other text: messages, reasons, sources, constants."""

STATE_ROWS = (1 << 31) - 1
"""Rows of state that `load` may be asked for: positions of 32 bits reach all of them."""

TABLE_BYTES = 64 << 20
"""Bytes of a recording or of the module states."""

TABLE_ROWS = 1 << 20
"""Every count of rows in a table; its bytes of symbols and of contents are limited by TABLE_BYTES."""

BODY_DEPTH = 64
"""Bodies of conditional nodes inside each other."""

HELD_BYTES = 256 << 20
"""Bytes of another file that is held in memory as a whole: a kernel image, a shared object."""
