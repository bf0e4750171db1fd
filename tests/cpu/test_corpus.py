"""A few models of the corpus: exported and checked, and one built. `python -m tests.corpus` runs all."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from cgbundle.format import file_names
from tests.corpus.carried import KEPT, draw_alike_everywhere, leave_out_weights, with_weights
from tests.corpus.case import Case, Made, as_for
from tests.corpus.jobs import Job, Plan, _gpu, run
from tests.corpus.judge import CHECK, judge, refusal, replayed
from tests.corpus.models import all_cases, find, layers
from tests.corpus.report import summary
from tests.corpus.results import BUILT, FAILED, REFUSED, RIGHT, STOPPED, TIMEOUT, WRONG, Row, read
from tests.cpu.conftest import MODEL
from tests.helpers.places import ROOT


def test_there_are_enough_models_and_each_has_a_name() -> None:
    cases = all_cases()
    every = [*cases, *[member for case in cases for member in case.members]]
    assert [name for name, count in Counter(case.name for case in every).items() if count > 1] == []
    models = [case.name for case in cases if not case.members]
    assert len(models) >= 120
    assert sum(name.startswith("transformers/") for name in models) >= 50
    assert sum(len(case.members) for case in cases) >= 100


def test_the_corpus_of_strangers_is_broad() -> None:
    cases = [case for case in all_cases() if case.family.startswith("strangers/")]
    packages = {case.needs[0] for case in cases}
    assert len(packages) >= 60 and len(cases) >= 120
    assert packages.isdisjoint({"torch", "torchvision", "torchaudio", "timm", "transformers"})
    for case in cases:
        assert re.fullmatch(r"strangers/[a-z]+/[A-Za-z0-9_]+\.[A-Za-z0-9_]+", case.name), case.name
        assert case.name.split("/")[2].startswith(case.needs[0] + "."), case.name
        assert all(len(sizes) == 2 for sizes in case.sizes.values()), case.name


def test_a_package_that_cannot_be_imported_is_told_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "broken_stranger.py").write_text("import a_package_that_is_not_here")
    case = Case(name="broken", make=lambda: (_ for _ in ()).throw(AssertionError), needs=("json", "broken_stranger"))
    sys.path.insert(0, str(tmp_path))
    try:
        assert case.missing() == ()
        assert case.broken() == "broken_stranger: ModuleNotFoundError: No module named 'a_package_that_is_not_here'"
    finally:
        sys.path.remove(str(tmp_path))


WEIGHTS = """
from tests.cpu.test_corpus import weights
print(weights())
"""


def test_what_is_cross_compiled_is_made_again_as_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case = Case(name="asking", make=lambda: (torch.nn.Linear(1, 1 + torch.cuda.is_available()), lambda batch: torch.rand(batch, 1)))
    widths = {}
    for target in ("sm_90", "cuda", "cpu"):
        with as_for(target):
            widths[target] = case.build()[0].out_features
    assert widths == {"sm_90": 1, "cuda": 2, "cpu": 2} and torch.cuda.is_available()


def weights() -> dict[str, float]:
    """Returns the sum of a case's weights by its name, for every layer of torch.nn."""
    return {
        case.name: sum([tensor.double().sum().item() for tensor in case.build()[0].state_dict().values()])
        for case in layers.CASES
    }  # fmt: skip


def test_truncated_normals_are_torchs_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors of another vendor MKL's values differ, which a test on one machine cannot show."""
    monkeypatch.setattr(torch.Tensor, "erfinv_", torch.Tensor.erfinv_)  # so that it is restored

    def drawn() -> torch.Tensor:
        torch.manual_seed(0)
        return torch.nn.init.trunc_normal_(torch.empty(1000), std=0.02)

    theirs = drawn()
    draw_alike_everywhere()
    ours = drawn()
    exact = torch.special.erfinv(torch.linspace(-0.95, 0.95, 1000, dtype=torch.float64)).float()
    assert torch.equal(torch.linspace(-0.95, 0.95, 1000, dtype=torch.float64).erfinv_().float(), exact)
    torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-6)


