"""`cgcompile cache`: the cache of builds; `push` and `pull`: bundles in remote folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import BundlePath
from ..output import count, say, size, write_json

if TYPE_CHECKING:
    from cgcompile.util.content_cache import Kept

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Url = Annotated[str, typer.Argument(metavar="URL", help="The remote folder of the bundle: a path, s3://bucket/m.cgb, or similar.")]
Force = Annotated[bool, typer.Option("--force", help="Replace another bundle.")]


def dir(as_json: AsJson = False) -> None:
    """Print the folder of the cache.

    It is $CGCOMPILE_CACHE, else cgcompile in $XDG_CACHE_HOME or ~/.cache.
    Its size is written to stderr. You may remove it at any time.
    """
    from cgcompile.util.content_cache import cache_place, kept

    kept_stages = kept()
    if as_json:
        write_json(_plain(kept_stages))
    else:
        typer.echo(cache_place())
        say(_size_text(kept_stages) or "empty")


def clean(as_json: AsJson = False) -> None:
    """Remove the contents of the cache.

    Files that cgcompile did not write stay, and so do bundles. The next
    build takes longer.
    """
    from cgcompile.util.content_cache import cache_place, remove_kept

    removed = remove_kept()
    if as_json:
        write_json(_plain(removed))
    else:
        say(f"{cache_place()}: removed {_size_text(removed) or 'nothing: it was empty'}")


def _plain(kept_stages: Sequence[Kept]) -> dict[str, Any]:
    from cgcompile.util.content_cache import cache_place

    stages = {row.stage: {"files": row.files, "bytes": row.bytes} for row in kept_stages}
    return {
        "path": str(cache_place()), "files": sum(row.files for row in kept_stages), "bytes": sum(row.bytes for row in kept_stages),
        "stages": stages,
    }  # fmt: skip


def _size_text(kept_stages: Sequence[Kept]) -> str:
    """Formats the size of the cache: `12 files, 3.4 MiB (kernels 3.1 MiB, lowered 0.3 MiB)`, "" for an empty one."""
    if not kept_stages:
        return ""
    parts = ", ".join([f"{row.stage} {size(row.bytes)}" for row in kept_stages])
    return f"{count(sum(row.files for row in kept_stages), 'file')}, {size(sum(row.bytes for row in kept_stages))} ({parts})"


# --- remote folders ---------------------------------------------------------------------------------------------------


def push(bundle: BundlePath, url: Url, force: Force = False, as_json: AsJson = False) -> None:
    """Copy a bundle to a folder or an object store.

    The remote bundle is complete or absent: the manifest is sent last. An
    interrupted push continues. This needs fsspec, and its package for the
    kind of URL (s3fs, gcsfs, ...), which also finds the credentials.

    \b
    cgcompile push classifier.cgb s3://models/classifier.cgb
    """
    import cgcompile
    from cgcompile.bundle.manifest_text import bundle_bytes

    transferred = cgcompile.push(bundle, url, replace=force)
    _show_transfer(transferred.place, bundle_bytes(transferred.manifest), transferred.moved, as_json)


def pull(
    url: Url,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="BUNDLE", help="The local folder.", show_default="the last part of the URL")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Copy a bundle from a folder or an object store.

    The bundle is complete or absent, and every SHA-256 is checked. An
    interrupted pull continues. The signature is copied too: verify --key
    checks it.
    """
    import cgcompile
    from cgcompile.bundle.manifest_text import bundle_bytes

    transferred = cgcompile.pull(url, out, replace=force)
    _show_transfer(transferred.place, bundle_bytes(transferred.manifest), transferred.moved, as_json)


def _show_transfer(place: str, total: int, moved: int, as_json: bool) -> None:
    if as_json:
        write_json({"path": place, "bytes": total, "moved": moved})
    else:
        say(f"{place}: {size(total)}, {size(moved)} transferred")
        typer.echo(place)
