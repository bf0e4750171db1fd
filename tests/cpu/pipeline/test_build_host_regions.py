"""Cross-compiled programs with host regions: all GPU regions use one arena; in the proof, eager PyTorch replaces the host
regions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cgcompile.errors import CATALOGUE
from tests.helpers.lowered_here import lower_here
from tests.helpers.raising import raises
from tests.helpers.uncompiled import uncompiled

pytest.importorskip("triton")

import cgcompile
from cgbundle.cpu.machine import processor_flags
from cgbundle.format import archive
from cgbundle.format.file_names import WAIVER
from cgbundle.format.schema import MEMORIES, Dimension, IntKey, Manifest, Program, Proof
from cgbundle.validate import bundle as verify
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import KernelNode, Recording
from cgcompile.bundle.self_test import KeySelfTest
from cgcompile.checks import check
from cgcompile.export.export import export
from cgcompile.model.load import load_source
from cgcompile.model.source import sample
from cgcompile.offline import trace as traced
from cgcompile.offline.assemble.arena import plan
from cgcompile.offline.assemble.merge import LoweredRegion, merge
from cgcompile.offline.assemble.plan_check import check_plan
from cgcompile.offline.interpret.interpret import Outcome
from cgcompile.offline.lower.inductor import lower_key
from cgcompile.offline.lowered import Lowered, LoweredProgram
from cgcompile.offline.lowering_jobs import region_jobs
from cgcompile.offline.proof import COMPARED, CROSSING, Trial, proved
from cgcompile.targets.architectures import arch
from cgcompile.targets.cuda import host_regions
from cgcompile.targets.cuda.host_regions import split_program
from cgcompile.targets.instruction_sets import common_level
from cgcompile.targets.memory_layout import PAD
from cgcompile.transforms.error_bounds import ErrorBound

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn


class Layers(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.all = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, x):
        for layer in self.all:
            x = torch.relu(layer(x)) + x
        return x


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().eval()

"""

