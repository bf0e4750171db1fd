"""The rule about collectives, with a process group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from cgbundle.format.schema import Finding
from cgcompile.checks import check
from tests.cpu.checks.test_checks import exported


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def unknown_collectives(forward: Callable[..., Any], target: str = "cuda") -> list[Finding]:
    return [finding for finding in check(exported(forward), target).findings if finding.rule == "unknown-collective"]


def test_collectives_over_all_ranks_are_fine(group: Any) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gathered = collectives.all_gather_tensor(collectives.all_reduce(x, "sum", group), 0, group)
        return collectives.broadcast(gathered, 0, group) + 1

    assert unknown_collectives(forward) == []
    (on_cpu, *_) = unknown_collectives(forward, "cpu")
    assert on_cpu.message == "all_reduce: the ranks of a model are GPUs"


def test_others_are_refused_with_the_line(group: Any) -> None:
    part = dist.new_group([0])
    cases: dict[str, Callable[..., Any]] = {
        "all_reduce: 'max' is no sum": lambda self, x: collectives.all_reduce(x, "max", group) + 1,
        "all_reduce: a sum of int64": lambda self, x: collectives.all_reduce(x.long(), "sum", group) + 1,
        "all_reduce: its process group is not group.WORLD": lambda self, x: collectives.all_reduce(x, "sum", part) + 1,
        "all_reduce_coalesced: cgcompile has no kernel for it": lambda self, x: (
            collectives.all_reduce_coalesced([x], "sum", group)[0] + 1
        ),
    }
    for message, forward in cases.items():
        (one,) = unknown_collectives(forward)
        assert one.severity == "refuse" and one.message == message
        assert one.where.startswith("tests/cpu/checks/test_collectives.py:")
