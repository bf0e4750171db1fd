"""A tiny valid bundle, written by hand from schema rows. Tests use it to inspect, verify, damage or compare bundles.

This module does not import torch. The shared object is a dummy: the bundle can be checked but not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from struct import pack

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.file_names import self_test_entry as entry
from cgbundle.format.schema import (
    VERSION,
    Dimension,
    EntrySpec,
    Manifest,
    Parameter,
    Program,
    Proof,
    Provenance,
    Region,
    SelfTest,
    Step,
    Target,
    TensorSpec,
    Value,
    Weight,
)
from cgbundle.validate import host_code
from cgcompile.bundle import manifest_text

Change = Callable[[Manifest], Manifest]
HOST_FILE = "host/model.so"
SIZES = (1, 4)


def write_bundle(folder: Path, change: Change | None = None) -> Path:
    """Writes the bundle to `folder` and returns `folder`. `change` edits the manifest before it is sealed."""
    (folder / "host").mkdir(parents=True)
    (folder / HOST_FILE).write_bytes(b"\x7fELF, but not really\n" * 20)
    (folder / file_names.PROGRAM).write_bytes(b"PK, but not really\n" * 10)
    with open(folder / file_names.WEIGHTS, "wb") as file:
        safetensors_files.write(
            file, {"first.weight": ("float32", (2, 3), floats(range(6))), "first.bias": ("float32", (2,), floats(range(2)))}
        )
    with open(folder / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, self_test_tensors())
    base = replace(manifest(), files=manifest_text.describe_files(str(folder)))
    changed = change(base) if change else base
    if changed.files == base.files:
        finish(folder, changed)
    else:
        seal(folder, changed)
    return folder


def finish(folder: Path, manifest: Manifest) -> None:
    """Appends the rows of the host code to the shared objects, then writes the manifest with all files described."""
    host_code.attach(folder, manifest)
    seal(folder, replace(manifest, files=manifest_text.describe_files(str(folder))))


def seal(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest without any check."""
    (folder / file_names.MANIFEST).write_bytes(manifest_text.encode(manifest))


def floats(values: range) -> Callable[[], bytes]:
    """Returns a function that gives float32 values as bytes, the form that `safetensors_files.write` takes."""
    return lambda: pack(f"<{len(values)}f", *values)


def self_test_tensors() -> dict[str, safetensors_files.Tensor]:
    """Returns x and y of both sizes under the names that the self-test uses."""
    tensors: dict[str, safetensors_files.Tensor] = {}
    for size in SIZES:
        tensors[entry((size,), "input", 0)] = ("float32", (size, 3), floats(range(size * 3)))
        tensors[entry((size,), "output", 0)] = ("float32", (size, 2), floats(range(size * 2)))
    return tensors


def manifest() -> Manifest:
    """Returns a CPU manifest: y[batch, 2] = first(x[batch, 3]), batch 1 and 4, with a tied weight and an empty list of files."""
    forward = EntrySpec(
        name="forward",
        dimensions=(Dimension(name="batch", sizes=SIZES, pad="rows", chunk=True, reason="rows do not depend on each other"),),
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 3), order=(0, 1)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 2), order=(0, 1)),),
        call={"call": [["x", {"tensor": 0}]]},
        parameters=(POSITIONAL,),
        result={"tensor": 0},
        programs=tuple([program(size) for size in SIZES]),
        self_test=SelfTest(
            compare="tolerance",
            calls=1,
            expected="eager",
            bounds=(1e-5,),
            proofs=tuple([proof(size, errors=(1e-7,)) for size in SIZES]),
        ),
    )
    constants = (("c0", 0), ("c1", 1))
    return Manifest(
        version=VERSION,
        name="tiny",
        target=Target(kind="cpu", arch=os.uname().machine, features=("sse", "sse2"), torch="2.11"),
        entries=(forward,),
        weights=(
            Weight(name="first.weight", tensor="first.weight", dtype="float32", shape=(2, 3), strides=(3, 1)),
            Weight(name="first.bias", tensor="first.bias", dtype="float32", shape=(2,), strides=(1,)),
            Weight(name="tied.bias", tensor="first.bias", dtype="float32", shape=(2,), strides=(1,)),
        ),
        memories=(("weights", 32),),
        regions=(Region(name="model", kind="host", reason="the cpu target has no graphs", file=HOST_FILE, constants=constants),),
        provenance=Provenance(
            source="tiny.py",
            created="2026-11-21T10:00:00Z",
            versions=(("cgcompile", "0.1.0"), ("torch", "2.13.0")),
            machine="a processor",
            options=(("target", "cpu"),),
        ),
        files=(),
    )


POSITIONAL = Parameter()


def proof(*key: int, method: str = "replay", errors: tuple[float, ...] = (), tolerance: float = 1e-5) -> Proof:
    """Returns the proof of a key; `error` is the first of `errors`, which must be the largest."""
    error = errors[0] if errors else 0.0
    return Proof(key=key, method=method, error=error, tolerance=tolerance, errors=errors)


def bounds(*dtypes: str) -> tuple[float, ...]:
    """Returns the self-test's tolerance for each of these dtypes."""
    return tuple([1e-5 if "float" in dtype or "complex" in dtype else 0.0 for dtype in dtypes])


def program(size: int) -> Program:
    """Returns a program with one host step from x to y."""
    values = [Value(dtype="float32", shape=(size, width), strides=(width, 1), memory="host") for width in (3, 2)]
    step = Step(kind="host", region=0, inputs=(0,), outputs=(1,))
    return Program(key=(size,), values=tuple(values), inputs=(0,), outputs=(1,), steps=(step,), arena=0, static=0)
