"""An opened bundle whose manifest is not the one on disk: for tests that change a row, or have no manifest file at all."""

from __future__ import annotations

from pathlib import Path

from cgbundle.format.archive import Archive
from cgbundle.format.schema import File, Manifest
from cgcompile.bundle import manifest_text


class ArchiveOf(Archive):
    """The bundle in `folder` with `manifest`; its files are taken as they are."""

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self._text = manifest_text.encode(manifest)
        super().__init__(str(folder))
        self._manifest = manifest

    def _read_manifest(self) -> bytes:
        return self._text

    def _row(self, name: str) -> File:
        path = Path(self.path, name)
        if not path.is_file():
            return super()._row(name)
        return File(path=name, bytes=path.stat().st_size, sha256=manifest_text.sha256(str(path)))
