"""An `Archive` whose manifest differs from the one on disk, or whose folder has no manifest file."""

from __future__ import annotations

from pathlib import Path

from cgbundle.format.archive import Archive
from cgbundle.format.schema import File, Manifest
from cgcompile.bundle import manifest_text


class ArchiveOf(Archive):
    """Opens the bundle in `folder` with `manifest`. Files that `manifest` does not list are described from disk."""

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
