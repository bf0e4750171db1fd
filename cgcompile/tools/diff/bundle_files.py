"""Opens a bundle and reads its files on demand.  Error texts begin with the bundle's path, because diff opens two bundles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from cgbundle.errors import CgbundleError
from cgbundle.format import file_names
from cgbundle.format.archive import Archive
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.schema import File, Manifest
from cgbundle.format.table import Table
from cgbundle.format.variants import variant_name
from cgbundle.validate import contents
from cgbundle.validate.bundle import check_self_test
from cgbundle.validate.manifest import check_manifest
from cgbundle.validate.module_state import ModuleState, decode_states
from cgcompile.bundle.recordings import Recording, decode


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFiles:
    """An open bundle: its checked manifest, and the manifest's files by path."""

    path: str
    bundle: Archive
    manifest: Manifest
    files: dict[str, File]

    @property
    def variants(self) -> dict[str, BundleFiles]:
        """The bundle opened for each of its variants, by name.  Raises as `open_bundle`."""
        by_name = {}
        for number, target in enumerate(self.bundle.variants.targets()):
            with _errors_with_path(self.path):
                opened = Archive(self.path)
                opened.choose(number)
                by_name[variant_name(target)] = _opened(self.path, opened)
        return by_name

    def rank(self, number: int) -> BundleFiles:
        """Opens the bundle of another rank of a model on several GPUs.  Raises as `open_bundle`."""
        with _errors_with_path(self.path):
            return _opened(self.path, self.bundle.rank(number))


def open_bundle(path: str) -> BundleFiles:
    """Opens the bundle at `path`, checks its manifest and the length of every file.

    Raises bundle-missing, not-a-bundle, format-unsupported, manifest-invalid, file-damaged.
    """
    with _errors_with_path(path):
        return _opened(path, Archive(path))


def _opened(path: str, bundle: Archive) -> BundleFiles:
    manifest = bundle.manifest
    check_manifest(manifest)
    for file in manifest.files:
        bundle.check_size(file)
    return BundleFiles(path=path, bundle=bundle, manifest=manifest, files={file.path: file for file in manifest.files})


def recording(bundle: BundleFiles, name: str) -> Recording:
    """Reads a recording of the bundle.  Raises file-damaged, table-invalid."""
    with _errors_with_path(bundle.path):
        return decode(bundle.bundle.data(name), name)


def table(bundle: BundleFiles, name: str) -> Table:
    """Reads the columns of a recording of the bundle.  Raises file-damaged, table-invalid."""
    with _errors_with_path(bundle.path):
        return Table(bundle.bundle.data(name), name)


def module_states(bundle: BundleFiles) -> tuple[ModuleState, ...]:
    """Reads the contents of the data symbols in the bundle's images; () if there are none.  Raises file-damaged, table-invalid."""
    name = bundle.manifest.module_state
    if not name:
        return ()
    with _errors_with_path(bundle.path):
        return decode_states(bundle.bundle.data(name), name)


@contextmanager
def tensors(bundle: BundleFiles, name: str) -> Iterator[Mapped]:
    """Maps a safetensors file of the bundle.  Checks its header against the manifest, and does not hash the data.

    Raises weights-invalid.
    """
    with _errors_with_path(bundle.path):
        _CHECKS[name](bundle.bundle)
        mapped = bundle.bundle.mapped(name)
    with closing(mapped):
        yield mapped


_CHECKS: dict[str, Callable[[Archive], None]] = {
    file_names.WEIGHTS: contents.check_weights, file_names.TABLES: contents.check_weights, file_names.SELF_TEST: check_self_test,
}  # fmt: skip


@contextmanager
def _errors_with_path(path: str) -> Iterator[None]:
    try:
        yield
    except CgbundleError as error:
        if str(error).startswith(path):
            raise
        raise type(error)(error.code, f"{path}: {error}", error.hint) from None
