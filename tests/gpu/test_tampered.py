"""A changed bundle is refused before anything runs on the GPU, with an error for each kind of change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bundles.edits import edited
from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
from cgbundle.cuda.driver import cu  # noqa: E402
from cgbundle.errors import CgbundleError  # noqa: E402
from cgbundle.format.schema import Manifest  # noqa: E402
from cgbundle.validate.module_state import Address  # noqa: E402
from cgcompile.bundle import recordings as tables  # noqa: E402
from cgcompile.bundle.recordings import Edge, KernelNode, Recording  # noqa: E402
from tests.gpu.helpers import built  # noqa: E402
from tests.gpu.helpers.built import Case  # noqa: E402

LAUNCHES = ("cuGraphLaunch", "cuLaunchKernelEx", "cuGraphInstantiate")


@pytest.fixture
def bundle(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the GPT's bundle. From here on, a launch of a kernel fails the test."""

    def refuse(*_arguments: Any) -> None:
        pytest.fail("something was launched")

    for name in LAUNCHES:
        monkeypatch.setattr(cu, name, refuse)
    return cases["gpt"].path


def architecture(folder: Path, manifest: Manifest) -> Manifest:
    return replace(manifest, target=replace(manifest.target, arch="sm_80"))


def newer_driver(folder: Path, manifest: Manifest) -> Manifest:
    return replace(manifest, target=replace(manifest.target, driver=99000))


def newer_format(folder: Path, manifest: Manifest) -> Manifest:
    return edited(manifest, version=99)


def image(folder: Path, manifest: Manifest) -> None:
    flip(next((folder / "kernels").iterdir()))


def image_resealed(folder: Path, manifest: Manifest) -> Manifest:
    image(folder, manifest)
    return manifest


def relocation(folder: Path, manifest: Manifest) -> Manifest:
    def change(recording: Recording) -> Recording:
        index, node = first_kernel(recording)
        moved = replace(node.relocations[0], target=Address(memory=node.relocations[0].target.memory, offset=1 << 40))
        return put_node(recording, index, replace(node, relocations=(moved, *node.relocations[1:])))

    return change_table(folder, manifest, change)


def node_table(folder: Path, manifest: Manifest) -> Manifest:
    def change(recording: Recording) -> Recording:
        index, node = first_kernel(recording)
        return put_node(recording, index, replace(node, threads=(2048, 1, 1)))

    return change_table(folder, manifest, change)


def cycle(folder: Path, manifest: Manifest) -> Manifest:
    def change(recording: Recording) -> Recording:
        back = Edge(source=len(recording.nodes) - 1, target=0, from_port=0, to_port=0, type=0)
        return replace(recording, edges=(*recording.edges, back))

    return change_table(folder, manifest, change)


def table_byte(folder: Path, manifest: Manifest) -> None:
    flip(folder / manifest.entries[0].programs[0].steps[0].file)


CHANGES = {
    "architecture": (architecture, "wrong-architecture", "the bundle is for sm_80"),
    "driver": (newer_driver, "driver-too-old", r"needs a driver for CUDA 99\.0"),
    "format": (newer_format, "format-unsupported", "version 99 of the format"),
    "image": (image, "file-damaged", "kernels/"),
    "image, hashes made to fit": (image_resealed, "manifest-invalid", "not named by its SHA-256"),
    "relocation": (relocation, "relocation-invalid", r"relocations: the word at \d+ points at byte \d+ of memory"),
    "node table": (node_table, "table-invalid", "threads: .* is not within"),
    "edges": (cycle, "table-invalid", "cycle"),
    "table, a byte": (table_byte, "file-damaged", "graphs/"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_bundle_is_refused_before_anything_runs(name: str, bundle: Path, tmp_path: Path) -> None:
    change, error, message = CHANGES[name]
    changed = built.altered(bundle, tmp_path, change)
    with raises(error, match=message) as caught:
        cgbundle.load(changed)
    assert "\n" not in str(caught.value)


def test_no_two_changes_give_the_same_error(bundle: Path, tmp_path: Path) -> None:
    seen = set()
    for index, (change, _, _) in enumerate(CHANGES.values()):
        with pytest.raises(CgbundleError) as caught:
            cgbundle.load(built.altered(bundle, tmp_path / str(index), change))
        seen.add((type(caught.value), str(caught.value)))
    assert len(seen) == len(CHANGES)


# --- helpers -----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Changes one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def first_kernel(recording: Recording) -> tuple[int, KernelNode]:
    """Returns the first kernel with a relocation."""
    return next((i, node) for i, node in enumerate(recording.nodes) if isinstance(node, KernelNode) and node.relocations)


def put_node(recording: Recording, index: int, node: KernelNode) -> Recording:
    return replace(recording, nodes=(*recording.nodes[:index], node, *recording.nodes[index + 1 :]))


def change_table(folder: Path, manifest: Manifest, change: Any) -> Manifest:
    """Decodes, changes and encodes the table of the first program."""
    path = folder / manifest.entries[0].programs[0].steps[0].file
    path.write_bytes(tables.encode(change(tables.decode(path.read_bytes()))))
    return manifest
