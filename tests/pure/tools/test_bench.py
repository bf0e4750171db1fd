"""`cgcompile bench` turns the messages of its processes into medians, ratios, tables and a picture. Processes may fail."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from cgbundle.format import file_names, safetensors_files
from cgbundle.format.schema import Dimension, Manifest, TensorSpec
from cgcompile.bundle import manifest_text
from cgcompile.tools.bench import baselines
from cgcompile.tools.bench.bundle_worker import BundleModel
from cgcompile.tools.bench.measure import some
from cgcompile.tools.bench.plot import svg
from cgcompile.tools.bench.processes import WorkerProcess
from cgcompile.tools.bench.protocol import PHASES, Laps, reason
from cgcompile.tools.bench.report import Benchmark, Error, Machine, Memory, Timing, Way, ratio
from cgcompile.tools.bench.worker import time_device, time_dispatch
from cgcompile_cli.benchmark import precise
from cgcompile_cli.main import app
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import POSITIONAL, proof, write_bundle
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

SVG = "{http://www.w3.org/2000/svg}"


def way(name: str, scale: float, why: str = "") -> Way:
    """Returns three starts. Their phases take 1 to 5 times `scale` tenths of a second; those of the second start take twice as
    long."""
    start = tuple([scale * (index + 1) / 10 for index in range(len(PHASES))])
    return Way(
        name=name,
        starts=(start, tuple([2 * seconds for seconds in start]), start),
        timings=tuple([Timing(what="call", key=(size,), seconds=(scale * 1e-5, scale * 4e-5, scale * 2e-5)) for size in (1, 8)]),
        memory=Memory(resident=int(scale * 2**20), own=2**19, device=-1),
        errors=tuple([Error(key=(size,), error=1e-6, allowed=1e-4, exact=False) for size in (1, 8)]),
        why=why,
    )


REPORT = Benchmark(
    path="tiny.cgb", name="tiny", target="cpu",
    machine=Machine(
        processor="a processor", cores=2, gpu="", driver=0, versions=(("torch", "2.13.0"),), load=0.1, date="2026-11-21T10:00:00Z"
    ),
    keys=((1,), (8,)), names=("batch=1", "batch=8"), recorded=2, rounds=3,
    ways=(
        way("bundle", 1.0), way("eager", 4.0),
        Way(name="ort", starts=(), timings=(), memory=None, errors=(), why="skipped: ONNX Runtime is not installed"),
    ),
    notes=(("PyTorch", "baselines run the module of m.py"),), interrupted=False,
)  # fmt: skip


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_start_is_the_sum_of_its_phases_and_the_last_is_not_part_of_the_first_output() -> None:
    eager = REPORT.ways[1]
    assert eager.firsts() == pytest.approx([4.0, 8.0, 4.0]) and eager.readies() == pytest.approx([6.0, 12.0, 6.0])
    assert eager.phase(PHASES.index("load")) == pytest.approx(1.2)


def test_ratios_are_those_of_medians_and_none_without_one() -> None:
    assert ratio([4.0, 100.0, 5.0], [1.0, 2.0, 50.0]) == 2.5
    assert ratio([], [1.0]) is None and ratio([1.0], []) is None and ratio([1.0], [0.0]) is None


@pytest.mark.parametrize(
    ("error", "allowed", "exact", "wrong"),
    [
        (0.0, 0.0, True, False), (1e-5, 1e-4, False, False), (1e-4, 1e-4, False, False), (2e-4, 1e-4, False, True),
        (0.0, 0.0, False, True), (float("inf"), 1e-4, False, True), (float("nan"), 1e-4, False, True),
    ],
)  # fmt: skip
def test_outputs_are_wrong_beyond_the_bound_and_where_bits_were_promised(
    error: float, allowed: float, exact: bool, wrong: bool
) -> None:
    assert Error(key=(1,), error=error, allowed=allowed, exact=exact).wrong is wrong


def test_a_wrong_output_is_told_with_way_int_key_and_error() -> None:
    bad = replace(REPORT.ways[1], errors=(Error(key=(8,), error=0.5, allowed=1e-4, exact=False),))
    assert replace(REPORT, ways=(REPORT.bundle, bad)).wrong() == ["eager: outputs at batch=8 differ by 5.0e-01, allowed 1.0e-04"]
    assert REPORT.wrong() == []


def test_json_holds_phases_ratios_and_no_infinity() -> None:
    lost = replace(REPORT.ways[1], errors=(Error(key=(8,), error=float("inf"), allowed=1e-4, exact=False),))
    report = json.loads(json.dumps(replace(REPORT, ways=(REPORT.bundle, lost)).plain(), allow_nan=False))
    eager = report["ways"][1]
    assert list(eager["starts"][0]) == list(PHASES) and eager["ratio"] == pytest.approx(4.0)
    assert eager["timings"][1]["ratio"] == pytest.approx(4.0) and eager["errors"][0]["error"] == "inf"
    assert report["wrong"] == ["eager: outputs at batch=8 differ by inf, allowed 1.0e-04"]


@given(st.lists(st.integers(1, 9999), min_size=1, max_size=40, unique=True), st.integers(2, 6))
def test_some_int_keys_are_the_smallest_the_largest_and_others_in_order(sizes: list[int], limit: int) -> None:
    keys = [(size,) for size in sizes]
    sample = some(keys, limit)
    assert len(sample) == min(limit, len(keys)) == len(set(sample))
    assert [key for key in keys if key in sample] == sample and {keys[0], keys[-1]} <= set(sample)


def test_laps_count_what_is_not_skipped() -> None:
    laps = Laps(started=time.clock_gettime(time.CLOCK_MONOTONIC) - 1000.0)
    laps.mark("start")
    laps.skip()
    laps.mark("load")
    laps.mark("load")
    assert list(laps.seconds) == ["start", "load"]
    assert 1000.0 <= laps.seconds["start"] < 1500.0 and laps.seconds["load"] < 500.0


# --- baselines ----------------------------------------------------------------------------------------------------------


def test_baselines_are_chosen_by_name_and_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object())
    assert baselines.choose((), "cuda") == (("eager", "compile", "compile-warm", "manual", "ort"), {})
    assert baselines.choose((), "cpu") == (("eager", "compile", "compile-warm", "ort"), {})
    assert baselines.choose(("manual", "eager"), "cpu")[0] == ("eager",)
    assert "for the CPU" in baselines.choose(("manual", "eager"), "cpu")[1]["manual"]


def test_a_missing_package_skips_its_baselines_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None if name in ("torch", "onnxscript") else object())
    live, why = baselines.choose((), "cpu")
    assert live == () and why["eager"] == "skipped: torch is not installed"
    assert why["ort"] == "skipped: exporting for ONNX Runtime needs onnxscript"


def test_an_unknown_baseline_is_refused_with_the_list() -> None:
    with raises("baseline-unknown", match="no baseline 'jax': there are eager, compile, compile-warm, manual, ort"):
        baselines.choose(("eager", "jax"), "cpu")


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that starts a process with the given code."""
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))

    def start(code: str) -> WorkerProcess:
        (tmp_path / "measured.py").write_text("import os, sys, time\nfrom cgcompile.tools.bench.protocol import fail, say\n" + code)
        return WorkerProcess("measured", log=tmp_path / "log")

    return start


