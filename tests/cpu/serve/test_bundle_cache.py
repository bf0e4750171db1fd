"""bundles/cgserve/models/bundle_cache.py: models are loaded on request and evicted when memory is needed."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cgbundle
from cgbundle.format import archive, file_names
from cgbundle.loader import open_program
from cgbundle.program.replicas import Replicas

pytest.importorskip("prometheus_client", reason="pip install '.[serve]'")

from cgserve.models.options import Refused

ROW = struct.pack("<6f", 1.0, -2.0, 0.5, 3.0, 0.0, -1.0)


@pytest.fixture(scope="module")
def caching() -> ModuleType:
    return importlib.import_module("cgserve.models.bundle_cache")


@pytest.fixture
def folder(bundle: Path, tmp_path: Path) -> Path:
    """Returns a folder with three models, one version each."""
    for name in ("a", "b", "c"):
        shutil.copytree(bundle, tmp_path / "models" / name / "1" / "model.cgb")
    return tmp_path / "models"


@pytest.fixture
def size(bundle: Path) -> int:
    """Returns the bytes of one model."""
    return sum(dict(archive.read_manifest(str(bundle)).memories).values())


def used(caching: ModuleType, folder: Path, limit: int, session: Callable[[Any], Awaitable[Any]], poll: float = 0.0) -> list[Any]:
    """Returns the events that were reported while `session(cache)` ran."""
    events: list[Any] = []

    async def run() -> None:
        cache = caching.BundleCache(folder, limit, caching.Options(wait=0.0), poll, events.append)
        try:
            await asyncio.wait_for(session(cache), 60)
        finally:
            await cache.close()

    asyncio.run(run())
    return events


async def asked(cache: Any, name: str) -> int:
    """Returns the version of a model that answered a request, after a check of the answer."""
    version = await cache.version(name)
    tensor_class = importlib.import_module("cgserve.tensors.inference_protocol").TensorData
    [answer] = await version.answer((tensor_class((1, 6), ROW),), 30.0)
    assert answer.shape == (1, 3) and len(answer.data) == 12
    return int(version.number)


def test_what_was_asked_for_longest_ago_goes_first(caching: ModuleType, folder: Path, size: int) -> None:
    async def session(cache: Any) -> None:
        for name, left in (("a", ["a"]), ("b", ["a", "b"]), ("a", ["b", "a"]), ("c", ["a", "c"]), ("b", ["c", "b"])):
            assert await asked(cache, name) == 1
            assert list(cache.loaded) == left

    events = used(caching, folder, 2 * size, session, poll=3600)
    assert [(event["model"], event["for"]) for event in events if event["event"] == "evicted"] == [("b", "c"), ("a", "b")]


def test_a_copy_on_every_device(
    caching: ModuleType, bundle: Path, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU replaces two GPUs: both replicas are tested, and calls alternate between them."""
    asked_for, called = [], []

    def load(path: str, *, devices: tuple[int, ...], replicas: bool) -> Replicas:
        asked_for.append((devices, replicas))
        copies = Replicas([open_program(path) for _ in devices])
        for number, program in enumerate(copies.programs):
            replay = program.replay
            monkeypatch.setattr(program, "replay", lambda tensors, n=number, r=replay: (called.append(n), r(tensors))[1])
        return copies

    monkeypatch.setattr(cgbundle, "load", load)

    async def run() -> None:
        options = caching.Options(wait=0.0, devices=(0, 1))
        cache = caching.BundleCache(folder, size, options, 3600, lambda event: None)
        try:
            for _ in range(6):
                assert await asked(cache, "a") == 1
        finally:
            await cache.close()

    asyncio.run(run())
    assert asked_for == [((0, 1), True)]
    self_test = len(archive.read_manifest(str(bundle)).entries[0].programs)
    assert called[: 2 * self_test] == [0] * self_test + [1] * self_test and sorted(called[2 * self_test :]) == [0] * 3 + [1] * 3


def test_requests_that_run_are_answered_by_a_model_that_goes(caching: ModuleType, folder: Path, size: int) -> None:
    async def session(cache: Any) -> None:
        names = [name for _ in range(20) for name in ("a", "b", "c")]
        assert await asyncio.gather(*[asked(cache, name) for name in names]) == [1] * 60

    events = used(caching, folder, size, session, poll=3600)
    assert {event["event"] for event in events} == {"serving", "evicted"}


def test_a_model_is_loaded_once_for_all_who_ask(caching: ModuleType, folder: Path, size: int) -> None:
    async def session(cache: Any) -> None:
        await asyncio.gather(*[asked(cache, "a") for _ in range(10)])

    assert [event["event"] for event in used(caching, folder, size, session)] == ["serving"]


def test_models_that_cannot_be_loaded(caching: ModuleType, folder: Path, size: int) -> None:
    (folder / "b" / "1" / "model.cgb" / file_names.PROGRAM).write_bytes(b"damaged")

    async def session(cache: Any) -> None:
        with pytest.raises(KeyError):
            await cache.version("other")
        with pytest.raises(Refused, match="no version of 'b' can be served: program.pt2"):
            await cache.version("b")
        assert await asked(cache, "a") == 1

    used(caching, folder, 2 * size, session)


def test_a_new_version_is_found_while_requests_come(caching: ModuleType, folder: Path, size: int) -> None:
    async def session(cache: Any) -> None:
        assert await asked(cache, "a") == 1
        shutil.copytree(folder / "b" / "1", folder / "made")
        (folder / "made").rename(folder / "a" / "2")
        while await asked(cache, "a") == 1:
            await asyncio.sleep(0.02)
        shutil.rmtree(folder / "a")
        with pytest.raises(KeyError):
            while True:
                await asked(cache, "a")
                await asyncio.sleep(0.02)
        assert cache.loaded == {}

    used(caching, folder, 2 * size, session)


def test_a_model_that_cannot_be_served_costs_no_other_its_place(caching: ModuleType, folder: Path, size: int) -> None:
    """The refused model is not read again until one of its files changes."""
    program = folder / "b" / "1" / "model.cgb" / file_names.PROGRAM
    right = program.read_bytes()
    program.write_bytes(b"damaged")

    async def session(cache: Any) -> None:
        assert await asked(cache, "a") == 1
        for _ in range(3):
            with pytest.raises(Refused, match="no version of 'b' can be served"):
                await cache.version("b")
            assert cache.loaded == {"a": 1}
        program.write_bytes(right)
        assert await asked(cache, "b") == 1
        assert cache.loaded == {"b": 1}

    event_names = [event["event"] for event in used(caching, folder, size, session, poll=3600)]
    assert event_names == ["serving", "refused", "serving", "evicted"]
