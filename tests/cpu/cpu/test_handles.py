"""Handles of a shared object's constants: each handle that torch makes is freed when its region is closed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import cgbundle
import cgcompile
from cgbundle.cpu.libtorch import LibTorch
from cgbundle.format import archive


def test_a_session_leaves_no_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container of torch 2.13 creates a handle for each constant that it receives."""
    path = tmp_path / "linear.cgb"
    model = torch.nn.Linear(3, 2)
    cgcompile.build(model, lambda: (torch.ones(1, 3),), out=path, target="cpu", standalone=False, progress="silent")
    manifest, program = archive.read_manifest(str(path)), cgbundle.load(path)
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
    assert manifest.target.torch and len(freed) == 2 * constants > 0
