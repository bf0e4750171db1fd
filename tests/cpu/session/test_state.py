"""CPU bundles of models with state or with outputs that share memory: built, and compared with eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgbundle.format import archive, file_names, safetensors_files  # noqa: E402
from cgcompile.export.export import export  # noqa: E402
from cgcompile.export.signature.signature import describe_signature  # noqa: E402
from cgcompile.model.load import load_source  # noqa: E402
from cgcompile.transforms.output_aliases import find_aliases  # noqa: E402
from tests.helpers.models import state_checks as checks  # noqa: E402
from tests.helpers.models.state_models import SIZES, Sum, draws, looks, pairs, rows, running, singles, triples  # noqa: E402


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "running.cgb"
    return cgcompile.build(running(), rows, sizes=list(SIZES), out=path, target="cpu", train=True).path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("looks") / "looks.cgb"
    return cgcompile.build(looks(), pairs, sizes=list(SIZES), out=path, target="cpu").path


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "draws.cgb"
    return cgcompile.build(draws(), singles, sizes=list(SIZES), out=path, target="cpu").path


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_calls_share_state_and_sessions_do_not(stateful: Path, outputs: str) -> None:
    checks.check_state(stateful, "cpu", outputs=outputs)


def test_state_is_guarded(stateful: Path) -> None:
    checks.check_state_is_guarded(stateful, "cpu")


def test_a_buffer_that_is_handed_out_is_live(stateful: Path) -> None:
    checks.check_a_buffer_that_is_handed_out_is_live(stateful, "cpu")


def test_outputs_that_share_memory_share_it(shared: Path) -> None:
    checks.check_looks(shared, "cpu")


def test_views_of_shared_memory_go_stale_together(shared: Path) -> None:
    checks.check_looks_as_views(shared, "cpu")


def test_inputs_may_be_laid_out_in_any_way(tmp_path: Path) -> None:
    path = cgcompile.build(Sum(), triples, sizes=list(SIZES), out=tmp_path / "sum.cgb", target="cpu").path
    checks.check_inputs(path, "cpu")


def test_random_numbers_are_fresh_and_repeatable(random: Path) -> None:
    checks.check_random(random, "cpu")


def test_the_build_leaves_no_trace_in_the_model(tmp_path: Path) -> None:
    network = running()
    before = {name: value.clone() for name, value in network.named_buffers()}
    cgcompile.check(network, rows, sizes=list(SIZES))
    assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())


def test_the_self_test_holds_what_a_call_changes_and_notices_a_change(stateful: Path) -> None:
    manifest = archive.read_manifest(str(stateful))
    names = {weight.name: index for index, weight in enumerate(manifest.weights) if weight.memory == "state"}
    assert names.keys() == dict(running().named_buffers()).keys()
    stored = safetensors_files.Mapped(str(stateful / file_names.SELF_TEST), file_names.SELF_TEST)
    runs = memoryview(stored.data(file_names.self_test_entry((1,), "state-at", names["cache"]))).cast("q").tolist()
    assert manifest.entries[0].self_test.calls == 2 and runs == [2 * 8, 2 * 8], (
        "one row of the cache, at a place for each of two calls"
    )
    with cgbundle.load(stateful) as program:
        assert all(result.error < 1e-5 for result in self_test.replay_self_test(program))
        program.state["place"] = torch.full((1,), 3)
        program.reset = lambda: None  # type: ignore[method-assign]
        assert any(not result.passed(manifest.entries[0].self_test.compare) for result in self_test.replay_self_test(program))


def test_the_same_state_by_numpy_and_without_any_library(stateful: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with cgbundle.load(stateful) as program:
        x = numpy.ones((4, 2, 8), numpy.float32)
        program(x)
        got = numpy.asarray(program.state["cache"])
        assert got[:, 2].any() and not got[:, 3].any()
        program.state["cache"] = numpy.zeros_like(got)
        assert not numpy.asarray(program.state["cache"]).any()


class Overlapping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x * 2
        return product[:, :6], product[:, 4:]


class Apart(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2).chunk(2, dim=1)


class Sometimes(torch.nn.Module):
    """`reshape` returns a view if possible, else a copy."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = (x * 2)[:, :4]
        return product, product.reshape(-1)


def wide(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 8),)