MODELS = {
    "scalars": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Layers(2, 16), Layers(2, 16), Layers(2, 16)

    def forward(self, x):
        x = self.first(x)
        y = self.second(x * x.sum().item())
        return self.third(x + (y[y > 0].sum() + y).tanh())


def inputs(batch):
    return (torch.randn(batch, 16),)
""",
    "softmax": """
class Net(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        return torch.softmax(y * y.sum().cpu() / 8, -1)


def inputs(batch):
    return (torch.randn(batch, 16),)
""",
    "table": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(5000, 16)), nn.Linear(16, 4)
        self.tied, self.scale = self.table, nn.Parameter(torch.tensor([2.0]))

    def forward(self, ids, x):
        ids = ids.cpu()
        found = F.embedding(ids, self.table) * self.scale.cpu() + F.embedding(ids, self.tied)
        found = found.to(x.device)
        return self.out(torch.relu(found).mean(1) + x)


def inputs(batch):
    return (torch.randint(0, 5000, (batch, 3)), torch.randn(batch, 16))
""",
    "digamma": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layers(2, 16), Layers(2, 16)

    def forward(self, x):
        return self.second(torch.digamma(self.first(x).square() + 1))


def inputs(batch):
    return (torch.randn(batch, 16),)
""",
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """A published bundle; `alone` has, by key, the arena bytes of each graph region if it were the only one."""

    path: Path
    manifest: Manifest
    alone: Mapping[IntKey, Sequence[int]]

    def recordings(self, program: Program) -> list[Recording]:
        return [tables.decode((self.path / step.file).read_bytes()) for step in program.steps if step.kind == "graph"]

    def regions(self, program: Program) -> list[str]:
        """Returns the regions' names without the key, and the copies between them."""
        names = [self.manifest.regions[step.region].name if step.kind != "copy" else "copy" for step in program.steps]
        return [re.sub(r"^(host-\d+)-.*", r"\1", name) for name in names]


Make = Callable[..., Build]


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hides the GPU and returns the folder of the model files."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in MODELS.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        lower_here(patch)
        yield folder


@pytest.fixture(scope="module")
def make(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that builds a model of MODELS, once per set of options. `compiled` compiles its host regions, 8 s each."""
    done: dict[object, Build] = {}

    def build(name: str, sizes: Sequence[int] = (1, 4), fallback_ops: Sequence[str] = (), compiled: bool = False) -> Build:
        if name not in done:
            alone: dict[IntKey, list[int]] = {}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(traced, "merge", lambda key, regions, *rest: _noted(alone, key, regions, rest))
                if not compiled:
                    patch.setattr(host_regions, "compile_host_regions", uncompiled)
                out = tmp_path_factory.mktemp(name) / f"{name}.cgb"
                built = cgcompile.build(
                    environment / f"{name}.py", sizes=list(sizes), out=out, target="sm_90", fallback_ops=tuple(fallback_ops)
                )
            done[name] = Build(path=built.path, manifest=built.manifest, alone=alone)
        return done[name]

    return build


def _noted(alone: dict[IntKey, list[int]], key: IntKey, regions: Sequence[LoweredRegion], rest: Any) -> LoweredProgram:
    alone[key] = [plan(region.lowered).arena - PAD for region in regions if region.lowered]
    return merge(key, regions, *rest)


def sound(build: Build, keys: Sequence[IntKey]) -> None:
    """Checks that the verifier finds nothing and that every key was proved."""
    verify.check_bundle(archive.Archive(str(build.path)), "full")
    assert verify.examine(archive.Archive(str(build.path))) == []
    assert archive.read_manifest(str(build.path)).entries[0].programs == build.manifest.entries[0].programs
    assert [proof.key for proof in build.manifest.entries[0].self_test.proofs] == list(keys)
    for proof in build.manifest.entries[0].self_test.proofs:
        assert proof.method == "interpret" and proof.error <= proof.tolerance == 1e-4
    assert build.manifest.entries[0].self_test.compare == "tolerance"


def arena_offsets(recording: Recording) -> set[int]:
    """Returns the arena offsets in the arguments of a recording's kernels."""
    targets = [row.target for node in recording.nodes if isinstance(node, KernelNode) for row in node.relocations]
    return {target.offset for target in targets if target.memory == MEMORIES.index("arena")}


# --- what is built ------------------------------------------------------------------------------------------------


def test_a_number_and_a_mask_between_layers_leave_three_graphs(make: Make) -> None:
    build = make("scalars")
    sound(build, [(1,), (4,)])
    for program in build.manifest.entries[0].programs:
        steps = build.regions(program)
        assert [step for step in steps if step != "copy"] == ["graph-1", "host-1", "graph-2", "host-2", "graph-3"]
        assert "copy" not in (steps[0], steps[-1])
    reasons = {region.name.rpartition("-")[0]: region.reason for region in build.manifest.regions if region.kind == "host"}
    assert "host-scalar" in reasons["host-1"] and "data-dependent-shape" in reasons["host-2"]
    memories = dict(build.manifest.memories)
    assert memories["host"] > 0 and memories["arena"] == max(program.arena for program in build.manifest.entries[0].programs)


def test_regions_share_the_arena_where_values_die_and_keep_what_is_read_later(make: Make) -> None:
    build = make("scalars")
    for program in build.manifest.entries[0].programs:
        first, second, third = [arena_offsets(recording) for recording in build.recordings(program)]
        assert program.arena - PAD < sum(build.alone[program.key])
        assert first & second & third, "each region lies where the one before it did"
        steps = [step for step in program.steps if step.kind == "graph"]
        (kept,) = set(steps[0].outputs) & set(steps[2].inputs)
        assert program.values[kept].memory == "arena" and program.values[kept].offset not in second


def test_a_sum_that_goes_over_the_host_needs_copies_alone(make: Make) -> None:
    build = make("softmax", sizes=[4])
    sound(build, [(4,)])
    (program,) = build.manifest.entries[0].programs
    assert build.regions(program) == ["graph-1", "copy", "copy", "graph-2"]
    assert {region.kind for region in build.manifest.regions} == {"graph"}
    assert (build.manifest.target.torch, build.manifest.target.features) == ("", ())
    first, second = program.steps[0], program.steps[3]
    crossing = set(first.outputs) & set(second.inputs)
    assert [program.values[index].shape for index in crossing] == [(4, 16)], "relu(x) stays on the GPU"


def test_a_table_that_the_host_reads_stays_off_the_gpu(make: Make) -> None:
    build = make("table", sizes=[4], compiled=True)
    sound(build, [(4,)])
    (program,) = build.manifest.entries[0].programs
    assert build.regions(program) == ["copy", "host-1", "copy", "graph-1"]
    memories = {weight.name: weight.memory for weight in build.manifest.weights}
    assert memories["table"] == memories["tied"] == memories["scale"] == "host" and memories["out.weight"] == "weights"
    assert dict(build.manifest.memories)["weights"] < 5000 * 16 * 4
    (row,) = [region for region in build.manifest.regions if region.kind == "host"]
    table, scale = sorted([build.manifest.weights[weight].name for _, weight in row.constants], reverse=True)
    assert table in ("table", "tied") and scale == "scale"
    assert (build.path / row.file).read_bytes().startswith(b"\x7fELF")
    assert build.manifest.target.torch == torch.__version__.partition("+")[0] and build.manifest.target.features
    level = common_level(os.uname().machine, processor_flags())  # the bundle may run on another machine
    assert level is not None and set(build.manifest.target.features) <= set(level.features)


def test_what_has_no_triton_kernel_builds_with_the_options_of_the_hint(make: Make) -> None:
    with raises("check-refused", match=r"digamma\.py:\d+: operator-without-kernel: digamma has no Triton kernel") as caught:
        make("digamma", sizes=[4])
    hint = caught.value.hint
    assert hint.startswith(CATALOGUE["operator-without-kernel"].hint) and "cgcompile build ... --fallback-op " in hint
    names = re.findall(r"--fallback-op (\S+)", hint)
    assert names == ["aten.digamma"]
    build = make("digamma", sizes=[4], fallback_ops=names)
    sound(build, [(4,)])
    assert build.regions(build.manifest.entries[0].programs[0]) == ["graph-1", "copy", "host-1", "copy", "graph-2"]


# --- detected errors ----------------------------------------------------------------------------------------------


def overlapping(traced: Lowered, *kept: Any) -> Any:
    """Returns a plan that puts everything at the same offset."""
    arena_plan = plan(traced, *kept)
    return replace(arena_plan, offsets=dict.fromkeys(arena_plan.offsets, 0))


def test_an_overlap_of_two_regions_is_not_built(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make("softmax", sizes=[4])
    monkeypatch.setattr(traced, "plan", overlapping)
    with raises("arena-overlap", match=r"int_key \(4,\), event \d+ .*\(graph-\d\.t\d"):
        again("softmax", tmp_path)


def test_what_an_overlap_spoils_does_not_pass_the_proof(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check of the plan is off. So the sum overwrites values that the second region multiplies."""
    make("softmax", sizes=[4])
    monkeypatch.setattr(traced, "plan", overlapping)
    monkeypatch.setattr(traced, "check_plan", lambda traced, arena_plan: None)
    with raises("proof-failed", match=r"int_key batch=4: the interpreted kernels differ from eager PyTorch"):
        again("softmax", tmp_path)
    assert list(tmp_path.iterdir()) == []


def again(name: str, folder: Path) -> None:
    """Builds a model again, from the file of the first build."""
    import sys

    (model,) = [module for path, module in sys.modules.items() if path == f"cgcompile_model_{name}"]
    cgcompile.build(str(model.__file__), sizes=[4], out=folder / f"{name}.cgb", target="sm_90")


def trial(crossing: torch.Tensor, output: torch.Tensor) -> Trial:
    self_test = KeySelfTest(key=(1,), inputs=(), outputs=(output,))
    return Trial(
        key=(1,), stages=(), crossing=(crossing,), compared=(output,), self_test=self_test, early=(), order=(CROSSING, COMPARED)
    )


@pytest.mark.parametrize(("flipped", "passes"), [(0, True), (1, True), (3, False)])
def test_rounding_may_turn_a_comparison_over_for_the_host(flipped: int, passes: bool) -> None:
    """One in twenty thousand booleans for the host may flip, but none of an output."""
    mask, number = torch.arange(20000) % 3 == 0, torch.ones(4)
    got = mask.clone()
    got[:flipped] = ~got[:flipped]
    outcome = Outcome(key=(1,), read=(raw(got), raw(number)), seconds=0.0)
    if passes:
        assert judged(trial(mask, number), outcome, FLOAT) == ((1e-4,), (replace(CLAIM, method="interpret", errors=(0.0,)),))
    else:
        with raises("proof-failed", match="batch=1: the values from interpreted kernels to the host differ"):
            judged(trial(mask, number), outcome, FLOAT)
    output = Outcome(key=(1,), read=(raw(mask), raw(got)), seconds=0.0)
    if flipped:
        text = f"output mask \\(bool\\): {flipped} of 20000 values differ, first at \\[0\\]: False, expected True"
        with raises("proof-failed", match=f"batch=1: the interpreted kernels differ from eager PyTorch: {text}"):
            judged(trial(mask, mask), output, MASK)
        bounds, (proof,) = judged(trial(mask, mask), output, MASK, WAIVER)
        assert bounds == proof.errors == (flipped / 20000,) and proof.error == proof.tolerance == flipped / 20000
        with raises("proof-failed", match="output mask"):
            judged(trial(mask, mask), output, replace(MASK, rounded=False), WAIVER)


def judged(tried: Trial, outcome: Outcome, bound: ErrorBound, *allow: str) -> tuple[tuple[float, ...], tuple[Proof, ...]]:
    dimension = Dimension(name="batch", sizes=(1,), pad="no", chunk=False, reason="")
    return proved([dimension], [bound], [CLAIM], [(tried, outcome)], 1e-4, allow)


CLAIM = Proof(key=(1,), method="none", error=0.0, tolerance=1e-4, errors=(), distance=0.0)
FLOAT = ErrorBound(title="output y (float32)", bound=1e-4, exact=False, rounded=True)
MASK = ErrorBound(title="output mask (bool)", bound=0.0, exact=True, rounded=True)


def test_a_key_that_was_not_interpreted_keeps_its_claim() -> None:
    assert proved([], [FLOAT], [CLAIM], [], 1e-4) == ((1e-4,), (CLAIM,))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# --- values between two graphs ------------------------------------------------------------------------------------


class Views(torch.nn.Module):
    """Values with many layouts that one graph computes and the next one reads, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.image = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.register_buffer("steps", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(self.image(x)).to(memory_format=torch.channels_last)
        h = self.one(y.permute(0, 2, 3, 1))
        turned, odd, tail, wide = h.transpose(1, 2), h[..., 3], h[1:], self.steps.expand(x.shape[0], 8)
        number = h.mean((1, 2)).exp().sum().item()
        r = self.other(torch.tanh(wide * number))
        return (turned * r[:, None, None]).sum((1, 2)) + odd.sum((1, 2))[:, None] + tail.sum(), y + r[:, :, None, None]


def test_regions_agree_on_the_layout_of_what_crosses() -> None:
    torch.manual_seed(0)
    source = load_source(Views().eval(), lambda batch: (torch.randn(batch, 3, 5, 5),))
    exported = export(source, {"batch": (3, 4)})
    placed = check(exported).placements
    split = split_program(exported.programs, placed, {(3,): sample(source, {"batch": 3}).tensors})
    jobs = region_jobs(split, ())
    lowered = {
        name: lower_key(work.program, name[1], work.tensors, arch("sm_90"), layouts=work.layouts) for name, work in jobs.items()
    }
    regions = [
        LoweredRegion(name=region.name, inputs=region.inputs, outputs=region.outputs, lowered=lowered.get((region.name, (3,))))
        for region in split.partitions[3,].regions
    ]
    input_names = [*split.partitions[3,].inputs, *[value.name for value in split.uploads[3,]]]
    merged = merge((3,), regions, input_names, split.partitions[3,].outputs)
    check_plan(merged.lowered, plan(merged.lowered))
    first, second = merged.regions
    crossing = {tensor for tensor in first.outputs if tensor in second.inputs}
    shapes = {tensor.shape: tensor.strides for tensor in crossing}
    assert shapes[3, 5, 5, 8] == (200, 8, 40, 1), "transposed"
    assert shapes[3, 5, 5] == (25, 5, 1), "the gaps are closed"
    assert shapes[3, 8, 5, 5] == (200, 1, 40, 8), "channels last"
    assert all(tensor.pointer.offset % 16 == 0 for tensor in crossing)
    names = {buffer.name for buffer in merged.lowered.buffers if buffer.kind == "weight"}
    assert (
        {"model.one.bias", "model.other.bias"}
        <= names
        <= exported.programs.first.state_dict.keys() | {constant.name for constant in merged.lowered.constants}
    )
