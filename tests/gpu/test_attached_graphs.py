"""Graphs of a hand-written engine: two processes save them, a third attaches them; the expected results come from a process that
captures them again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.helpers.places import ROOT  # noqa: E402

Answers = dict[str, dict[str, Any]]


def process(role: str, folder: Path) -> dict[str, Any]:
    """Returns the JSON of one process of the engine."""
    paths = [str(ROOT), str(ROOT / "bundles"), os.environ.get("PYTHONPATH", "")]
    caches = {f"{name}_CACHE_DIR": str(folder / name) for name in ("TORCHINDUCTOR", "TRITON")}
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.gpu.helpers.engine", role, str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{role}: {done.stdout[-6000:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert "error" not in answer, f"{answer}\n{done.stderr[-3000:]}"
    return answer


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("engine")
    return {role: process(role.rstrip("12"), folder) for role in ("save1", "save2", "attach")}


def test_the_first_process_leaves_a_recording_and_the_second_a_bundle(answers: Answers) -> None:
    assert [answers[role]["kind"] for role in ("save1", "save2")] == ["recording", "bundle"]
    assert answers["save2"]["nodes"] > 200
    assert len({answers[role]["start"] for role in ("save1", "save2", "attach")}) == 3, "the same addresses prove nothing"


def test_a_third_process_gets_the_same_bits_for_a_thousand_steps(answers: Answers) -> None:
    assert answers["attach"]["same"] and answers["attach"]["moved"]
    assert answers["attach"]["pools"]


def test_saving_leaves_the_tensors_as_they_were(answers: Answers) -> None:
    assert answers["save1"]["restored"] and answers["save2"]["restored"]


def test_kernels_that_begin_early_do_so_again_and_no_other(answers: Answers) -> None:
    assert answers["attach"]["early"] == [1, 0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pools", ""),
        ("programmatic", ""),
        ("unverified", ""),
        ("filled", "proof-failed: the fresh process that replays the graphs: graph 2: tensor 'y' holds other bits"),
        ("table", "pointer-in-tensor: tensor 'table' holds an address at byte 0, of tensor 'x'"),
        ("unnamed", "memory-unnamed: graph 1, node "),
        ("random", "memory-unnamed: graph 1, node "),
        ("host", "copy-refused: graph 1, node "),
        ("forgotten", "graph-refused: graph 1: torch does not give its nodes"),
    ],
)
def test_what_a_bundle_cannot_hold_is_refused_with_the_kernel(answers: Answers, name: str, text: str) -> None:
    refused = answers["save2"]["refused"][name]
    assert refused == text if not text else refused.startswith(text), refused
    if "node " in text:
        assert "engine.py:" in refused, "the line of Python"
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cache", "tensors-unlike: tensor 'cache.0': expected bfloat16 [2, 160, 16, 8, 128], got bfloat16 [2, 80, 16, 8, 128]"),
        ("layout", "tensors-unlike: tensor 'head': expected bfloat16 [8192, 1024], got bfloat16 [8192, 1024], strides [1, 8192]"),
        ("missing", "tensors-unlike: tensor '"),
        ("unverified", "not-verified: "),
        ("driver", "driver-differs: the graphs were saved with a driver for CUDA "),
    ],
)
def test_another_process_state_is_refused_in_a_line(answers: Answers, name: str, text: str) -> None:
    refused = answers["attach"]["refused"][name]
    assert refused.startswith(text) and "\n" not in refused, refused
