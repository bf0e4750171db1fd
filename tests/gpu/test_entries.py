"""Several entries in one bundle, captured and cross-compiled: calls in any order and any session equal eager PyTorch."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.format import archive  # noqa: E402
from cgbundle.format.file_names import all_programs  # noqa: E402
from tests.gpu.helpers.hidden import built_without_gpu  # noqa: E402
from tests.gpu.helpers.self_tests import passed  # noqa: E402
from tests.helpers.models.entry_models import ENTRIES, SIZES, calls, check_calls, error, lanes  # noqa: E402


@pytest.fixture(scope="module", params=["capture", "cross-compile", "without-gpu"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prove = "none" if request.param == "cross-compile" else "interpret"  # the tests replay this bundle instead
    path = tmp_path_factory.mktemp("entries") / f"{request.param}.cgb"
    if request.param == "without-gpu":
        return built_without_gpu("entries", "", path)
    return cgcompile.build(lanes(), ENTRIES, sizes=SIZES, out=path, target="cuda", record=request.param, prove=prove).path


def test_what_the_bundle_holds(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    assert [entry.name for entry in manifest.entries] == ["prefill", "decode", "reset_lane"]
    memories = dict(manifest.memories)
    programs = all_programs(manifest)
    assert memories["arena"] == max(program.arena for program in programs)
    assert memories["inputs"] == max(program.static for program in programs)
    names = {weight.tensor for weight in manifest.weights}
    literals = {name for name in names if name.startswith(("lifted_tensor", "cgcompile."))}
    assert names - literals == set(lanes().state_dict()) - {"head.weight"}  # the tied weight is stored once, as the embedding's


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_calls_in_any_order_are_eager_pytorchs(bundle: Path, mode: str) -> None:
    with cgbundle.load(bundle, mode=mode) as program:
        print(f"{bundle.stem} {mode}: largest error {check_calls(program, lanes().cuda(), 'cuda', 1000):.1e}")


def test_views_are_stale_after_another_entry(bundle: Path) -> None:
    with cgbundle.load(bundle, outputs="view") as program:
        first = program.decode(torch.zeros(1, dtype=torch.int64, device="cuda"))
        assert first.tensor.shape == (1, 64)
        program.reset_lane(torch.zeros(1, dtype=torch.int64, device="cuda"))
        with pytest.raises(cgbundle.CallError, match="was read after"):
            first.tensor  # noqa: B018


def test_sessions_have_a_state_of_their_own(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        failures: list[AssertionError] = []
        models = [lanes().cuda() for _ in range(3)]  # not in the threads: all draw weights from torch's generator

        def work(seed: int) -> None:
            try:
                with program.session() as own_session, torch.cuda.stream(torch.cuda.Stream()):
                    check_calls(own_session, models[seed], "cuda", 100, seed)
            except AssertionError as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert not torch.from_dlpack(program.state["length"]).any()


@pytest.mark.alone
def test_memory_is_what_the_manifest_says(bundle: Path) -> None:
    torch.zeros(1, device="cuda")
    with cgbundle.load(bundle) as warm:  # creates the context and the driver's memory
        warm.decode(torch.zeros(1, dtype=torch.int64, device="cuda"))
    before = torch.cuda.mem_get_info()[0]
    with cgbundle.load(bundle) as program:
        for name, inputs in calls(20, 3):
            program[name](*[tensor.cuda() for tensor in inputs])
        taken = before - torch.cuda.mem_get_info()[0]
        promised = sum(size for name, size in program.memory.items() if name != "host")
        print(f"{bundle.stem}: {taken / 2**20:.1f} MiB taken, {promised / 2**20:.1f} MiB promised, {dict(program.memory)}")
        assert taken <= promised + (16 << 20)  # for rounding to steps of 2 MiB, and the driver's memory of graphs


def test_a_lazy_load_builds_what_is_called(bundle: Path) -> None:
    with cgbundle.load(bundle, lazy=True) as program:
        check_calls(program, lanes().cuda(), "cuda", 30, 5)


def test_calls_from_the_host(bundle: Path) -> None:
    model = lanes()
    with cgbundle.load(bundle) as program:
        for name, inputs in calls(20, 7):
            with torch.no_grad():
                expected = getattr(model, name)(*inputs)
            got = program[name](*inputs)
            assert got is expected is None or error(got, expected) <= 1e-3  # the CPU sums in another order


def test_the_self_test_passes_without_torch(bundle: Path) -> None:
    passed(bundle)
    assert all(
        proof.method in ("replay", "none")
        for entry in archive.read_manifest(str(bundle)).entries
        for proof in entry.self_test.proofs
    )


def test_random_numbers_and_padding_are_an_entrys_own(tmp_path: Path) -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.seen

        def train_like(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return torch.nn.functional.dropout(self.linear(x), 0.5, training=True)

    def rows(batch: int) -> tuple[torch.Tensor]:
        return (torch.randn(batch, 4),)

    model = Noisy()
    entries = {"forward": rows, "train_like": rows}
    path = cgcompile.build(model, entries, sizes=[2, 4], out=tmp_path / "noisy.cgb", target="cuda").path
    with cgbundle.load(path) as program:
        x = torch.randn(3, 4, device="cuda")
        assert program(x).shape == (3, 4)  # padding is allowed, because this entry only reads state
        with pytest.raises(cgbundle.CallError, match="batch"):
            program.train_like(x)
        ones = torch.ones(4, 4, device="cuda")
        program.seed(1)
        first = program.train_like(ones)
        program.seed(1)
        assert torch.equal(program.train_like(ones), first)
        assert torch.from_dlpack(program.state["seen"]).tolist() == [2.0] * 4
        with torch.no_grad():
            assert error(program(ones), replace_seen(model.cuda(), 2.0)(ones)) <= 2e-3


def replace_seen(model: torch.nn.Module, value: float) -> torch.nn.Module:
    model.seen.fill_(value)
    return model
