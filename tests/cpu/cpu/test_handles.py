"""Memory of a shared object's constants: every handle that torch makes of one is freed with its region."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import cgbundle
from cgbundle.cpu.libtorch import LibTorch
from cgbundle.errors import CgbundleError
from cgbundle.format import archive
from tests.helpers.places import GOLDEN


@pytest.mark.parametrize("path", [GOLDEN / "v1" / "cpu_mlp.cgb", GOLDEN / "v4" / "cpu_state.cgb"], ids=lambda path: path.stem)
def test_a_session_leaves_no_handle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These were made by torch 2.13, whose container makes a handle of each that it is given."""
    manifest = archive.read_manifest(str(path))
    try:
        program = cgbundle.load(path)
    except CgbundleError as error:
        pytest.skip(f"does not run here: {error}")
    freed = []
    init = LibTorch.__init__

    def counted(self: LibTorch, *libraries: object) -> None:
        init(self, *libraries)  # type: ignore[arg-type]
        delete = self.delete
        self.delete = lambda handle: (freed.append(handle), delete(handle))[1]  # type: ignore[assignment]

    program.close()
    gc.collect()
    monkeypatch.setattr(LibTorch, "__init__", counted)
    cgbundle.load(path).close()
    constants = sum(len(region.constants) for region in manifest.regions)
    assert manifest.target.torch.startswith("2.13") and len(freed) == 2 * constants > 0
