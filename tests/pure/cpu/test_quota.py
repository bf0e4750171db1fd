"""The number of threads and the memory that a container's quota allows, read from files in the kernel's format."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cgbundle.cpu.machine import NUMBER, memory_of_quota, threads_of_quota


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv(NUMBER, raising=False)


def machine(root: Path, groups: str, files: dict[str, str]) -> str:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("799999 100000", 7),
        ("800000 100000", None),
        ("max 100000", None),
    ],
)
def test_a_containers_quota(tmp_path: Path, quota: str, threads: int | None) -> None:
    assert threads_of_quota(machine(tmp_path, "0::/", {"cpu.max": quota})) == threads


def test_the_smallest_of_the_groups_above_holds(tmp_path: Path) -> None:
    files = {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "max 100000"}
    assert threads_of_quota(machine(tmp_path, "0::/a.slice/b", files)) == 3


def test_a_group_beside_the_containers_own_is_not_looked_for_above_it(tmp_path: Path) -> None:
    assert threads_of_quota(machine(tmp_path, "0::/../other", {"cpu.max": "400000 100000"})) == 4


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    files = {"cpu/docker/c/cpu.cfs_quota_us": "250000", "cpu/docker/c/cpu.cfs_period_us": "100000", "cpu/cpu.cfs_quota_us": "-1"}
    groups = "5:memory:/docker/c\n4:cpu,cpuacct:/docker/c\n0::/"
    assert threads_of_quota(machine(tmp_path, groups, files)) == 2


def test_no_quota(tmp_path: Path) -> None:
    assert threads_of_quota(str(tmp_path)) is None
    assert threads_of_quota(machine(tmp_path, "0::/\n", {"cpu.max": "nonsense"})) is None


def test_what_the_environment_says_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUMBER, "6")
    assert threads_of_quota(machine(tmp_path, "0::/", {"cpu.max": "200000 100000"})) is None


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [
        ("0::/", {"memory.max": "1000000"}, 1000000),
        ("0::/a/b", {"a/memory.max": "2000000", "a/b/memory.max": "max"}, 2000000),
        ("3:memory:/c\n0::/", {"memory/memory.limit_in_bytes": str(1 << 62), "memory/c/memory.limit_in_bytes": "3000000"}, 3000000),
        ("4:cpu:/c\n", {"cpu/c/memory.max": "1"}, None),
        ("", {}, None),
    ],
)
def test_a_containers_memory(tmp_path: Path, groups: str, files: dict[str, str], memory: int | None) -> None:
    machines = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_of_quota(machine(tmp_path, groups, files)) == (memory or machines)
