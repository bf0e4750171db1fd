"""Models with several regions on a GPU: graphs with host regions between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bundles.archives import ArchiveOf

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgbundle.cuda import memory  # noqa: E402
from cgbundle.errors import CgbundleError  # noqa: E402
from cgbundle.format import archive, file_names  # noqa: E402
from cgbundle.format.safetensors_files import Mapped  # noqa: E402
from cgbundle.format.schema import Program  # noqa: E402
from cgbundle.format.shapes import span  # noqa: E402
from cgbundle.gpu.backend import CudaBackend  # noqa: E402
from tests.gpu.helpers.cut_models import KINDS, MODELS, WIDTH  # noqa: E402
from tests.helpers.drivers.cuda_calls import synchronize  # noqa: E402

SIZES = (1, 8)
POISON = 0xFF
"""NaN in every floating-point dtype."""

Case = tuple[Path, Any]


@pytest.fixture(scope="module", params=sorted(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    torch.manual_seed(0)
    network = MODELS[request.param]().eval()
    path = tmp_path_factory.mktemp("cuts") / f"{request.param}.cgb"
    cgcompile.build(network, lambda batch: (torch.randn(batch, WIDTH),), sizes=list(SIZES), out=path, target="cuda")
    yield path, network


def draw(size: int, seed: int) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.randn(size, WIDTH)


def outputs(result: Any) -> list[torch.Tensor]:
    return [getattr(output, "tensor", output) for output in (result if isinstance(result, tuple) else (result,))]


def test_the_steps_are_as_planned(case: Case) -> None:
    path, _ = case
    manifest = archive.read_manifest(str(path))
    for program in manifest.entries[0].programs:
        assert [step.kind for step in program.steps if step.kind != "copy"] == KINDS[path.stem]
    if path.stem == "table":
        table = next(weight for weight in manifest.weights if weight.name == "table")
        assert table.memory == "host" and dict(manifest.memories)["weights"] < 5000 * WIDTH * 4, "the table stays off the GPU"


def test_the_self_test_passes_in_a_process_without_torch(case: Case) -> None:
    answer = self_test.fresh(str(case[0]))
    assert [row["passed"] for row in answer["results"]] == [True] * len(SIZES) and not answer["torch_imported"]


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fresh_inputs_give_what_eager_gives(case: Case, mode: str, device: str) -> None:
    path, network = case
    with cgbundle.load(path, mode=mode) as program, torch.no_grad():
        for round_ in range(6):
            value = draw(SIZES[round_ % 2], round_)
            for got, want in zip(outputs(program(value.to(device))), outputs(network(value)), strict=True):
                assert got.device.type == device
                torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_many_calls_without_waiting_keep_their_values(case: Case) -> None:
    path, network = case
    values = [draw(8, seed) for seed in range(20)]
    with cgbundle.load(path) as program, torch.no_grad():
        results = [outputs(program(value.cuda())) for value in values]
        for got, value in zip(results, values, strict=True):
            for one, want in zip(got, outputs(network(value)), strict=True):
                torch.testing.assert_close(one.cpu(), want, rtol=1e-4, atol=1e-5)


def test_dead_memory_may_hold_anything(case: Case) -> None:
    """After every step the arena is overwritten, except values that a later step or the caller reads."""
    path, _ = case
    manifest = archive.read_manifest(str(path))
    backend = CudaBackend(ArchiveOf(path, manifest))
    stored = Mapped(str(path / file_names.SELF_TEST), file_names.SELF_TEST)
    try:
        for number, program in enumerate(manifest.entries[0].programs):
            tensors = self_test.inputs_of(stored, manifest.entries[0], program.key)  # keeps the memory of these addresses alive
            addresses = [tensor.address for tensor in tensors]
            clean = read(backend, program, number, addresses, poisoned=False)
            assert read(backend, program, number, addresses, poisoned=True) == clean
    finally:
        stored.close()
        backend.close()


def read(backend: CudaBackend, program: Program, number: int, addresses: Any, poisoned: bool) -> list[bytes]:
    """Returns the bytes of the outputs of one replay."""
    arena = dict(backend._manifest.memories)["arena"]
    with backend.locked(None) as stream:
        backend.run(number, addresses, None, stream)  # copies the inputs to their buffers
        bound = backend._bound[number]
        if poisoned:
            backend._memories.poison(POISON, stream)
        for place, step in enumerate(bound.steps):
            step(stream)
            if poisoned:
                for start, end in dead(program, place, arena):
                    memory.fill(backend._memories.address("arena", start), end - start, POISON, stream)
        buffers = []
        for index in program.outputs:
            value = program.values[index]
            room = bytearray(max(1, span(value)))
            held = (memory.ctypes.c_char * len(room)).from_buffer(room)
            memory.copy(
                memory.ctypes.addressof(held),
                backend._memories.address(value.memory, value.offset),
                span(value),
                stream,
                target_on_device=False,
            )
            buffers.append((room, held))
    synchronize(backend)
    return [bytes(room) for room, _ in buffers]


def dead(program: Program, place: int, arena: int) -> list[tuple[int, int]]:
    """Returns the ranges of the arena that neither a step after `place` nor the caller reads."""
    written = {index for step in program.steps[: place + 1] for index in step.outputs}
    later = written & ({index for step in program.steps[place + 1 :] for index in step.inputs} | set(program.outputs))
    alive = sorted(
        (value.offset, value.offset + span(value)) for index in later if (value := program.values[index]).memory == "arena"
    )
    pieces, at = [], 0
    for start, end in alive:
        if at < start:
            pieces.append((at, start))
        at = max(at, end)
    return [*pieces, (at, arena)] if at < arena else pieces


class OneWay(torch.nn.Module):
    """Fails for NaN, and for lengths that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        longest = int(lengths.max().item())
        return self.layer(x) * (torch.arange(longest, device=x.device) < lengths[:, None])


@pytest.mark.parametrize("record", ["capture", "cross-compile"])
def test_the_host_asserts_what_python_asks(record: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = OneWay().eval()
    built = cgcompile.build(
        model, lambda batch: (torch.randn(batch, WIDTH), torch.full((batch,), WIDTH)), sizes=list(SIZES), out=tmp_path / "x.cgb",
        target="cuda", record=record,
    )  # fmt: skip
    model.cuda()
    x, lengths = torch.randn(3, WIDTH, device="cuda"), torch.tensor([WIDTH, 2, 1], device="cuda")
    with cgbundle.load(built.path) as program, torch.no_grad():
        assert torch.allclose(program(x, lengths), model(x, lengths), rtol=2e-3, atol=2e-3)
        for bad in ((x / 0 * 0, lengths), (x, lengths - 1)):
            with pytest.raises(CgbundleError, match=r"test_cuts\.py:\d+: an assertion of the model failed: ") as caught:
                program(*bad)
            assert caught.value.code == "assertion-failed" and not capfd.readouterr().err
        assert torch.allclose(program(x, lengths), model(x, lengths), rtol=2e-3, atol=2e-3)
