"""Bundles of one model as a repository of the Hugging Face Hub: a model card, and a folder for each machine's bundle.

    README.md                                   the card: metadata that the Hub shows, and how to load a bundle
    build/cgbundle1-cu130-sm_90-linux/          a bundle, for GPUs of that architecture and drivers from that version on
    build/cgbundle1-cpu-x86_64-linux/           a bundle for CPUs

Folders are named as those of the Hub's kernels (huggingface.co/docs/kernels, Build variants): format and version, CPU or CUDA
version, architecture, operating system.  `huggingface_hub` uploads and downloads such a folder, and a bundle is loaded from its
cache.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from cgbundle.format.archive import Archive
from cgbundle.format.file_names import MANIFEST, SIGNATURE
from cgbundle.format.schema import Manifest
from cgbundle.validate.bundle import check_bundle

from ..errors import BuildError
from ..pipeline.destination import check_free, link

CARD, VARIANTS = "README.md", "build"


def model_repository(
    bundles: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, base_model: str = "", license: str = ""
) -> Path:
    """Writes `bundles`, paths of bundles of one model, as a repository at `out`, atomically.  Returns its path.  Files are hard
    links if possible.

    `base_model` is the name of the original model on the Hub, `license` a license identifier as the Hub uses it.  Both are in the
    model card.  Upload the repository with `huggingface_hub.upload_folder(repo_id=..., folder_path=out)`.  Raises output-exists,
    output-unwritable, and the errors of `cgbundle.load` with check="full".  Two bundles for the same kind of machine also raise
    output-exists.
    """
    place = Path(out)
    check_free(place, False)
    by_variant: dict[str, tuple[Path, Manifest]] = {}
    for path in map(Path, bundles):
        opened = Archive(os.fspath(path))
        check_bundle(opened, "full")
        name = variant(opened.manifest)
        if name in by_variant:
            raise BuildError(
                "output-exists",
                f"{path} and {by_variant[name][0]} are both for {name}",
                "give only one bundle for each kind of machine",
            )
        by_variant[name] = path, opened.manifest
    stage = place.absolute().parent / f".{place.name}.{uuid4().hex}.part"
    try:
        for name, (path, manifest) in by_variant.items():
            _copy(path, manifest, stage / VARIANTS / name)
        manifests = {name: manifest for name, (_, manifest) in by_variant.items()}
        (stage / CARD).write_text(card(manifests, base_model=base_model, license=license), encoding="utf-8")
        stage.rename(place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return place


def variant(manifest: Manifest) -> str:
    """Returns the name of a bundle's folder: `cgbundle1-cu130-sm_90-linux`, `cgbundle1-cpu-x86_64-linux`; with a processor level,
    `cgbundle1-cpu-x86-64-v3-linux`."""
    target = manifest.target
    backend = "cpu" if target.kind == "cpu" else f"cu{target.driver // 1000}{target.driver % 1000 // 10}"
    return f"cgbundle{manifest.version}-{backend}-{target.level or target.arch}-linux"


def card(manifests: dict[str, Manifest], *, base_model: str = "", license: str = "") -> str:
    """Returns the text of README.md: YAML metadata, inputs and outputs, the folders, and how to load a bundle."""
    first = next(iter(manifests.values()))
    metadata: dict[str, object] = {"library_name": "cgbundle", "tags": ["cgbundle", "ahead-of-time", *_targets(manifests)]}
    metadata |= {"license": license} if license else {}
    metadata |= {"base_model": base_model} if base_model else {}
    lines = ["---", *[f"{key}: {json.dumps(value)}" for key, value in metadata.items()], "---", "", f"# {first.name}", ""]
    lines += [
        "Compiled ahead of time by cgcompile; the runtime, `cgbundle`, loads it without PyTorch.",
        "",
        "| | name | dtype | shape |",
    ]
    lines += ["|---|---|---|---|"]
    entry = first.entries[0]
    for side, specs in (("input", entry.inputs), ("output", entry.outputs)):
        lines += [f"| {side} | {spec.name} | {spec.dtype} | {list(map(_size, spec.shape))} |" for spec in specs]
    lines += ["", "| folder | sizes | bytes |", "|---|---|---|"]
    for name, manifest in manifests.items():
        sizes = (
            ", ".join([f"{dimension.name}: {', '.join(map(str, dimension.sizes))}" for dimension in manifest.entries[0].dimensions])
            or "fixed"
        )
        lines.append(f"| {VARIANTS}/{name} | {sizes} | {sum(file.bytes for file in manifest.files):,} |")
    name = next(iter(manifests))
    lines += [
        "", "```python", "import cgbundle", "from huggingface_hub import snapshot_download", "",
        f'folder = snapshot_download("OWNER/NAME", allow_patterns="{VARIANTS}/{name}/*")',
        f'program = cgbundle.load(f"{{folder}}/{VARIANTS}/{name}")', "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _targets(manifests: dict[str, Manifest]) -> list[str]:
    return list(dict.fromkeys([manifest.target.arch for manifest in manifests.values()]))


def _size(size: object) -> str:
    return str(size) if isinstance(size, int | str) else "..."


def _copy(bundle: Path, manifest: Manifest, place: Path) -> None:
    names = [file.path for file in manifest.files] + [MANIFEST, *([SIGNATURE] if (bundle / SIGNATURE).exists() else [])]
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        link((bundle / name).resolve(), place / name)
