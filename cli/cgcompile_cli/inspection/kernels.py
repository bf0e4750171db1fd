"""`inspect --kernels`: the kernels of a cuda bundle by number of launches and image size, and how each was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cgbundle.errors import BundleError
from cgbundle.format import archive, limits
from cgbundle.format.file_names import all_programs
from cgbundle.format.table import Table as Recording
from cgbundle.format.variants import variant_name

from ..output import safe, size

if TYPE_CHECKING:
    from rich.table import Table

    from cgbundle.format.schema import Manifest

CHOICES = "kernels.json"
"""The file with the configurations that the compiler chose for kernels."""


class KernelLaunches(NamedTuple):
    """A kernel of an image: launches per call summed over all int_keys, bytes of its image, and its configuration as text."""

    symbol: str
    image: str
    launches: int
    image_bytes: int
    configuration: str
    chosen: str


def kernels(path: str, manifest: Manifest) -> list[KernelLaunches]:
    """Returns all kernels, sorted by launches, then by image size.  Raises file-damaged, table-invalid."""
    files = {file.path: file for file in manifest.files}
    launches: dict[tuple[str, str], int] = {}
    for step in [step for program in all_programs(manifest) for step in program.steps if step.kind == "graph"]:
        recording = Recording(archive.read(path, files[step.file]), step.file)
        for function in recording.function:
            key = (recording.images[function], recording.symbols[function])
            if f"kernels/{key[0]}" not in files:
                raise BundleError("table-invalid", f"{step.file}: kernel image {key[0]} is not in the bundle")
            launches[key] = launches.get(key, 0) + 1
    choices = _choices(path, files, f"graphs/{variant_name(manifest.target)}/{CHOICES}")
    rows = []
    for (image, symbol), count in launches.items():
        configuration, chosen = choices.get((image, symbol), ("", ""))
        rows.append(KernelLaunches(symbol, image, count, files[f"kernels/{image}"].bytes, configuration, chosen))
    return sorted(rows, key=lambda row: (-row.launches, -row.image_bytes, row.symbol, row.image))


def kernel_table(rows: list[KernelLaunches]) -> Table:
    """Makes a row per kernel.  The configuration is on a second line, because a name may fill the first."""
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("launches", "image"):
        rich_table.add_column(head, justify="right", no_wrap=True)
    rich_table.add_column("sha256", no_wrap=True)
    rich_table.add_column("kernel" + (", configuration (chosen by)" if any(row.chosen for row in rows) else ""), overflow="fold")
    for row in rows:
        name = Text(safe(row.symbol))
        if row.configuration or row.chosen:
            name.append(f"\n{safe(row.configuration)} ({safe(row.chosen)})", style="dim")
        rich_table.add_row(str(row.launches), size(row.image_bytes), row.image[:12], name)
    return rich_table


def _choices(path: str, files: dict[str, Any], variant_file: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Reads the configurations.  `variant_file`: the file's name in a bundle with several variants."""
    name = next((name for name in (CHOICES, variant_file) if name in files), None)
    if name is None:
        return {}
    data = archive.read(path, files[name])
    try:
        rows = limits.parse(data)
        return {(str(row["image"]), str(row["symbol"])): (str(row["configuration"]), str(row["chosen"])) for row in rows}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError("file-damaged", f"{name}: not a list of kernels and their configurations") from error
