"""A bundle on disk, and its files as they are needed.  Messages of errors begin with the bundle's path: there are two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from cgbundle.errors import CgbundleError
from cgbundle.format import file_names
from cgbundle.format.archive import Archive
from cgbundle.format.safetensors import Mapped
from cgbundle.format.schema import File, Manifest
from cgbundle.format.variants import variant_name
from cgbundle.tables.module_state import ModuleState, decode_states
from cgbundle.tables.table import Table
from cgbundle.validate import contents
from cgbundle.validate.bundle import check_self_test
from cgbundle.validate.manifest import check_manifest
from cgcompile.bundle.recordings import Recording, decode


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFiles:
    """An opened bundle: its sound manifest, and the manifest's files by path."""

    path: str
    bundle: Archive
    manifest: Manifest
    files: dict[str, File]

    @property
    def variants(self) -> dict[str, BundleFiles]:
        """The bundle, opened for each of its variants, by their names.  Raises as `open_bundle`."""
        by_name = {}
        for number, target in enumerate(self.bundle.variants.targets()):
            with _about(self.path):
                opened = Archive(self.path)
                opened.choose(number)
                by_name[variant_name(target)] = _opened(self.path, opened)
        return by_name

    def rank(self, number: int) -> BundleFiles:
        """The bundle of another rank of a model over several GPUs.  Raises as `open_bundle`."""
        with _about(self.path):
            return _opened(self.path, self.bundle.rank(number))


def open_bundle(path: str) -> BundleFiles:
    """The bundle at `path`: its manifest is checked, and every file has its length.

    Raises bundle-missing, not-a-bundle, format-unsupported, manifest-invalid, file-damaged.
    """
    with _about(path):
        return _opened(path, Archive(path))


def _opened(path: str, bundle: Archive) -> BundleFiles:
    manifest = bundle.manifest
    check_manifest(manifest)
    for file in manifest.files:
        bundle.check_size(file)
    return BundleFiles(path=path, bundle=bundle, manifest=manifest, files={file.path: file for file in manifest.files})


def recording(bundle: BundleFiles, name: str) -> Recording:
    """The recording in a file of the bundle.  Raises file-damaged, table-invalid."""
    with _about(bundle.path):
        return decode(bundle.bundle.data(name), name)


def table(bundle: BundleFiles, name: str) -> Table:
    """The columns of a recording in a file of the bundle.  Raises file-damaged, table-invalid."""
    with _about(bundle.path):
        return Table(bundle.bundle.data(name), name)


def module_states(bundle: BundleFiles) -> tuple[ModuleState, ...]:
    """What the data symbols of the bundle's images hold; () without any.  Raises file-damaged, table-invalid."""
    name = bundle.manifest.module_state
    if not name:
        return ()
    with _about(bundle.path):
        return decode_states(bundle.bundle.data(name), name)


@contextmanager
def tensors(bundle: BundleFiles, name: str) -> Iterator[Mapped]:
    """A safetensors file of the bundle, mapped, its header checked against the manifest; the data is not hashed, gigabytes may be.

    Raises weights-invalid.
    """
    with _about(bundle.path):
        _CHECKS[name](bundle.bundle)
        mapped = bundle.bundle.mapped(name)
    with closing(mapped):
        yield mapped


_CHECKS: dict[str, Callable[[Archive], None]] = {
    file_names.WEIGHTS: contents.check_weights, file_names.TABLES: contents.check_weights, file_names.SELF_TEST: check_self_test,
}  # fmt: skip


@contextmanager
def _about(path: str) -> Iterator[None]:
    try:
        yield
    except CgbundleError as error:
        if str(error).startswith(path):
            raise
        raise type(error)(error.code, f"{path}: {error}", error.hint) from None