def test_answers_are_found_among_what_a_model_prints(start: Any) -> None:
    with start("print('loading'); say({'laps': 1}); print('{}')\nfor line in sys.stdin: say({'seconds': line.strip()})") as process:
        assert process.answer() == {"laps": 1}
        assert [process.ask("call 0"), process.ask("call 1")] == [{"seconds": "call 0"}, {"seconds": "call 1"}]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("sys.excepthook = fail\nraise ValueError('\\n out of luck\\nmore')", "ValueError: out of luck"),
        ("sys.excepthook = fail\nraise SystemExit(3)", "ended with exit status 3"),
        ("print('what', file=sys.stderr); sys.exit(4)", "ended with exit status 4: what"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9, as the system does when memory runs out"),
        ("os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("", "ended with exit status 0"),
    ],
)
def test_a_process_that_fails_says_why_in_one_line(start: Any, code: str, says: str) -> None:
    with start(code) as process, raises("baseline-failed") as raised:
        process.answer()
    assert str(raised.value) == says


def test_a_process_that_dies_between_requests_says_why(start: Any) -> None:
    with start("say({}); sys.stdin.readline(); sys.exit(5)") as process:
        process.answer()
        with raises("baseline-failed", match="exit status 5"):
            process.ask("call 0")


def test_leaving_ends_a_process_and_what_it_started(start: Any, tmp_path: Path) -> None:
    mark = tmp_path / "worker"
    code = f"import subprocess\nworker = subprocess.Popen(['sleep', '600'])\nopen({str(mark)!r}, 'w').write(str(worker.pid))\n"
    with start(code + "say({})\ntime.sleep(600)") as process:
        process.answer()
    state = Path(f"/proc/{mark.read_text()}/stat")
    until = time.monotonic() + 60
    while time.monotonic() < until:  # it takes a moment until the process is gone, or a zombie
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the worker lives on")


