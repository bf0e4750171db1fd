"""`cgcompile cache`: where builds keep results for the next one, how much that is, and away with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..output import count, say, size, write_json

if TYPE_CHECKING:
    from cgcompile.util.content_cache import Kept

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


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
