"""`python -m tests.helpers.drivers.failing_gpu FOLDER FLAG`: runs `cgcompile serve` over a fake driver. Every driver call fails as
soon as the file FLAG exists. Creates FOLDER with one model, `twice`, which doubles 64 floats."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import Manifest
from cgcompile.bundle import manifest_text
from cgcompile_cli.main import main as command_line
from tests.helpers.bundles import donation_bundles
from tests.helpers.bundles.donation_bundles import N, numbers, twice
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import proof
from tests.helpers.drivers.fake_driver import FakeDriver, install

LOST = 719
"""CUDA_ERROR_LAUNCH_FAILED."""


class FailingDriver(FakeDriver):
    """Fails every call once `flag` exists, as the real driver does when its context is lost."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name != "cuGetErrorName" and os.path.exists(object.__getattribute__(self, "flag")):
            object.__getattribute__(self, "__dict__")["fail_at"] = len(self.calls)
            object.__getattribute__(self, "__dict__")["error"] = LOST
        return super().__getattribute__(name)


def write(folder: Path) -> Manifest:
    """Writes a bundle that has only the first entry of `donation_bundles`, with a self-test."""
    base = donation_bundles.write(folder)
    image = hashlib.sha256(b"an image").hexdigest()
    for path in [*(folder / "graphs").iterdir(), *folder.glob("programs/*")]:
        path.unlink()
    (folder / file_names.PROGRAM).write_bytes(b"")
    (folder / "graphs/make.bin").write_bytes(donation_bundles.tables.encode(donation_bundles.recording(image, "make")))
    with open(folder / file_names.SELF_TEST, "wb") as file:
        shape = ("float32", (N,))
        named = {
            file_names.self_test_entry((), "input", 0): numbers(0),
            file_names.self_test_entry((), "output", 0): twice(numbers(0)),
        }
        safetensors_files.write(file, {name: (*shape, lambda data=data: data) for name, data in named.items()})
    self_test = replace(base.entries[0].self_test, bounds=(0.0,), proofs=(replace(proof(1), key=(), errors=(0.0,)),))
    manifest = edited(
        base, name="twice", entries=(replace(base.entries[0], name="forward"),), donations=(), donated=(), self_test=self_test,
        regions=base.regions[:1], files=manifest_text.describe_files(str(folder)),
    )  # fmt: skip
    (folder / file_names.MANIFEST).write_bytes(manifest_text.encode(manifest))
    return manifest


def main(folder: str, flag: str) -> None:
    """Serves the model until the process is stopped."""
    write(Path(folder) / "twice" / "1" / "model.cgb")
    install(pytest.MonkeyPatch(), FailingDriver(Path(flag)))
    sys.argv = ["cgcompile", "serve", folder, "--port", "0", "--poll", "3600", "--log", "json"]
    command_line()


if __name__ == "__main__":
    main(*sys.argv[1:])
