"""The modules that are mutated, and the tests that should detect the mutations.

These modules validate bundles, run calls and make recordings: an error in them would go unnoticed.
"""

from __future__ import annotations

VALIDATE = ("tests/pure/validate",)
PLACED = ("tests/pure/offline/test_arena.py", "tests/pure/offline/test_loops.py")

MODULES: dict[str, tuple[str, ...]] = {
    "bundles/cgbundle/validate/bundle.py": (*VALIDATE, "tests/pure/call/test_entries.py"),
    "bundles/cgbundle/validate/recordings.py": VALIDATE,
    "bundles/cgbundle/validate/module_state.py": VALIDATE,
    "bundles/cgbundle/validate/special_kernels.py": VALIDATE,
    "bundles/cgbundle/validate/manifest.py": (*VALIDATE, "tests/pure/call/test_entries.py"),
    "bundles/cgbundle/validate/state.py": VALIDATE,
    "bundles/cgbundle/validate/programs.py": VALIDATE,
    "bundles/cgbundle/call/plan.py": (
        "tests/pure/call/test_dispatch.py",
        "tests/pure/call/test_guards.py",
        "tests/pure/call/test_plan.py",
    ),
    "bundles/cgbundle/format/safetensors.py": ("tests/pure/format/test_safetensors.py",),
    "bundles/cgbundle/format/safetensors_files.py": ("tests/pure/format/test_safetensors.py",),
    "bundles/cgbundle/format/table.py": ("tests/pure/tables", *VALIDATE),
    "cgcompile/bundle/recordings.py": ("tests/pure/tables",),
    "cgcompile/capture/relocation.py": ("tests/pure/capture",),
    "cgcompile/capture/pairing.py": ("tests/pure/capture",),
    "cgcompile/offline/assemble/arena.py": (*PLACED, "tests/pure/offline/test_arena_sizes.py"),
    "cgcompile/offline/assemble/plan_check.py": PLACED,
}
"""Module -> the tests that run first. A mutation that survives them runs with all of `ALL`."""

ALL = ("tests/pure",)
