"""Where results and bundles lie: `cgcompile cache`, what builds keep for the next one; `cgcompile store`, bundles whose equal files
are kept once; `push` and `pull`, bundles far away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import BundlePath
from ..output import count, say, show, size, table, write_json

if TYPE_CHECKING:
    from cgcompile.util.content_cache import Kept

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
StorePath = Annotated[
    str, typer.Option("--store", metavar="FOLDER", envvar="CGCOMPILE_STORE", help="The store's folder.", show_default=False)
]
Url = Annotated[str, typer.Argument(metavar="URL", help="Of the bundle's own folder: a path, s3://bucket/m.cgb, and the like.")]
Force = Annotated[bool, typer.Option("--force", help="Replace another bundle.")]


def dir(as_json: AsJson = False) -> None:
    """Print the folder of the cache.

    It is $CGCOMPILE_CACHE, else cgcompile in $XDG_CACHE_HOME or ~/.cache.
    What is in it is said on stderr. It may be removed at any time.
    """
    from cgcompile.util.content_cache import cache_place, kept

    found = kept()
    if as_json:
        write_json(_plain(found))
    else:
        typer.echo(cache_place())
        say(_told(found) or "empty")


def clean(as_json: AsJson = False) -> None:
    """Remove what is in the cache.

    Files that cgcompile did not write stay, and so do bundles. The next
    build makes again what it needs, and takes longer.
    """
    from cgcompile.util.content_cache import cache_place, remove_kept

    removed = remove_kept()
    if as_json:
        write_json(_plain(removed))
    else:
        say(f"{cache_place()}: removed {_told(removed) or 'nothing: it was empty'}")


def _plain(found: Sequence[Kept]) -> dict[str, Any]:
    from cgcompile.util.content_cache import cache_place

    stages = {each.stage: {"files": each.files, "bytes": each.bytes} for each in found}
    return {
        "path": str(cache_place()), "files": sum(each.files for each in found), "bytes": sum(each.bytes for each in found),
        "stages": stages,
    }  # fmt: skip


def _told(found: Sequence[Kept]) -> str:
    """`12 files, 3.4 MiB (kernels 3.1 MiB, lowered 0.3 MiB)`, "" for none."""
    if not found:
        return ""
    parts = ", ".join([f"{each.stage} {size(each.bytes)}" for each in found])
    return f"{count(sum(each.files for each in found), 'file')}, {size(sum(each.bytes for each in found))} ({parts})"


# --- the store --------------------------------------------------------------------------------------------------------


def add(
    bundle: BundlePath,
    store: StorePath,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Its name there.", show_default="the folder's")] = "",
    force: Annotated[bool, typer.Option("--force", help="Have the name lead to this bundle from now on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Add a bundle to a store, and print its path there.

    A store keeps equal files once: ten bundles of one model have one copy of
    the weights on the disk, and in memory where they are mapped. A bundle in
    it is a folder like any other: cgbundle.load() takes its path. The bundle
    that is added stays as it is.

    \b
    cgcompile store add classifier.cgb --store /srv/bundles
    """
    import cgcompile

    added = cgcompile.Store(store).add(bundle, name, replace=force)
    if as_json:
        write_json({"path": str(added.path), "digest": added.digest, "bytes": added.bytes, "new": added.new})
    else:
        say(f"{added.path}: {size(added.bytes)}, {size(added.new)} of it new to the store")
        typer.echo(str(added.path))


def listing(store: StorePath, as_json: AsJson = False) -> None:
    """List the bundles of a store.

    `own` is what the disk would get back without the bundle: files that no
    other bundle of the store has. `loaded`: a program has it open.
    """
    import cgcompile

    found = cgcompile.Store(store).bundles()
    if as_json:
        write_json([
            {
                "names": [*each.names], "digest": each.digest, "path": str(each.path), "model": each.manifest.name,
                "target": each.manifest.target.arch, "bytes": each.bytes, "own": each.own, "loaded": each.loaded,
            }
            for each in found
        ])  # fmt: skip
        return
    heads = ("name", "digest", "target", ">bytes", ">own", "loaded")
    show(table(heads, [
        (
            ", ".join(each.names) or "-", each.digest[:12], each.manifest.target.arch, size(each.bytes), size(each.own),
            "yes" if each.loaded else "no",
        )
        for each in found
    ]))  # fmt: skip


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of bundles, as `store list` has them.")],
    store: StorePath,
) -> None:
    """Take names of bundles away from a store.

    The bundles stay on the disk until `cgcompile store gc`.
    """
    import cgcompile

    opened = cgcompile.Store(store)
    for name in names:
        opened.remove(name)


def gc(
    store: StorePath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove from a store the bundles that no name leads to.

    What a program has loaded stays until it closes it. Files go when no bundle
    has them any more.
    """
    import cgcompile

    done = cgcompile.Store(store).collect(dry_run=dry_run)
    if as_json:
        write_json({"bundles": [*done.bundles], "files": done.files, "bytes": done.bytes, "loaded": [*done.loaded]})
        return
    stay = f"; {count(len(done.loaded), 'bundle')} without a name stay: loaded" if done.loaded else ""
    verb = "would remove" if dry_run else "removed"
    say(f"{store}: {verb} {count(len(done.bundles), 'bundle')} and {count(done.files, 'file')}, {size(done.bytes)}{stay}")


# --- far away ---------------------------------------------------------------------------------------------------------


def push(bundle: BundlePath, url: Url, force: Force = False, as_json: AsJson = False) -> None:
    """Put a bundle into a folder or an object store.

    Whole or absent: the manifest travels last. A push that was interrupted
    goes on where it was. Needs fsspec, and its package for the kind of URL
    (s3fs, gcsfs, ...), with the credentials where that package looks for them.

    \b
    cgcompile push classifier.cgb s3://models/classifier.cgb
    """
    import cgcompile
    from cgbundle.format.manifest_json import bundle_bytes

    done = cgcompile.push(bundle, url, replace=force)
    _tell_transfer(done.place, bundle_bytes(done.manifest), done.moved, as_json)


def pull(
    url: Url,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="BUNDLE", help="Where to.", show_default="the last part of the URL")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Get a bundle from a folder or an object store.

    Whole or absent, every file's SHA-256 checked; one that was interrupted
    goes on where it was. A signature comes along: cgcompile verify --key.
    """
    import cgcompile
    from cgbundle.format.manifest_json import bundle_bytes

    done = cgcompile.pull(url, out, replace=force)
    _tell_transfer(done.place, bundle_bytes(done.manifest), done.moved, as_json)


def _tell_transfer(place: str, total: int, moved: int, as_json: bool) -> None:
    if as_json:
        write_json({"path": place, "bytes": total, "moved": moved})
    else:
        say(f"{place}: {size(total)}, {size(moved)} of it travelled now")
        typer.echo(place)
