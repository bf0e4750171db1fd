"""The versions of the format: what each one brought, and what stands for it where an earlier bundle is read."""

from __future__ import annotations

from typing import Any

FORMAT_VERSION = 6
"""1 (2026-11): first version.  2 (2026-11): inputs that a call changes, the node of a finding.  3 (2026-11): state, random numbers,
outputs that share memory with something else.  4 (2026-11): parameters of the call, a bound for every tensor of the exam, levels of
processors, ranges of indices, signatures, the rows that a shared object was built for, records in trees.  5 (2026-11): several
entries, chains between them.  6 (2026-11): weights that no update may change, tables in a file of their own."""

ADDED: dict[tuple[str, str], tuple[int, Any]] = {
    ("Manifest", "written"): (2, ()),
    ("Finding", "node"): (2, ""),
    ("Weight", "memory"): (3, "weights"),
    ("Manifest", "aliases"): (3, ()),
    ("Manifest", "random"): (3, -1),
    ("Exam", "calls"): (3, 1),
    ("Target", "level"): (4, ""),
    ("TensorSpec", "range"): (4, ()),
    ("Exam", "expected"): (4, ""),
    ("Exam", "bounds"): (4, ()),
    ("Proof", "errors"): (4, ()),
    ("Proof", "distance"): (4, 0.0),
    ("Manifest", "parameters"): (4, ()),
    ("Manifest", "entry"): (5, "forward"),
    ("Manifest", "changes"): (5, ()),
    ("Manifest", "entries"): (5, ()),
    ("Manifest", "chains"): (5, ()),
    ("Manifest", "reserved"): (5, ()),
    ("Manifest", "fixed"): (6, ()),
    ("Dimension", "uncut"): (6, ""),
    ("Manifest", "tables"): (6, ()),
    ("Program", "lowerings"): (6, ()),
    ("Weight", "zeros"): (6, False),
    ("Manifest", "world"): (6, ()),
    ("Manifest", "data_sizes"): (6, ()),
    ("Entry", "data_sizes"): (6, ()),
    ("FixedWeight", "where"): (6, ""),
}
"""(record, field) -> the format version that brought the field, and the value that it has where an earlier version is read."""

SPARSE = {
    ("Manifest", "chains"),
    ("Manifest", "reserved"),
    ("Dimension", "uncut"),
    ("Manifest", "tables"),
    ("Program", "lowerings"),
    ("Weight", "zeros"),
    ("Manifest", "world"),
    ("Manifest", "data_sizes"),
    ("Entry", "data_sizes"),
    ("FixedWeight", "where"),
}
"""(record, field) of those in ADDED that are left out where they have the value of before: few bundles have any."""
