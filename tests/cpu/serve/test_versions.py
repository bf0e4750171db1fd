"""bundles/cgserve/models/version.py: how the first version of a model is tested."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers"):
    pytest.importorskip(package, reason="pip install '.[serve]'")

from cgbundle.format.archive import read_manifest  # noqa: E402
from cgbundle.format.schema import Manifest, Program  # noqa: E402
from cgserve.models.model import Model  # noqa: E402
from cgserve.models.options import Options  # noqa: E402
from cgserve.models.version import Version, Watch, first_keys  # noqa: E402


def test_a_new_version_is_opened_with_the_one_before(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new version reuses the tokenizer of the previous one and keeps no reference to it."""
    opened, event_names = list[tuple[int, int | None]](), list[str]()
    real = Version.open

    async def recorded(self: Version, path: Path, options: Options, watch: Watch, before: Version | None) -> None:
        opened.append((self.number, before and before.number))
        await real(self, path, options, watch, before)
        assert before is None or before not in vars(self).values()

    monkeypatch.setattr(Version, "open", recorded)

    async def run() -> None:
        model = Model("tiny", Options(), Watch())
        for number in (1, 2, 3):
            await model.refresh({number: (bundle, ())}, lambda event: event_names.append(str(event["event"])))
        await model.close()

    asyncio.run(run())
    assert (opened, event_names) == ([(1, None), (2, 1), (3, 2)], ["serving"] * 3)


KEYS = ((1, 8), (1, 64), (2, 8), (2, 64), (8, 8), (8, 64))


def of_programs(bundle: Path, programs: list[Program]) -> Manifest:
    manifest = read_manifest(str(bundle))
    return replace(manifest, entries=(replace(manifest.entries[0], programs=tuple(programs)),))


def test_one_code_for_all_sizes_is_examined_at_the_smallest_and_the_largest(bundle: Path) -> None:
    (program, *_) = read_manifest(str(bundle)).entries[0].programs
    assert sorted(first_keys(of_programs(bundle, [replace(program, key=key) for key in KEYS]))) == [(1, 8), (8, 64)]
    assert first_keys(of_programs(bundle, [replace(program, key=(3,))])) == [(3,)]


def test_every_graph_is_examined(bundle: Path) -> None:
    (program, *_) = read_manifest(str(bundle)).entries[0].programs
    graphs = [replace(program, key=key, steps=(replace(program.steps[0], kind="graph", file=f"graphs/{key}"),)) for key in KEYS]
    assert sorted(first_keys(of_programs(bundle, graphs))) == sorted(KEYS)
