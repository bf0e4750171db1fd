"""Donated outputs of captured and cross-compiled bundles: results equal eager PyTorch, nothing donated is copied, and views stay
valid until the next call of their entry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.cuda import memory  # noqa: E402
from cgbundle.format import archive  # noqa: E402
from cgbundle.gpu import backend  # noqa: E402
from cgbundle.gpu import device_bundle as shared  # noqa: E402
from cgbundle.gpu import programs as binding  # noqa: E402
from tests.gpu.helpers.hidden import built_without_gpu  # noqa: E402
from tests.gpu.helpers.self_tests import passed  # noqa: E402
from tests.helpers.models.donation_models import (  # noqa: E402
    DONATIONS,
    ENTRIES,
    FEATURES,
    SIZES,
    WIDTH,
    check_donations,
    donated,
)
from tests.helpers.raising import raises  # noqa: E402


@pytest.fixture(scope="module", params=["capture", "cross-compile", "capture-eager", "without-gpu"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    record, lower = ("capture", "eager") if request.param == "capture-eager" else (request.param, "inductor")
    prove = "none" if record == "cross-compile" else "interpret"  # the tests replay this bundle instead
    path = tmp_path_factory.mktemp("donations") / f"{request.param}.cgb"
    if request.param == "without-gpu":
        return built_without_gpu("donations", "", path)
    return cgcompile.build(
        donated(),
        ENTRIES,
        sizes=SIZES,
        donations=DONATIONS,
        out=path,
        target="cuda",
        record=record,
        prove=prove,
        lower=lower,
    ).path


@pytest.fixture
def program(bundle: Path) -> Iterator[cgbundle.Program]:
    with cgbundle.load(bundle, outputs="view") as loaded:
        yield loaded


class Counted:
    """Passes calls to the driver and counts GPU copies."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.copies = driver, 0

    def __getattr__(self, name: str) -> Any:
        self.copies += name == "cuMemcpyDtoDAsync"
        return getattr(self.driver, name)


def drawn(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda")


def ids(batch: int) -> Any:
    return torch.randint(0, 12, (batch,), device="cuda")


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_a_thousand_calls_in_any_order_are_eager_pytorchs(bundle: Path, mode: str) -> None:
    with cgbundle.load(bundle, mode=mode, outputs="view") as program:
        print(f"{bundle.stem} {mode}: largest error {check_donations(program, 'cuda', 200):.1e}, {dict(program.memory)}")


def test_what_is_reserved(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    assert [row.entry for row in manifest.donated] == ["encode", "step"]
    print(bundle.stem, manifest.donated, manifest.memories)


def test_a_donated_input_is_not_copied(program: cgbundle.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(backend.cu)
    for module in (backend, binding):
        monkeypatch.setattr(module, "cu", counted)
    first, words = program.encode(drawn(8, 16, FEATURES)), ids(8)
    counted.copies = 0
    output = program.step(first, words)
    assert counted.copies == 1  # a copy of the ids
    program.step(first.tensor.clone(), words)
    assert counted.copies == 3
    output = program.step(first, words)
    assert counted.copies == 4
    program.score(output["logits"], output["hidden"])
    assert counted.copies == 4
    again = program.step(output["hidden"], words)  # a donation to itself would overwrite its own output
    assert counted.copies == 6
    program.score(again["logits"], first)  # outputs of two entries
    assert counted.copies == 6


def test_the_static_buffer_is_not_read(program: cgbundle.Program) -> None:
    x, words = drawn(2, 4, FEATURES), ids(2)
    with torch.no_grad():
        model = donated().cuda()
        expected = model.step(model.encode(x), words)["logits"]
    first = program.encode(x)
    torch.from_dlpack(program.step.buffers((2,))[0]).fill_(float("nan"))
    got = program.step(first, words)["logits"].tensor
    assert (got - expected).abs().max() <= 1e-4


def test_a_donated_view_is_good_until_its_own_entry_is_called(program: cgbundle.Program) -> None:
    first = program.encode(drawn(2, 4, FEATURES))
    kept = first.tensor.clone()
    output = program.step(first, ids(2))
    program.other(drawn(64, FEATURES))
    program.poison(0xFF, reserved=False)
    assert torch.equal(first.tensor, kept)
    program.score(output["logits"], first)
    program.encode(drawn(8, 4, FEATURES))
    with raises("stale-view", match="call 1 of 'encode' was read after call 2 of 'encode'"):
        program.step(first, ids(2))
    loose = program.other(drawn(64, FEATURES))
    program.encode(drawn(8, 4, FEATURES))
    with raises("stale-view"):
        loose.tensor  # noqa: B018


def test_tensors_of_other_sessions_and_of_the_host_are_copied_in(program: cgbundle.Program) -> None:
    model, x, words = donated().cuda(), drawn(2, 4, FEATURES), ids(2)
    with torch.no_grad():
        expected = model.step(model.encode(x), words)["hidden"]
    with program.session() as other:
        assert (other.step(program.encode(x), words)["hidden"].tensor - expected).abs().max() <= 1e-4
    output = program.step(program.encode(x.cpu()), words.cpu())["hidden"]
    assert not output.tensor.is_cuda and (output.tensor - expected.cpu()).abs().max() <= 1e-4


def test_in_a_callers_graph(program: cgbundle.Program) -> None:
    model, x, words = donated().cuda(), drawn(2, 4, FEATURES), ids(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = program.step(program.encode(x), words)["logits"].tensor
    for _ in range(3):
        x.normal_()
        graph.replay()
        with torch.no_grad():
            assert (logits - model.step(model.encode(x), words)["logits"]).abs().max() <= 1e-4


@pytest.mark.parametrize("how", ["lazy", "profile"])
def test_graphs_that_are_built_late_or_timed(bundle: Path, how: str) -> None:
    with cgbundle.load(bundle, outputs="view", lazy=how == "lazy") as program:
        if how == "profile":
            with program.profile() as profile:
                check_donations(program, "cuda", 5)
            assert any(span.track == profile.GPU for span in profile.spans)
        check_donations(program, "cuda", 5, seed=1)


def test_memory_is_what_the_manifest_says(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the allocations of this process, because other processes use the GPU too."""
    asked: list[int] = []
    allocate = memory.allocate

    def counted(size: int, what: str) -> int:
        asked.append(size)
        return allocate(size, what)

    for module in (memory, shared):
        monkeypatch.setattr(module, "allocate", counted)
    with cgbundle.load(bundle, outputs="view") as program:
        program.score(program.step(program.encode(drawn(8, 16, FEATURES)), ids(8))["logits"], drawn(8, WIDTH))
        sizes = [size for name, size in program.memory.items() if name != "code"]  # the driver itself allocates memory of code
    assert sorted(asked) == sorted(max(size, memory.SMALLEST) for size in sizes)


def test_the_self_test_passes_without_torch(bundle: Path) -> None:
    passed(bundle)
