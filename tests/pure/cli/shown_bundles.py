"""Writes a complete CUDA bundle by hand, sealed and valid, for tests of `inspect` and its page.

It has the program of `cuda_bundles`: a memset, a kernel beside a memcpy, a kernel, an empty node, then a copy. Its keys are a
product of two dimensions; a second input only gives the size of `seq`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import Dimension, Manifest, Program, Provenance, SelfTest, TensorSpec, Value
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Edge, Recording
from tests.helpers.bundles import cuda_bundles, tiny_bundle
from tests.helpers.bundles.edits import edited

SEQ_AT = 512
"""Offset of the second input in the memory of inputs."""

Change = Callable[[Manifest], Manifest]


def write(
    folder: Path,
    batches: Sequence[int] = (4, 8),
    seqs: Sequence[int] = (2,),
    record: Callable[[str, int], Recording] = cuda_bundles.recording,
    change: Change | None = None,
) -> Path:
    """Writes the bundle to `folder` and returns it. `record` makes the recording for an image's name and a batch; `change` edits
    the manifest before it is sealed. Batches are at most 8, because the offsets in the arena are fixed.
    """
    folder.mkdir()
    base = cuda_bundles.write(folder, b"\x7fELF, but not really")
    (image,) = [path.name for path in (folder / "kernels").iterdir()]
    keys = list(product(batches, seqs))
    for path in (folder / "graphs").glob("g0-*"):
        path.unlink()
    for key in keys:
        (folder / "graphs" / f"g0-{key[0]}x{key[1]}.bin").write_bytes(tables.encode(replace(record(image, key[0]), key=key)))
    (folder / file_names.PROGRAM).write_bytes(b"PK, but not really")
    with open(folder / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, {"nothing": ("uint8", (1,), lambda: b"0")})
    manifest = edited(
        base,
        dimensions=(_dimension("batch", batches), _dimension("seq", seqs)),
        inputs=(_spec("x", "batch", cuda_bundles.FLOATS), _spec("places", "seq")),
        outputs=(_spec("y", "batch", cuda_bundles.FLOATS),),
        call={"call": [["x", {"tensor": 0}], ["places", {"tensor": 1}]]},
        parameters=(tiny_bundle.POSITIONAL, tiny_bundle.POSITIONAL),
        result={"tensor": 0},
        programs=tuple([_program(*key) for key in keys]),
        self_test=SelfTest(
            compare="bits", calls=1, expected="recording", bounds=(1e-5,), proofs=tuple([tiny_bundle.proof(*key) for key in keys])
        ),
        provenance=Provenance(source="m.py", created="2026-11-21T10:00:00Z", versions=(("torch", "2.11"),), machine="a GPU"),
        files=manifest_text.describe_files(str(folder)),
    )
    tiny_bundle.seal(folder, change(manifest) if change else manifest)
    return folder


def chain(length: int) -> Callable[[str, int], Recording]:
    """Returns a recorder of `length` kernels in a chain."""

    def record(image: str, batch: int) -> Recording:
        base = cuda_bundles.recording(image, batch)
        edges = [Edge(source=index, target=index + 1, from_port=0, to_port=0, type=0) for index in range(length - 1)]
        kernels = [base.nodes[index % 2] for index in range(length)]
        return replace(base, nodes=tuple(kernels), edges=tuple(edges))

    return record


def _dimension(name: str, sizes: Sequence[int]) -> Dimension:
    return Dimension(name=name, sizes=tuple(sizes), pad="no", chunk=False, reason="not proved")


def _spec(name: str, *shape: str | int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape, order=tuple(range(len(shape))))


def _program(batch: int, seq: int) -> Program:
    base = cuda_bundles.program(batch)
    second = Value(dtype="float32", shape=(seq,), strides=(1,), memory="inputs", offset=SEQ_AT)
    step = replace(base.steps[0], file=f"graphs/g0-{batch}x{seq}.bin")
    return replace(
        base, key=(batch, seq), values=(*base.values, second), inputs=(0, len(base.values)), steps=(step, *base.steps[1:])
    )