def test_outputs_that_overlap_in_part_are_refused(tmp_path: Path) -> None:
    with raises("outputs-shared", match="overlap, and neither contains the other"):
        cgcompile.build(Overlapping(), wide, sizes=[1, 4], out=tmp_path / "x.cgb", target="cpu")


class Reread(torch.nn.Module):
    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x * 2
        return product, (x if self.of_input else product).view(torch.int32)


@pytest.mark.parametrize("of_input", [True, False])
def test_memory_seen_as_another_dtype_is_refused(of_input: bool, tmp_path: Path) -> None:
    with raises("outputs-shared", match="views memory of a tensor of torch.float32 as torch.int32"):
        cgcompile.build(Reread(of_input), wide, sizes=[1, 4], out=tmp_path / "x.cgb", target="cpu")


def test_sharing_that_depends_on_the_size_is_refused(tmp_path: Path) -> None:
    with raises("outputs-shared", match="different outputs share memory at different sizes"):
        cgcompile.build(Sometimes(), wide, sizes=[1, 4], out=tmp_path / "x.cgb", target="cpu")


def test_chunks_of_one_tensor_share_nothing() -> None:
    source = load_source(Apart(), wide)
    exported = export(source, {"batch": (1, 4)})
    assert find_aliases(exported, describe_signature(exported).outputs, ()) == ()


class Growing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x])
        return x + self.seen.sum(0)


def test_a_buffer_that_grows_is_refused(tmp_path: Path) -> None:
    with raises("state-changed", match="to the buffer 'seen', which is"):
        cgcompile.build(Growing(), wide, sizes=[1, 4], out=tmp_path / "x.cgb", target="cpu")


class Positioned(torch.nn.Module):
    """A ring of rows: the position of the next one is a number of Python."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ring, self.at = {"rows": torch.zeros(size, 8)}, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ring["rows"][self.at] = x[0]
        self.at += 1
        return x + self.ring["rows"].sum(0)


class PositionedByATensor(torch.nn.Module):
    """The cure: what the hint says, for both causes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(0, self.at, x[:1])
        self.at += 1
        return x + self.rows.sum(0)


def test_an_attribute_that_changes_and_a_failed_export_are_both_told_with_what_to_do() -> None:
    with raises("state-changed", match=r"changes 'at', which is not a buffer, and the export fails: .*a position") as caught:
        cgcompile.check(Positioned(64), wide, sizes=[1, 4], target="cpu")
    assert caught.value.hint.startswith("either can be the cause; for the attribute, register it as a buffer")
    assert "for the export, " in caught.value.hint and "cache.index_copy_(0, position, row)" in caught.value.hint
    cured = cgcompile.check(PositionedByATensor(), wide, sizes=[1, 4], target="cpu")
    assert not [finding for finding in cured.findings if finding.severity == "refuse"]


@pytest.mark.parametrize("size", [3, 4])
def test_a_model_that_a_later_call_breaks_is_refused_with_its_line(size: int) -> None:
    line = Positioned.forward.__code__.co_firstlineno + 1
    with raises(
        "eager-failed", match=rf"test_state.py:{line}: a repeated call of forward\(\) fails, .*: IndexError: index"
    ) as caught:
        cgcompile.check(Positioned(size), wide, sizes=[1, 4], target="cpu")
    assert "position % size" in caught.value.hint


class Widening(torch.nn.Module):
    """The first call gives a buffer another dtype, or another shape."""

    def __init__(self, first: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.mean(0)
        return x + self.seen


@pytest.mark.parametrize("first", [torch.zeros(8, dtype=torch.int32), torch.zeros(1, 8), torch.zeros(8)])
def test_a_buffer_to_which_the_first_call_gives_another_dtype_or_shape_is_named(first: torch.Tensor) -> None:
    checked = cgcompile.check(Widening(first), wide, sizes=[1, 4], target="cpu")
    refusals = [finding for finding in checked.findings if finding.severity == "refuse"]
    if first.dtype is torch.int32:
        (finding,) = refusals
        line = Widening.forward.__code__.co_firstlineno + 1
        assert finding.rule == "earlier-calls" and finding.where.endswith(f"test_state.py:{line}")
        assert finding.message.startswith("forward() assigns torch.float32 [8] to the buffer 'seen', which is torch.int32 [8] (")
        assert "register a buffer of its dtype and shape" in finding.fix
    else:
        assert not refusals