def test_a_reason_is_the_kind_and_the_first_line() -> None:
    assert reason(RuntimeError, RuntimeError("\n\n CUDA out of memory. \n hint")) == "RuntimeError: CUDA out of memory."
    assert reason(MemoryError, MemoryError()) == "MemoryError"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Returns a function that runs the command with a given report. `call.options` holds the library's options."""
    bundle = write_bundle(tmp_path / "tiny.cgb")

    def run(report: Benchmark, *arguments: str) -> Result:
        def measure(path: str, **options: Any) -> Benchmark:
            run.options = {"path": path, **options}  # type: ignore[attr-defined]
            return report

        monkeypatch.setattr("cgcompile.tools.bench.measure.measure", measure)
        return CliRunner().invoke(app, ["bench", str(bundle), *arguments], prog_name="cgcompile", env={"COLUMNS": "80"})

    return run


def test_a_report_in_full_fits_80_columns(call: Any) -> None:
    result = call(REPORT, "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "bundle    tiny, cpu, 3 rounds, medians; ratio = baseline / bundle",
        "int_keys  batch=1; batch=8",
        "machine   a processor, 2 cores, load average 0.1",
        "with      torch 2.13.0",
        "date      2026-11-21T10:00:00Z",
        "",
        "cold start: process start to first output, then to all int_keys ready; seconds",
        "        ratio  first    min-max  start  import   load   call  ready",
        "bundle   1.00   1.00  1.00-2.00  0.100   0.200  0.300  0.400   1.50",
        "eager    4.00   4.00  4.00-8.00  0.400   0.800   1.20   1.60   6.00",
        "",
        "call: time of one call, warm",
        "int_key          ratio   median      min      max",
        "batch=1  bundle   1.00  20.0 us  10.0 us  40.0 us",
        "         eager    4.00  80.0 us  40.0 us   160 us",
        "batch=8  bundle   1.00  20.0 us  10.0 us  40.0 us",
        "         eager    4.00  80.0 us  40.0 us   160 us",
        "",
        "memory of the process, every int_key ready",
        "        ratio  resident  of it unshared",
        "bundle   1.00   1.0 MiB       512.0 KiB",
        "eager    4.00   4.0 MiB       512.0 KiB",
        "",
        "ort      skipped: ONNX Runtime is not installed",
        "outputs  right for all; largest error 1.0e-06 (bundle; allowed 1.0e-04)",
        "PyTorch  baselines run the module of m.py",
    ]


def gpu(scale: float, name: str) -> Way:
    cpu_way = way(name, scale)
    timings = [replace(timing, what=what) for timing in cpu_way.timings for what in ("device", "dispatch")]
    return replace(cpu_way, timings=tuple(timings), memory=Memory(resident=2**20, own=2**19, device=int(scale * 2**20)))


GPU = replace(
    REPORT, target="cuda", machine=replace(REPORT.machine, gpu="NVIDIA H200", driver=13000),
    ways=(gpu(1.0, "bundle"), gpu(3.0, "manual")),
)  # fmt: skip


def test_a_gpus_tables_say_its_time_the_cpus_and_its_memory(call: Any) -> None:
    text = call(GPU, "--quiet").stdout
    assert "machine   NVIDIA H200, CUDA driver 13.0; a processor, 2 cores" in text
    assert text.index("call on the GPU") < text.index("dispatch: CPU time of a call")
    assert re.search(r"GPU, beside the context +resident", text) and re.search(r"manual +3.00 +3.0 MiB +1.0 MiB", text)
    assert max(map(len, text.splitlines())) <= 80