def test_layers_have_the_same_weights_in_every_process() -> None:
    # a layer made at import, before the seed, differs: torch's generator starts with any seed
    other = subprocess.run([sys.executable, "-c", WEIGHTS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(weights())


CHECKED = ("layers/group-09", "transformers/causal/llama", "transformers/sequence/t5-encoder")


@pytest.mark.parametrize("name", CHECKED)
def test_a_published_model_passes_the_checks(name: str, tmp_path: Path) -> None:
    case = find(name)
    if case.missing():
        pytest.skip(f"needs {', '.join(case.missing())}")
    row = judge(case, CHECK, tmp_path / "none.cgb", "none")
    assert (row.verdict, row.message) == (BUILT, "graph")


def test_a_bundle_is_called_with_other_inputs_and_between_the_sizes(bundle: Path) -> None:
    def tiny_model() -> Made:
        tiny: dict[str, Any] = {}
        exec(MODEL, tiny)
        return tiny["model"](), tiny["inputs"]

    case = Case(name="tiny", make=tiny_model)
    row = replayed(case, "cpu", bundle, {"export": 1.0})
    assert (row.verdict, row.message, row.between) == (RIGHT, "", "right")
    assert 0 < row.error < 1  # these inputs are not those of the self-test, so results are rounded differently
    assert row.stages is not None and row.stages.keys() == {"export", "load", "compare"}

    def changed() -> Made:
        module, inputs = tiny_model()
        with torch.no_grad():
            next(module.parameters()).add_(0.01)
        return module, inputs

    row = replayed(Case(name="tiny", make=changed), "cpu", bundle, {})
    assert row.verdict == WRONG and "output: by " in row.message


def test_a_layer_is_built_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.helpers.lowered_here import lower_here

    lower_here(monkeypatch)
    row = judge(find("layers/ReLU"), "sm_90", tmp_path / "relu.cgb", "none")
    assert (row.verdict, row.message) == (BUILT, "")
    assert row.stages is not None and {"export", "lower", "verify"} <= row.stages.keys()


def test_the_gpus_of_a_run_are_those_that_are_visible() -> None:
    assert [_gpu(number, 2, "") for number in range(3)] == ["0", "1", "0"]
    assert [_gpu(number, 2, "3,5,7") for number in range(3)] == ["3", "5", "3"]
    assert [_gpu(1, 1, "3"), _gpu(1, 4, "3"), _gpu(0, 0, "3")] == ["3", "3", None]


def test_errors_are_told_apart_by_what_they_name() -> None:
    from cgcompile.errors import BuildError, ModelError

    case = find("layers/Linear")
    place = "/site-packages/transformers/modeling.py:12"
    assert refusal(case, "cpu", ModelError("check-refused", f"{place}: rule: message")).verdict == REFUSED
    elsewhere = "../../opt/torch/lib/site-packages/torchaudio/models.py:12"  # a parent folder is called torch too
    assert refusal(case, "cpu", ModelError("data-dependent-branch", f"{elsewhere}: rule: message")).verdict == REFUSED
    assert refusal(case, "cpu", ModelError("operator-without-kernel", f"no kernel for aten.x ({place})")).place == place
    assert refusal(case, "cpu", ModelError("check-refused", "model: rule: message")).verdict == FAILED
    assert refusal(case, "cpu", ModelError("check-refused", "/site-packages/torch/nn/functional.py:3: rule")).verdict == FAILED
    assert refusal(case, "cpu", BuildError("compiler-failed", f"{place}: CppCompileError")).verdict == FAILED
    assert refusal(case, "cpu", BuildError("proof-failed", "the bundle's outputs differ from eager PyTorch")).verdict == WRONG


def test_a_case_that_takes_too_long_is_ended_and_the_members_of_a_group_are_tried_alone() -> None:
    case, rows = find("layers/group-01"), []
    plan = Plan(jobs=2, limit=0.1, until=0.0, prove="none", keep=None, bare=False, replay=False, gpus=0)
    run(plan, [Job(case, CHECK)], rows.append)
    assert [row.verdict for row in rows] == [TIMEOUT] * 9
    assert {row.name for row in rows} == {case.name, *[member.name for member in case.members]}
    assert "| layers | 9 |" in summary(rows) and "0 of 9 good" in summary(rows)


def test_what_runs_when_a_run_is_stopped_is_told_as_such_and_left_for_the_next(tmp_path: Path) -> None:
    rows: list[Row] = []
    plan = Plan(jobs=2, limit=60.0, until=time.time() + 1.0, prove="none", keep=None, bare=False, replay=False, gpus=0)
    names = ("layers/group-01", "layers/group-02", "layers/Linear")
    run(plan, [Job(find(name), CHECK) for name in names], rows.append)
    assert [(row.verdict, row.seconds < 10) for row in rows] == [(STOPPED, True)] * 2  # no members; the third did not start


def test_a_signal_ends_the_processes_and_leaves_the_rows(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.corpus", "--target", CHECK, "--only", "^layers/group-0[1-3]"]
    process = subprocess.Popen([*command, "--jobs", "1", "--results", str(results)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not results.exists() or not read(results):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)  # as `timeout` does; background processes of a shell ignore SIGINT
        assert process.wait(30) == 130
    finally:
        process.kill()
    done = [row.name for row in read(results) if row.verdict != STOPPED]
    assert len(done) == 1  # the second one starts when the first has a row
    rest = subprocess.run([*command, "--left", "--results", str(results)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(rest.stdout.split()[1::2] + done) == [f"layers/group-0{number}" for number in (1, 2, 3)]


def test_a_bundle_gets_the_weights_back_that_its_case_makes_again(bundle: Path, tmp_path: Path) -> None:
    tiny: dict[str, Any] = {}
    exec(MODEL, tiny)
    shutil.copytree(bundle, bare := tmp_path / "bare.cgb")
    assert with_weights(bare, tiny["model"](), tmp_path) == bare
    leave_out_weights(bare, tiny["model"]())
    whole, left = (bundle / file_names.WEIGHTS).read_bytes(), (bare / KEPT).stat().st_size
    assert not (bare / file_names.WEIGHTS).exists() and left < len(whole)
    again = with_weights(bare, tiny["model"](), tmp_path / "again")
    assert (again / file_names.WEIGHTS).read_bytes() == whole and not (again / KEPT).exists()
    other = tiny["model"]()
    with torch.no_grad():
        next(other.parameters()).add_(0.01)
    with pytest.raises(ValueError, match="other weights"):
        with_weights(bare, other, tmp_path / "other")
    leave_out_weights(again, other)  # different weights stay in the bundle
    assert (with_weights(again, other, tmp_path / "third") / file_names.WEIGHTS).read_bytes() == whole
