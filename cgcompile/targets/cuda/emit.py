"""The stage emit for a GPU: converts recordings into the files of the bundle and the rows of the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cgbundle.format.schema import KERNEL_CODE, IntKey, Program, Region, Target, Weight
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Recording

from ...bundle.single_region import WHOLE, whole_program, whole_region
from ..build_spec import key_label, own_key
from ..kernels.fills import fill_image, has_memsets, without_memsets
from ..memory_layout import PAD
from .host_regions import HostRegions, SplitProgram, split_rows
from .recorded import RecordedProgram, RegionKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The manifest's rows, and the `recordings` by file name.  `fills`: whether memsets became kernel launches (fills.py)."""

    weights: tuple[Weight, ...]
    regions: tuple[Region, ...]
    programs: tuple[Program, ...]
    memories: tuple[tuple[str, int], ...]
    recordings: Mapping[str, Recording]
    fills: bool


def write_recorded(
    stage: Path,
    recorded: RecordedProgram,
    weights: tuple[Weight, ...],
    arch: str,
    split: SplitProgram | None,
    hosts: HostRegions,
) -> Written:
    """Writes kernel images and graph tables into `stage`.  `weights`: the manifest's rows, whose file exists already.  `arch`: such
    as "sm_90".  Raises extra-missing, kernel-failed."""
    recordings = {name: replace(graph.recording, key=own_key(name[1])) for name, graph in recorded.graphs.items()}
    images = dict(recorded.images)
    fills = has_memsets(recordings.values())
    if fills:
        image = fill_image(arch)
        images[hashlib.sha256(image).hexdigest()] = image
        recordings = {name: without_memsets(recording, image) for name, recording in recordings.items()}
    write_kernels(stage, images)
    files = _write_tables(stage, recordings)
    arena = arena_bytes(recorded)
    if split is None:
        regions: tuple[Region, ...] = (whole_region("graph"),)
        programs = tuple([_whole(recorded, key, files[WHOLE, key]) for key in recorded.static])
        host_bytes = 0
    else:
        regions, programs, host_bytes = split_rows(split, hosts, recorded, files, arena)
    return Written(
        weights=weights,
        regions=regions,
        programs=programs,
        memories=(
            ("weights", recorded.weights_bytes),
            *((("state", recorded.state_bytes),) if recorded.state_bytes else ()),
            ("inputs", max(recorded.static.values())),
            ("arena", max(arena.values())),
            *((("host", host_bytes),) if host_bytes else ()),
            (KERNEL_CODE, sum(len(image) for image in images.values())),
        ),
        recordings={files[name]: recording for name, recording in recordings.items()},
        fills=fills,
    )


def arena_bytes(recorded: RecordedProgram) -> dict[IntKey, int]:
    """Returns the bytes of memory `arena` that each int_key needs."""
    return {
        key: max([graph.arena for (_, other), graph in recorded.graphs.items() if other == key], default=PAD)
        for key in recorded.static
    }


def cuda_target(arch: str, driver: int, hosts: HostRegions, torch_version: str) -> Target:
    """Returns the bundle's requirements: a GPU of `arch`, a driver (13000 = 13.0), and for host regions a processor and torch."""
    return Target(
        kind="cuda", arch=arch, level="", features=hosts.features, torch=torch_version if hosts.rows else "", driver=driver
    )


def _whole(recorded: RecordedProgram, key: IntKey, file: str) -> Program:
    graph = recorded.graphs[WHOLE, key]
    return whole_program("graph", own_key(key), graph.inputs, graph.outputs, file, graph.arena, recorded.static[key])


def write_kernels(stage: Path, images: Mapping[str, bytes]) -> None:
    """Writes each image to kernels/<sha256>."""
    (stage / "kernels").mkdir()
    for name, image in images.items():
        assert hashlib.sha256(image).hexdigest() == name, name
        (stage / "kernels" / name).write_bytes(image)


def _write_tables(stage: Path, recordings: Mapping[RegionKey, Recording]) -> dict[RegionKey, str]:
    """Writes graphs/<region>-<key>.bin for every region and int_key, and returns their paths in the bundle."""
    (stage / "graphs").mkdir()
    files = {}
    for (region, key), recording in recordings.items():
        file = files[region, key] = f"graphs/{region}-{key_label(key) or 'fixed'}.bin"
        (stage / file).write_bytes(tables.encode(recording))
    return files