def test_options_reach_the_library(call: Any) -> None:
    call(REPORT, "--quiet", "--against", "eager,compile", "--size", "batch=4", "--size", "1", "--rounds", "2", "--model", "m.py")
    assert {name: call.options[name] for name in ("against", "keys", "rounds", "model", "progress")} == {
        "against": ["eager", "compile"], "keys": [(4,), (1,)], "rounds": 2, "model": "m.py", "progress": None,
    }  # fmt: skip


def test_wrong_outputs_fail_and_the_tables_stand(call: Any) -> None:
    bad = replace(REPORT.ways[1], errors=(Error(key=(8,), error=0.5, allowed=1e-4, exact=False),))
    result = call(replace(REPORT, ways=(REPORT.bundle, bad)), "--quiet")
    assert result.exit_code == 1 and "eager    4.00" in result.stdout and "outputs  WRONG in 1 comparison of 3" in result.stdout
    assert result.stderr == "error: wrong outputs: eager: outputs at batch=8 differ by 5.0e-01, allowed 1.0e-04\n"


def test_an_interrupt_leaves_what_was_measured(call: Any) -> None:
    unfinished = tuple([replace(way, timings=(), memory=None) for way in REPORT.ways])
    result = call(replace(REPORT, ways=unfinished, interrupted=True), "--quiet")
    assert result.exit_code == 130 and "eager    4.00" in result.stdout and "call: time" not in result.stdout
    assert result.stderr == "error: interrupted: what was measured by then is above\n"
    nothing = tuple([replace(way, starts=()) for way in unfinished])
    result = call(replace(REPORT, ways=nothing, interrupted=True), "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "error: interrupted\n")


def test_json_goes_to_stdout_in_the_place_of_the_tables(call: Any) -> None:
    report = json.loads(call(REPORT, "--quiet", "--json").stdout)
    assert (report["name"], report["ways"][1]["name"]) == ("tiny", "eager")


def test_a_file_that_cannot_be_written_is_found_before_measuring(call: Any, tmp_path: Path) -> None:
    result = call(REPORT, "--plot", str(tmp_path / "nowhere" / "file"))
    assert result.exit_code == 2 and "cannot be written" in result.stderr and not hasattr(call, "options")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (31.24e-6, "31.2 us"),
        (1.5e-6, "1.50 us"),
        (0.168226, "168 ms"),
        (0.25, "250 ms"),
        (2.0, "2.00 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert precise(seconds) == text


# --- the picture ------------------------------------------------------------------------------------------------------


def test_the_picture_is_xml_whose_bars_are_as_long_as_their_medians() -> None:
    root = ElementTree.fromstring(svg(REPORT))
    bars = [float(rect.get("width", "")) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "load"]
    legend, ours, theirs = bars
    assert theirs / ours == pytest.approx(4.0, rel=0.02) and legend == 10
    right = [float(rect.get("x", "")) + float(rect.get("width", "")) for rect in root.iter(f"{SVG}rect")]
    assert max(right) <= float(root.get("width", ""))
    assert {"bundle", "eager", "time of a call, batch=8: microseconds"} <= {label.text for label in root.iter(f"{SVG}text")}


def test_the_picture_loads_nothing_and_no_name_can_drive_it() -> None:
    hostile = "x</svg><script>alert(1)</script>&\x1b[2J"
    text = svg(replace(REPORT, name=hostile, names=(hostile, "batch=8")))
    root = ElementTree.fromstring(text)
    assert not list(root.iter(f"{SVG}script")) and "\x1b" not in text
    assert set(re.findall(r"https?://\S+?(?=[\"' ])", text)) == {"http://www.w3.org/2000/svg"}


def test_the_picture_of_a_gpus_report_has_all_panels() -> None:
    titles = {label.text for label in ElementTree.fromstring(svg(GPU)).iter(f"{SVG}text") if label.get("class") == "title"}
    assert {"GPU time of a call, batch=1: microseconds", "CPU time of a call, batch=8: microseconds"} <= titles
    assert "memory on the GPU beside the context: MiB" in titles


# --- apart ------------------------------------------------------------------------------------------------------------


def test_nothing_of_a_benchmark_is_imported_by_a_build_or_by_serving() -> None:
    root = ROOT
    folders = {"bench", "generation"}
    files = [path for folder in ("cgcompile", "bundles") for path in (root / folder).rglob("*.py") if not folders & {*path.parts}]
    imports = re.compile(r"^\s*(from|import) .*\b(bench|generation)\b", re.MULTILINE)
    assert imports.search("    from .bench import measure") and len(files) > 100
    assert not [path for path in files if imports.search(path.read_text(encoding="utf-8"))]


def test_what_runs_before_the_clocks_first_mark_imports_nothing() -> None:
    """All measured times would include other imports of the worker. So it may only import modules that the interpreter has already
    loaded."""
    code = "import sys; before = set(sys.modules); import cgcompile.tools.bench.worker; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", f"import runpy, typing\n{code}"], capture_output=True, text=True, check=True)
    extra = {name for name in done.stdout.split() if not name.startswith("cgcompile")}
    assert not extra & {"json", "dataclasses", "inspect", "subprocess", "statistics", "torch", "cgbundle"}, extra


