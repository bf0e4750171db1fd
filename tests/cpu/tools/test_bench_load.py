"""`cgcompile bench URL --generate`: a load of requests, with the metric names of vLLM's `bench serve`."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cgcompile.tools.generation.load import Answered, Load, planned, read_load, summary
from cgcompile_cli import main
from tests.cpu.serve.test_openai_server import Running, folder, running
from tests.helpers.raising import raises

__all__ = ["folder"]


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    with running(folder) as started:
        yield started


def test_a_server_answers_a_load(server: Running) -> None:
    words = "requests=20,prompt=1-30,answer=2-9,clients=6,rate=500"
    arguments = ["bench", f"http://127.0.0.1:{server.port}", "--generate", "--quiet", "--load", words]
    run = CliRunner().invoke(main.app, [*arguments, "--json"])
    assert run.exit_code == 0, run.output
    numbers = json.loads(run.stdout)
    plan = planned(read_load(words))
    assert (numbers["completed"], numbers["failed"], numbers["model_id"]) == (20, 0, "script")
    assert numbers["total_input_tokens"] == sum(len(request.prompt) for request in plan)
    assert numbers["total_output_tokens"] == sum(request.answer for request in plan)
    assert 0 < numbers["median_ttft_ms"] <= numbers["p99_ttft_ms"] <= numbers["p99_e2el_ms"]
    table = CliRunner().invoke(main.app, arguments)
    assert table.exit_code == 0 and "20 of 20 requests" in table.stdout and "to the first token" in table.stdout
    server.until_free()


def test_requests_that_fail_are_told(server: Running) -> None:
    arguments = ["bench", f"http://127.0.0.1:{server.port}", "--generate", "--load", "requests=2,prompt=500,answer=1"]
    run = CliRunner().invoke(main.app, arguments)
    assert run.exit_code == 1 and "2 requests failed: ValueError: HTTP/1.1 400" in " ".join(run.stderr.split())


def test_arrivals() -> None:
    fixed = planned(Load(requests=4, rate=2.0, arrivals="fixed"))
    assert [request.after for request in fixed] == [0.0, 0.5, 1.0, 1.5]
    drawn = [request.after for request in planned(Load(requests=4000, rate=10.0))]
    gaps = [later - sooner for sooner, later in itertools.pairwise(drawn)]
    assert 0.09 < statistics.fmean(gaps) < 0.11 and 0.09 < statistics.pstdev(gaps) < 0.11, "exponential"
    assert all(request.after == 0 for request in planned(Load()))


def test_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("5 2\n7, 3\n\n")
    plan = planned(read_load(f"requests=3,shared=4,lengths={tmp_path / 'lengths'}"))
    assert [(len(request.prompt), request.answer) for request in plan] == [(9, 2), (11, 3), (9, 2)]
    assert len({request.prompt[:4] for request in plan}) == 1 and len({request.prompt for request in plan}) == 3


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("rate=fast", "--load rate=fast: expected words of requests=256,"),
        ("size=3", "--load size=3: expected words of"),
        ("prompt=9-3", "--load prompt=9-3: numbers must be positive, and ranges ascending"),
        ("rate=0", "--load rate=0: numbers must be positive"),
        ("lengths=/none", "/none: No such file or directory"),
    ],
)
def test_an_invalid_load(words: str, text: str) -> None:
    with raises("option-invalid", match=text):
        read_load(words)


def test_the_summary_of_a_load() -> None:
    answers = [Answered((0.1, 0.2, 0.4), 0.4, 10, 3), Answered((0.3,), 0.3, 5, 1), Answered((), 0.0, 5, 0, "OSError: gone")]
    numbers = summary(Load(requests=3), "m", answers, 2.0)
    assert (numbers["request_throughput"], numbers["output_throughput"], numbers["total_token_throughput"]) == (1.0, 2.0, 9.5)
    assert numbers["mean_ttft_ms"] == pytest.approx(200) and numbers["mean_tpot_ms"] == pytest.approx(150)
    assert numbers["median_itl_ms"] == pytest.approx(150) and numbers["p99_e2el_ms"] == pytest.approx(399)
    assert numbers["errors"] == ["OSError: gone"] and numbers["request_rate"] == "inf"
