"""Limits of a bundle's parts, listed in FORMAT.md. They are far above the values of real bundles. A hostile bundle is refused
within a second and 300 MB."""

from __future__ import annotations

JSON_BYTES = 32 << 20  # of manifest.json, and of a safetensors header: 10,000 int_keys, or 100,000 tensors, need half of it
JSON_VALUES = 1_500_000  # commas, objects and lists in such a text: they determine how much memory its values take
JSON_DEPTH = 256  # objects and lists inside each other: a tree of `TREE_DEPTH` has three per level
TREE_DEPTH = 64  # containers of a tree inside each other
TREE_FIELDS = 4096  # of a named tuple or a record
SIZE_DEPTH = 64  # operators of a size inside each other
SIZE_OPERATORS = 256  # of one size
SIZE_EVALUATIONS = 4_000_000  # sizes and operators of all inputs and outputs, times the int_keys, of all entries
AXES = 64  # of a tensor, as in PyTorch
DIMENSIONS = 64  # of an entry
VARIANTS = 32
ENTRIES = 64
CHAINED = 1_000_000  # of all donations: their programs, and the pairs of programs that they connect
INTEGER = 1 << 63  # whole numbers are in [-INTEGER, INTEGER); also bytes of a tensor, and its end
NAME = 1024  # printable characters of a name or path
PATH_PART = 255  # bytes between the slashes of a path
TEXT = 65536  # characters of other text: messages, reasons, sources, constants
STATE_ROWS = (1 << 31) - 1  # rows of state: 32-bit positions reach all of them
TABLE_BYTES = 64 << 20  # of a recording or of the module states
TABLE_ROWS = 1 << 20  # every count of rows in a table; symbols and contents are limited by TABLE_BYTES
BODY_DEPTH = 64  # bodies of conditional nodes inside each other
HELD_BYTES = 256 << 20  # of another file that is kept in memory: a kernel image, a shared object