# --- the bundle's own process on a GPU --------------------------------------------------------------------------------


class TimedDriver(FakeDriver):
    """The fake driver with the functions for measuring: events are 2 ms apart, and used memory is not free."""

    def do_cuMemGetInfo(self) -> tuple[int, int, int]:
        used = sum(len(thing) for thing in self.live.values() if isinstance(thing, ctypes.Array))
        return 0, 2**30 - used, 2**30

    def do_cuEventElapsedTime(self, start: int, end: int) -> float:
        return 2.0


def gpu_bundle(folder: Path) -> Manifest:
    """Writes a complete bundle of the fake driver's kernels: y[batch, FLOATS] of x[batch, FLOATS]."""
    bare = cuda_bundles.write(folder, b"an image")
    self_test: dict[str, safetensors_files.Tensor] = {}
    for size in cuda_bundles.KEYS:
        input_data = cuda_bundles.inputs(size)
        for kind, values in (("input", input_data), ("output", cuda_bundles.expected(input_data))):
            self_test[file_names.self_test_entry((size,), kind, 0)] = ("float32", (size, cuda_bundles.FLOATS), values.tobytes)
    with open(folder / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(file, self_test)
    (folder / file_names.PROGRAM).write_bytes(b"PK, but not really")
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", cuda_bundles.FLOATS), order=(0, 1))
    proofs = tuple([proof(size, tolerance=1e-4) for size in cuda_bundles.KEYS])
    manifest = edited(
        bare, inputs=(spec,), outputs=(replace(spec, name="y"),), call={"call": [["x", {"tensor": 0}]]},
        parameters=(POSITIONAL,), result={"tensor": 0},
        dimensions=(Dimension(name="batch", sizes=cuda_bundles.KEYS, pad="no", chunk=False, reason="a test"),),
        self_test=replace(bare.entries[0].self_test, compare="bits", bounds=(1e-4,), proofs=proofs),
        files=manifest_text.describe_files(str(folder)),
    )  # fmt: skip
    (folder / file_names.MANIFEST).write_bytes(manifest_text.encode(manifest))
    return manifest


@pytest.mark.parametrize("stays", [False, True])
def test_the_bundles_process_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    """Cold starts have inputs and outputs on the host. Timed calls have tensors on the GPU, and copy none to the host."""
    fake = TimedDriver()
    install(monkeypatch, fake)
    folder = tmp_path / "tiny.cgb"
    manifest = gpu_bundle(folder)
    job = {
        "bundle": str(folder),
        "target": "cuda",
        "entry": "forward",
        "keys": [[size] for size in cuda_bundles.KEYS],
        "state": False,
    }
    served = BundleModel(job, Laps(started=0.0), stays)
    served.call(0)
    served.settle(1)
    assert [served.differs(key)["exact"] for key in (0, 1)] == [True, True]
    about = served.about()
    assert (about["gpu"], about["driver"]) == ("Fake GPU", 13000)
    assert ("device" in about) is stays
    if stays:
        assert about["device"] >= dict(manifest.memories)["weights"]
        run = served.prepare(1)
        before = len(fake.calls)
        result = run()
        driver_calls = fake.calls[before:]
        assert "cuGraphLaunch" in driver_calls and not [name for name in driver_calls if "DtoH" in name]
        assert result.tensor.device == 0 and result.shape == (cuda_bundles.KEYS[1], cuda_bundles.FLOATS)
        assert served.elapsed(run, 4) == 0.002
        assert time_device(served, run) > 0 and time_dispatch(served, run) > 0
