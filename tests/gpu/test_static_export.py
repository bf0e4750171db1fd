"""Captured models that are exported once per size: recorded sizes give right results, and so do sizes that are padded."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from torch import nn  # noqa: E402

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.format import archive, file_names  # noqa: E402


class Branching(nn.Module):
    """Python branches on the batch size; with `state` it counts only calls of large batches."""

    def __init__(self, state: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 6)
        self.register_buffer("large", torch.zeros(1))
        self.state = state

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed = torch.einsum("bi,bij->bj", x, self.experts[x.argmax(-1) % 4])
        if x.shape[0] <= 4:
            return routed * torch.tensor(0.5), self.large + 0
        if self.state:
            self.large.add_(1)
        return torch.tanh(self.linear(routed)), self.large + 0


class Statistic(nn.Module):
    """An order statistic whose rank Python computes from a size: every size has its own program with the same operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(dim=1).values[:, int(x.shape[1] * 0.5)] * (1.0 + 0.0 * int(x.shape[0]))


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 32),)


def grid(batch: int, seq: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, seq, 8),)


@pytest.mark.parametrize("recorder", ["capture", "cross-compile"])
def test_a_branch_on_the_batch_size(recorder: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Branching(state=recorder == "capture").eval()
    path = cgcompile.build(network, rows, sizes=[1, 3, 8], out=tmp_path / "b.cgb", target="cuda", record=recorder).path
    manifest = archive.read_manifest(str(path))
    assert file_names.per_size(manifest, manifest.entries[0]) and {file.path for file in manifest.files} >= {
        f"programs/{n}.pt2" for n in (1, 3, 8)
    }
    network = network.to("cpu")
    with cgbundle.load(path) as program, torch.no_grad():
        for turn, batch in enumerate([8, 1, 3, 8, 1, 8]):
            torch.manual_seed(turn)
            (x,) = rows(batch)
            for got, want in zip(program(x), network(x), strict=True):
                torch.testing.assert_close(torch.as_tensor(got).cpu(), want, rtol=2e-3, atol=2e-3)


def test_two_dimensions_with_padding_and_chunks(tmp_path: Path) -> None:
    sizes = {"batch": (1, 4), "seq": (4, 6)}
    path = cgcompile.build(
        Statistic(), grid, sizes=sizes, out=tmp_path / "s.cgb", target="cuda", record="capture", lower="eager"
    ).path
    manifest = archive.read_manifest(str(path))
    assert file_names.per_size(manifest, manifest.entries[0])
    with cgbundle.load(path) as program:
        for batch, seq in [(1, 4), (4, 6), (1, 6), (4, 4), (3, 4), (2, 6), (7, 4), (9, 6)]:
            (x,) = grid(batch, seq)
            torch.testing.assert_close(torch.as_tensor(program(x)).cpu(), Statistic()(x), rtol=1e-5, atol=1e-5)


def test_operations_on_the_host_at_some_sizes_only(tmp_path: Path) -> None:
    class Reading(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x @ x.T).relu().exp().sin().cos().sum(1)
            if x.shape[0] > 4:
                y = (y * y.sum().item()).exp().tanh().sin().cos().relu()
            return y

    path = cgcompile.build(
        Reading(), rows, sizes=[2, 8], out=tmp_path / "h.cgb", target="cuda", record="capture", lower="eager"
    ).path
    with cgbundle.load(path) as program:
        for batch in (2, 8, 2, 8):
            (x,) = rows(batch)
            torch.testing.assert_close(torch.as_tensor(program(x)).cpu(), Reading()(x), rtol=1e-3, atol=1e-3)
