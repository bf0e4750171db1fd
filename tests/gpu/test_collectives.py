"""cgcompile's collectives between two GPUs: right results, the same bits on both GPUs, launches in any order, and a rank that is
missing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)
if not torch.cuda.can_device_access_peer(0, 1):
    pytest.skip("the GPUs cannot write to each other's memory", allow_module_level=True)
pytest.importorskip("cuda.bindings")

from cgcompile.targets.collectives.exchange_memory import ExchangeMemory  # noqa: E402
from cgcompile.targets.collectives.kernels import PIECE, Combine, Way  # noqa: E402
from cgcompile.targets.collectives.launches import CollectiveLaunch, collective_launch  # noqa: E402
from tests.gpu.helpers.ranks import Collective, Ranks  # noqa: E402

WORLD = 2
SIZES = (16, 48, 8 << 10, 100_000, 512 << 10, (1 << 20) + 16, 4 << 20)
"""Bytes that one rank sends to the other."""

SPACE = 16 << 20


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks(ExchangeMemory(world=WORLD, packets=2 << 20, buffers=8 << 20))
    yield group
    assert group.status() == [0, 0]


@pytest.fixture(scope="module")
def places() -> list[tuple[Any, Any]]:
    """Returns memory for inputs and outputs on each GPU."""
    return [tuple(torch.zeros(SPACE, dtype=torch.uint8, device=f"cuda:{rank}") for _ in range(2)) for rank in range(WORLD)]


def fill(places: list[tuple[Any, Any]], size: int, dtype: Any, seed: int) -> list[Any]:
    """Fills the inputs with random numbers of a dtype. Returns copies on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size // dtype.itemsize, generator=generator).to(dtype) for _ in range(WORLD)]
    for (source, target), values in zip(places, drawn, strict=True):
        source[:size].view(dtype).copy_(values)
        target.fill_(0xA5)
    return drawn


def wanted(drawn: list[Any], combine: Combine, rank: int, *, scattered: bool, sender: int) -> Any:
    parts = [values.chunk(WORLD)[rank] if scattered else values for values in drawn]
    if combine == "side by side":
        return torch.cat([part for place, part in enumerate(parts) if sender in (-1, place)])
    return sum(part.float() for part in parts[1:]).add(parts[0].float()).to(parts[0].dtype)


@pytest.mark.parametrize("way", PIECE)
@pytest.mark.parametrize("combine", ["bfloat16", "float16", "float32", "side by side"])
@pytest.mark.parametrize("scattered", [False, True])
def test_results_of_collectives(ranks: Ranks, places: Any, way: Way, combine: Combine, scattered: bool) -> None:
    dtype = torch.int32 if combine == "side by side" else getattr(torch, combine)
    shapes = [(1, 2), (3, 64), (32, 256), (128, 512)]
    for number, (size, (blocks, threads)) in enumerate(product(SIZES, shapes)):
        if way == "packets" and size > ranks.layout.packets:
            continue
        sender = number % WORLD if way == "buffers" and combine == "side by side" and number % 3 == 0 else -1
        drawn = fill(places, size * (WORLD if scattered else 1), dtype, number)
        launch = CollectiveLaunch(way=way, count=size // PIECE[way], blocks=blocks, threads=threads)
        inputs, outputs = [[place[side].data_ptr() for place in places] for side in range(2)]
        ranks.replay(ranks.graph([Collective(launch, combine, inputs, outputs, size if scattered else 0, sender)]))
        for rank, (_, output) in enumerate(places):
            right = wanted(drawn, combine, rank, scattered=scattered, sender=sender)
            came = output[: right.numel() * dtype.itemsize].view(dtype).cpu()
            assert torch.equal(came, right), (size, blocks, threads, sender, rank)
            assert output[right.numel() * dtype.itemsize :][:64].eq(0xA5).all()


def test_random_sizes_in_replayed_graphs(ranks: Ranks, places: Any) -> None:
    random = Random(0)
    (inputs, outputs), size = [[place[side].data_ptr() for place in places] for side in range(2)], 0
    listed, sizes = [], []
    while True:
        chunk = 16 * random.randrange(1, random.choice((64, 4096, 40_000)))
        if size + chunk > SPACE:
            break
        listed.append(Collective(collective_launch(chunk), "bfloat16", [at + size for at in inputs], [at + size for at in outputs]))
        sizes.append(chunk)
        size += chunk
    graphs = ranks.graph(listed)
    for seed in range(20):
        drawn = fill(places, size, torch.bfloat16, seed)
        ranks.replay(graphs)
        right = wanted(drawn, "bfloat16", 0, scattered=False, sender=-1)
        for _, output in places:
            assert torch.equal(output[:size].view(torch.bfloat16).cpu(), right)
    assert len(sizes) > 30


@pytest.mark.parametrize("way", PIECE)
def test_a_rank_that_is_missing_is_named_and_nothing_hangs(places: Any, way: Way) -> None:
    group = Ranks(ExchangeMemory(world=WORLD, packets=1 << 20, buffers=1 << 20), limit=50_000_000)
    inputs, outputs = [[place[side].data_ptr() for place in places] for side in range(2)]
    launch = CollectiveLaunch(way=way, count=4096, blocks=16, threads=256)
    graphs = group.graph([Collective(launch, "float32", inputs, outputs)] * 50)
    assert group.replay(graphs) < 50 and group.status() == [0, 0]
    took = group.replay(graphs, ranks=[0])
    assert group.status() == [2, 0] and 45 < took < 500
