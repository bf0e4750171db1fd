"""Branches and loops of captured bundles on a GPU: every path equals eager PyTorch, in both modes, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle.cuda import driver
from cgbundle.format.table import RECORDING
from cgbundle.program.opening import MODES
from cgcompile.bundle.recordings import ConditionalNode, Recording, decode
from tests.gpu.helpers.counting import Counting
from tests.helpers.drivers.fake_driver import install

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

from torch import Tensor, nn  # noqa: E402

from tests.helpers.models.conditional_models import (  # noqa: E402
    MODELS,
    TURNS,
    WIDTH,
    Drawing,
    Guarded,
    Keeping,
    Middle,
)

CLOSE = {"rtol": 2e-3, "atol": 2e-3}


def build(model: nn.Module, inputs: Callable[[], Any], path: Path, lower: str) -> Any:
    import cgcompile

    return cgcompile.build(model, inputs, out=path, target="cuda", record="capture", lower=lower)


def recordings(path: Path) -> list[Recording]:
    contents = [file.read_bytes() for file in sorted((path / "graphs").iterdir())]
    return [decode(data) for data in contents if data.startswith(RECORDING.magic)]  # other files hold module variables


def types(path: Path) -> list[str]:
    nodes = [node for recording in recordings(path) for node in recording.nodes]
    return [node.type for node in nodes if isinstance(node, ConditionalNode)]


def described(path: Path) -> str:
    """Returns the rows of a bundle's graphs as text for assertion messages."""
    lines = []
    for recording in recordings(path):
        for place, node in enumerate(recording.nodes):
            begins = [number for number, first in enumerate(recording.bodies) if first == place]
            name = getattr(node, "function", None)
            what = recording.functions[name].symbol if name is not None else str(node)
            lines.append(f"{f'body {begins}: ' if begins else ''}{place} {type(node).__name__} {what}")
        lines.append(f"edges {[(edge.source, edge.target) for edge in recording.edges]}")
    return "\n".join(lines)


def leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def compare(path: Path, model: nn.Module, examples: list[Any]) -> None:
    """Compares calls with each of `examples`, in both modes. The model on the GPU must not change its buffers."""
    for mode in MODES:
        with cgbundle.load(path, mode=mode) as program:
            assert [step.kind for step in program.manifest.entries[0].programs[0].steps] == ["graph"], "one graph, one launch"
            for number, x in enumerate([*examples, *reversed(examples)]):
                arguments = [tensor.cuda() for tensor in x]
                with torch.no_grad():
                    wanted = model(*arguments)
                for got, want in zip(leaves(program(*arguments)), leaves(wanted), strict=True):
                    assert torch.allclose(got, want, **CLOSE), f"mode {mode}, call {number}: {got} {want}\n{described(path)}"


@pytest.mark.parametrize(
    ("name", "lower"), [*[(name, "inductor") for name in MODELS], *[(name, "eager") for name in ("nested", "carried", "chosen")]]
)
def test_every_path_equals_eager_pytorch(tmp_path: Path, name: str, lower: str) -> None:
    make, inputs, kinds = MODELS[name]
    torch.manual_seed(1)
    model, examples = make().eval(), inputs()
    built = build(model, lambda: (examples[0],), tmp_path / "made.cgb", lower)
    assert sorted(types(built.path)) == list(kinds)
    assert built.manifest.entries[0].self_test.compare == "bits", "proved in a fresh process over poisoned memory, bit for bit"
    compare(built.path, model.cuda(), [(x,) for x in examples])


@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_a_lookup_that_the_example_must_not_take(tmp_path: Path, lower: str) -> None:
    ids = [torch.tensor(values) for values in ([9, 12], [0, 3], [1, 0], [3, 900])]
    torch.manual_seed(1)
    model, x = Guarded().eval(), torch.randn(2, 8)
    built = build(model, lambda: (ids[0], x), tmp_path / "made.cgb", lower)
    assert sorted(types(built.path)) == ["if", "while"]
    compare(built.path, model.cuda(), [(indices, x) for indices in ids])


@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_state_and_inputs_that_are_written(tmp_path: Path, lower: str) -> None:
    counts = torch.zeros(2, dtype=torch.int64)
    built = build(Keeping(), lambda: (torch.randn(3, 6), counts), tmp_path / "made.cgb", lower)
    assert types(built.path) == ["if", "if"]
    for mode in MODES:
        generator, model = torch.Generator().manual_seed(0), Keeping().cuda()
        mine, theirs = counts.cuda(), counts.cuda()
        with cgbundle.load(built.path, mode=mode) as program:
            for number in range(5):
                x = torch.randn(3, 6, generator=generator).cuda()
                with torch.no_grad():
                    wanted = model(x, theirs)
                for got, want in zip(program(x, mine), wanted, strict=True):
                    assert torch.allclose(got, want, **CLOSE), f"mode {mode}, call {number}\n{described(built.path)}"
                assert torch.equal(mine, theirs)


