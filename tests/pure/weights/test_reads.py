"""Weights are read from the page cache or from the disk. A file larger than half of the memory is read directly from the disk,
without the cache."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.cuda import upload
from cgbundle.cuda.upload import ALIGNMENT, WeightReader, is_cached
from tests.helpers.raising import raises

BYTES = 5 * ALIGNMENT + 123
DATA = os.urandom(BYTES)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("reads") / "weights"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    yield descriptor
    os.close(descriptor)


def room(size: int = 8 * ALIGNMENT) -> memoryview:
    """Returns memory that begins at a page boundary."""
    return memoryview(mmap.mmap(-1, size))


def large(monkeypatch: pytest.MonkeyPatch, *, cached: bool) -> None:
    """Makes the machine's memory smaller than twice the file."""
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    monkeypatch.setattr(upload, "is_cached", lambda file: cached)


class Calls:
    """Logs calls of `os.preadv` and `os.posix_fadvise`. `refused` gives kinds of reads that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: dict[str, int] | None = None) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.advice: list[tuple[int, int, int]] = []
        self.refused = refused or {}
        self._preadv = os.preadv
        monkeypatch.setattr("os.preadv", self.preadv)
        monkeypatch.setattr("os.posix_fadvise", lambda _, begin, size, advice: self.advice.append((begin, size, advice)))

    def preadv(self, descriptor: int, views: list[Any], at: int, flags: int = 0) -> int:
        direct = os.readlink(f"/proc/self/fd/{descriptor}") and os.O_DIRECT & flags_of(descriptor)
        kind = "direct" if direct else "near" if flags else "plain"
        self.reads.append((kind, at, len(views[0])))
        if kind in self.refused:
            raise OSError(self.refused[kind], "refused")
        return self._preadv(descriptor, views, at, flags)


def flags_of(descriptor: int) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}") as info:
        return int(next(line for line in info if line.startswith("flags:")).split()[1], 8)


@given(begin=st.integers(0, BYTES - 1), data=st.data(), direct=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_place_is_read_whole(file: int, begin: int, data: st.DataObject, direct: bool) -> None:
    size = data.draw(st.integers(1, BYTES - begin))
    with pytest.MonkeyPatch.context() as patch:
        if direct:
            large(patch, cached=False)
        reader, view = WeightReader(file, aligned=True), room()
        lead = reader.read(view, begin, size)
        reader.close()
    assert bytes(view[lead : lead + size]) == DATA[begin : begin + size]
    assert lead == (begin % ALIGNMENT if direct and reader_is_direct(file) else 0)


def reader_is_direct(file: int) -> bool:
    """Returns whether the file system supports reads without the page cache."""
    try:
        other = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
        os.preadv(other, [room()], 0)
    except OSError:
        return False
    os.close(other)
    return True


def test_what_the_page_cache_has_is_read_once_and_not_announced(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    reader = WeightReader(file, aligned=True)
    reader.read(room(), 10, 5000)
    assert calls.reads == [("near", 10, 5000)] and not calls.advice and not reader.cold


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_what_it_has_not_is_waited_for_and_from_then_on_all_is(file: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, {"near": number})
    reader, view = WeightReader(file, aligned=True), room()
    for begin in (10, 6000):
        reader.read(view, begin, 5000)
        assert bytes(view[:5000]) == DATA[begin : begin + 5000] and reader.cold
    assert [kind for kind, *_ in calls.reads] == ["near", "plain", "plain"]


def test_what_is_announced_is_cut(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    monkeypatch.setattr(upload, "STEP", 100)
    WeightReader(file, aligned=True).announce([(50, 250), (1000, 30)])
    wanted = [(50, 100), (150, 100), (250, 50), (1000, 30)]
    assert calls.advice == [(*span, os.POSIX_FADV_WILLNEED) for span in wanted]


def test_a_large_file_is_read_around_the_cache(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reader_is_direct(file):
        pytest.skip("this file system has no O_DIRECT")
    large(monkeypatch, cached=False)
    calls = Calls(monkeypatch)
    reader = WeightReader(file, aligned=True)
    assert reader.read(room(), ALIGNMENT + 10, 100) == 10
    reader.announce([(0, 100)])
    reader.close()
    reader.close()
    assert calls.reads == [("direct", ALIGNMENT, ALIGNMENT)] and not calls.advice


@pytest.mark.parametrize("why", ["small buffers", "cannot read so", "cannot open so"])
def test_where_that_cannot_be_its_pages_go_behind_the_reading(file: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch, cached=False)
    calls = Calls(monkeypatch, {"direct": errno.EINVAL} if why == "cannot read so" else None)
    if why == "cannot open so":

        def refuse(*_: object) -> int:
            raise OSError(errno.EINVAL, "no O_DIRECT")

        monkeypatch.setattr(upload, "_reopened", refuse)
    reader, view = WeightReader(file, aligned=why != "small buffers"), room()
    for begin in (0, 4000):
        assert reader.read(view, begin, 4000) == 0
        assert bytes(view[:4000]) == DATA[begin : begin + 4000]
    reader.close()
    assert calls.advice == [(begin, 4000, os.POSIX_FADV_DONTNEED) for begin in (0, 4000)]


def test_other_errors_of_the_disk_are_not_hidden(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reader_is_direct(file):
        pytest.skip("this file system has no O_DIRECT")
    large(monkeypatch, cached=False)
    Calls(monkeypatch, {"direct": errno.EIO})
    reader = WeightReader(file, aligned=True)
    with pytest.raises(OSError, match="refused"):
        reader.read(room(), 0, 100)
    reader.close()


def test_a_large_file_in_the_cache_stays_there(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch, cached=True)
    calls = Calls(monkeypatch)
    WeightReader(file, aligned=True).read(room(), 0, 4000)
    assert calls.reads == [("near", 0, 4000)] and not calls.advice


def test_the_page_cache_is_looked_at(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(file, BYTES, 0)
    assert is_cached(file)
    for number, wanted in ((errno.EAGAIN, False), (errno.EOPNOTSUPP, False)):
        with pytest.MonkeyPatch.context() as patch:
            Calls(patch, {"near": number})
            assert is_cached(file) is wanted


def test_a_check_does_not_cache_the_file(tmp_path: Path) -> None:
    """After reads without the cache, the file is not cached, so the next process reads it in the same way."""
    (tmp_path / "large").write_bytes(bytes(16 << 20))
    descriptor = os.open(tmp_path / "large", os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(descriptor):
            pytest.skip("this file system keeps all of its files in memory")
        assert not any([is_cached(descriptor) for _ in range(5)])
    finally:
        os.close(descriptor)


def test_a_file_that_ends_too_early_is_named(file: int) -> None:
    with raises("weights-invalid", match="ends too early"):
        WeightReader(file, aligned=True).read(room(), BYTES - 10, 20)