def test_random_numbers_and_state_in_a_loop(tmp_path: Path) -> None:
    built = build(Drawing(), lambda: (torch.zeros(WIDTH),), tmp_path / "drawing.cgb", "inductor")
    runs = []
    for mode in MODES:
        with cgbundle.load(built.path, mode=mode) as program:
            program.seed(5)
            seen, calls = 0, []
            for _ in range(6):
                v, turns, state = program(torch.zeros(WIDTH, device="cuda"))
                assert int(turns) == TURNS or float(v.sum()) >= 30
                seen += 1 if int(turns) > 3 else -1
                assert float(state) == seen
                calls.append((v.cpu(), int(turns)))
            runs.append(calls)
            assert [turns for _, turns in calls] == sorted([turns for _, turns in calls], reverse=True), "the scale doubles"
            assert not torch.equal(calls[0][0], calls[1][0])
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one[0], two[0]) and one[1] == two[1]


class BesideTheHost(nn.Module):
    """A graph with a branch, a host operation, and a graph with a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        self.second = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cond(x.sum() > 0, lambda h: h.sin(), lambda h: h.cos() * 2, (self.first(x),))
        h = self.second(h / (h[h > 0].sum().item() + 1.0))
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return torch.while_loop(lambda i, h: (i < 5) & (h.abs().sum() < 40), lambda i, h: (i + 1, h * 1.5), (start, h))[1]


def test_conditional_nodes_beside_a_region_of_the_host(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = BesideTheHost().eval()
    built = build(model, lambda: (torch.randn(4, 16),), tmp_path / "made.cgb", "inductor")
    assert sorted(types(built.path)) == ["if", "while"]
    kinds = [step.kind for step in built.manifest.entries[0].programs[0].steps]
    assert [kind for kind in kinds if kind != "copy"] == ["graph", "host", "graph"]
    model = model.cuda()
    for mode in MODES:
        with cgbundle.load(built.path, mode=mode) as program:
            for shift in (-2, 2, 0.1, -0.1):
                x = torch.randn(4, 16, device="cuda") + shift
                with torch.no_grad():
                    assert torch.allclose(program(x), model(x), **CLOSE), f"mode {mode}, {shift}\n{described(built.path)}"


class HostInside(nn.Module):
    """A loop whose body reads the number of positive elements on the host."""

    def forward(self, x: Tensor) -> Tensor:
        def turn(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, x + x[x > 0].sum()

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return torch.while_loop(lambda i, x: i < 3, turn, (start, x.sin()))[1] * 2


def test_an_operation_of_the_host_in_a_body_makes_it_a_region_of_the_host(tmp_path: Path) -> None:
    model = HostInside()
    built = build(model, lambda: (torch.randn(4, 16),), tmp_path / "made.cgb", "inductor")
    assert types(built.path) == [] and "host" in [region.kind for region in built.manifest.regions]
    (control_flow,) = [finding for finding in built.manifest.entries[0].findings if finding.rule == "control-flow"]
    assert control_flow.severity == "host" and "test_conditional_captured.py" in control_flow.message
    with cgbundle.load(built.path) as program:
        x = torch.randn(4, 16, device="cuda")
        assert torch.allclose(program(x), model(x), **CLOSE)


def test_the_host_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs, _ = MODELS["nested"]
    path = build(make().eval(), lambda: (inputs()[0],), tmp_path / "made.cgb", "inductor").path
    with cgbundle.load(path) as program:
        examples = [x.cuda() for x in inputs()]
        torch.cuda.synchronize()
        program(examples[0])
        counted = Counting(driver.cu)
        install(monkeypatch, counted)  # type: ignore[arg-type]
        for x in examples:
            program(x)
        monkeypatch.undo()
        assert counted.calls["cuGraphLaunch"] == len(examples)
        assert not [name for name in counted.calls if "Synchronize" in name or "DtoH" in name]


def test_time_of_a_branch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the time of twelve float16 layers with a branch in the middle; asserts nothing about it."""
    torch.manual_seed(1)
    model, x = Middle(512).eval().half(), torch.randn(8, 512).half()
    path = build(model, lambda: (x,), tmp_path / "made.cgb", "inductor").path
    with cgbundle.load(path, outputs="view") as program:
        times = []
        for shift in (-1, 1):
            sample = (x + shift).cuda()
            for _ in range(20):
                program(sample)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(200):
                program(sample)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 200 * 1e3)
    with capsys.disabled():
        print(f"\ntwelve layers: without the wide one {times[0]:.1f} us, with it {times[1]:.1f} us a call")
