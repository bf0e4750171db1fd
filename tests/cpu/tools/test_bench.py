"""A real `cgcompile bench` of a tiny model, and the bundle's program as Python for its baselines."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from cgbundle.format import archive, file_names, safetensors_files
from cgcompile.bundle import emit, manifest_text
from cgcompile.export.export import export
from cgcompile.export.exported import Exported
from cgcompile.export.weights import weight_tensors
from cgcompile.model.flat_module import run_eager
from cgcompile.model.load import load_source
from cgcompile.model.source import sample
from cgcompile.targets.cpu.build import weight_rows
from cgcompile.targets.weights import write_weights
from cgcompile.tools.bench.export_program import load, python_source
from cgcompile.tools.bench.measure import measure
from cgcompile.tools.bench.protocol import PHASES, Laps
from cgcompile.tools.bench.torch_worker import InitialBuffers, ProgramModule, TorchModel, UserModule
from cgcompile.util.progress import Event
from cgcompile_cli.main import app
from tests.cpu.models import Everything, Image, everything_inputs, image_inputs
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], prog_name="cgcompile", env={"COLUMNS": "80"})


def test_a_bundle_beside_eager(bundle: Path, tmp_path: Path) -> None:
    plot = tmp_path / "bench.svg"
    result = bench(bundle, "--rounds", 1, "--against", "eager", "--json", "--plot", plot)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    ours, theirs = report["ways"]
    assert (ours["name"], theirs["name"], ours["why"], theirs["why"]) == ("bundle", "eager", "", "")
    for way in (ours, theirs):
        (start,) = way["starts"]
        assert list(start) == list(PHASES) and all(start[phase] > 0 for phase in PHASES)
        assert [(timing["what"], timing["key"], len(timing["seconds"])) for timing in way["timings"]] == [
            ("call", [1], 1),
            ("call", [4], 1),
        ]
        assert all(timing["seconds"][0] > 0 for timing in way["timings"])
        assert [error["key"] for error in way["errors"]] == [[1], [4]] and way["memory"]["resident"] > way["memory"]["own"] > 0
    assert theirs["starts"][0]["import"] > ours["starts"][0]["import"]
    assert result.stderr.startswith("measure           ...  tiny beside eager, 1 round\n")
    assert report["wrong"] == [] and not report["interrupted"] and report["machine"]["gpu"] == ""
    assert plot.read_text().startswith("<svg")


def other_expectations(bundle: Path, path: Path) -> Path:
    """Returns a valid bundle whose self-test expects wrong outputs at batch 4."""
    shutil.copytree(bundle, path)
    file = path / file_names.SELF_TEST
    stored = safetensors_files.Mapped(str(file), file_names.SELF_TEST)
    tensors: dict[str, safetensors_files.Tensor] = {}
    for name, entry in stored.entries.items():
        data = bytearray(stored.data(name))
        if name == file_names.self_test_entry((4,), "output", 0):
            data[3] ^= 0x40  # an exponent bit of the first element
        tensors[name] = (entry.dtype, entry.shape, lambda data=data: bytes(data))
    with open(file, "wb") as target:
        safetensors_files.write(target, tensors)
    stored.close()
    manifest = replace(archive.read_manifest(str(path)), files=manifest_text.describe_files(str(path)))
    (path / file_names.MANIFEST).write_bytes(manifest_text.encode(manifest))
    return path


def test_wrong_outputs_fail_naming_way_int_key_and_error(bundle: Path, tmp_path: Path) -> None:
    """Here the bundle's outputs are wrong; the next test has a wrong baseline."""
    result = bench(other_expectations(bundle, tmp_path / "other.cgb"), "--rounds", 1, "--against", "manual", "--quiet")
    assert result.exit_code == 1 and "outputs  WRONG in 1 comparison of 2" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: wrong outputs: bundle: outputs at batch=4 differ by ")


def test_a_model_of_other_weights_is_a_wrong_way(bundle: Path, model_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(model_file.read_text().replace("manual_seed(0)", "manual_seed(1)"))
    report = measure(bundle, against=["eager"], keys=[(1,)], rounds=1, model=str(other))
    assert [sentence.partition(" differ")[0] for sentence in report.wrong()] == ["eager: outputs at batch=1"]
    assert ("PyTorch", f"baselines run the module of {other}") in report.notes


def test_a_baseline_that_fails_says_why_and_the_others_stand(bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import torch\n"
        "class Broken(torch.nn.Module):\n"
        "    def forward(self, input):\n"
        "        raise MemoryError('no room\\nfor this')\n"
        "def model(): return Broken()\n"
        "def inputs(batch): return (torch.randn(batch, 6),)\n"
    )
    result = bench(bundle, "--rounds", 1, "--against", "eager,manual", "--model", broken, "--quiet")
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert "eager    failed: MemoryError: no room" in lines
    assert any(line.startswith("manual   skipped: it captures CUDA graphs") for line in lines)
    assert sum(line.startswith("bundle   1.00") for line in lines) == 2  # in the tables of starts and of memory


def test_an_interrupt_keeps_what_was_measured(bundle: Path) -> None:
    def watch(event: Event) -> None:
        if event.stage == "calls":
            raise KeyboardInterrupt

    report = measure(bundle, against=["manual"], rounds=1, progress=watch)
    assert report.interrupted and len(report.bundle.starts) == 1 and not report.bundle.timings


def test_a_model_that_is_not_there_is_found_at_once(bundle: Path) -> None:
    with raises("source-missing", match=r"nowhere\.py: no such model file"):
        measure(bundle, model="nowhere.py")


# --- the program as Python --------------------------------------------------------------------------------------------


class Branch(nn.Module):
    """A data-dependent branch, whose two sides are graphs inside the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,)) * float("inf")


class Counter(nn.Module):
    """A buffer that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + self.seen


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3),)


def job(folder: Path, exported: Exported, **more: Any) -> dict[str, Any]:
    """Returns a worker's job: the program is saved without weights, and the weights are in their own file."""
    tensors = weight_tensors(exported.programs.first)
    emit.write_program(folder / file_names.PROGRAM, exported.programs.first)
    rows = write_weights(folder / file_names.WEIGHTS, tensors, weight_rows(tensors, ()))
    text = python_source(load(str(folder / file_names.PROGRAM), "cpu"), {row.name: row for row in rows})
    (folder / "program.py").write_text(text)
    return {
        "program": str(folder / "program.py"), "weights": str(folder / file_names.WEIGHTS), "target": "cpu", "state": False, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "inputs", "sizes"),
    [
        (Everything(), everything_inputs, {"batch": (2, 5)}),
        (Image(), image_inputs, {"batch": (1, 2), "side": (8, 16)}),
        (Branch(), rows, {"batch": (2, 5)}),
    ],
    ids=["nested, tied, of many dtypes", "channels last", "a condition"],
)
def test_the_program_as_python_gives_eagers_bits(
    tmp_path: Path, model: nn.Module, inputs: Any, sizes: dict[str, tuple[int, ...]]
) -> None:
    source = load_source(model, inputs)
    exported = export(source, sizes)
    written = ProgramModule(job(tmp_path, exported))
    for pick in (0, -1):
        tensors = sample(source, {name: values[pick] for name, values in sizes.items()}).tensors
        args, kwargs = written.arrange(tensors)
        with torch.no_grad():
            actual = written.outputs(written.module(*args, **kwargs))
        expected = run_eager(exported.flat, tensors).outputs
        assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    written = ProgramModule(job(tmp_path, export(load_source(Everything(), everything_inputs), {"batch": (2, 5)})))
    names = [name for name, _ in written.module.named_parameters(remove_duplicate=False)]
    assert len(names) > len(list(written.module.parameters()))  # the embedding and the head


def test_buffers_that_calls_change_are_put_back(tmp_path: Path) -> None:
    program = ProgramModule(job(tmp_path, export(load_source(Counter(), rows), {"batch": (2, 5)}), state=True))
    buffers = InitialBuffers(program.module)
    x = torch.zeros(2, 3)
    first, second = (program.outputs(program.module(x))[0] for _ in range(2))
    buffers.restore()
    assert [float(output[0, 0]) for output in (first, second, program.outputs(program.module(x))[0])] == [1.0, 2.0, 1.0]


def test_a_program_whose_operators_are_unknown_here_is_no_way(tmp_path: Path) -> None:
    (tmp_path / file_names.PROGRAM).write_bytes(b"PK, but not really\n")
    with raises("baseline-unwritable", match=r"program\.pt2: torch\.export\.load failed"):
        load(str(tmp_path / file_names.PROGRAM), "cpu")


CALLED = """
import torch
class Called(torch.nn.Module):
    def forward(self, a, *rest, scale=2, extra=None, **more):
        return {"sum": (a + sum(rest) + extra["b"] + more["c"]) * scale, "a": [a]}
def model(): return Called()
def inputs(batch): return (torch.ones(batch),)
"""


def test_a_users_module_is_called_as_its_forward_wants(tmp_path: Path) -> None:
    path = tmp_path / "called.py"
    path.write_text(CALLED)
    tensor = [{"tensor": index} for index in range(5)]
    call = [
        ["a", tensor[0]], ["rest_0", tensor[1]], ["rest_1", tensor[2]], ["scale", {"value": 3}],
        ["extra", {"dict": [["b", tensor[3]]]}], ["c", tensor[4]],
    ]  # fmt: skip
    user = UserModule({"model": str(path), "target": "cpu", "entry": "forward", "state": False, "train": False, "call": call})
    tensors = [torch.tensor([float(10**index)]) for index in range(5)]
    args, kwargs = user.arrange(tensors)
    actual = user.outputs(user.module(*args, **kwargs))
    assert [output.tolist() for output in actual] == [[3 * 11111.0], [1.0]]


def test_the_compilers_worker_serves_in_this_process_too(bundle: Path, model_file: Path) -> None:
    """Calls in this process the function that a new process would run. It takes the self-test's inputs and returns outputs."""
    manifest = archive.read_manifest(str(bundle))
    job = {
        "bundle": str(bundle), "target": "cpu", "entry": "forward",
        "keys": [[4]], "orders": [[0, 1]], "outputs": 1, "mutated": [], "state": False,
        "calls": 1, "call": manifest.entries[0].call["call"], "model": str(model_file), "train": False,
    }  # fmt: skip
    try:
        served = TorchModel("eager", job, Laps(started=0.0))
        served.call(0)
        served.settle(0)
        assert max(served.differs(0)["errors"]) < 1e-5 and served.prepare(0)() is not None and served.about() == {}
    finally:
        torch.set_grad_enabled(True)


GOLDEN = GOLDEN / "v1" / "mlp.cgb"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU of the bundle may be here")
def test_a_bundle_that_this_machine_cannot_run_is_the_environments_fault() -> None:
    result = bench(GOLDEN, "--rounds", 1, "--against", "eager", "--quiet")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: the bundle does not run here: ")


def test_a_program_without_outputs_writes_to_its_buffers(tmp_path: Path) -> None:
    class Forgetting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(3))

        def forward(self, x: torch.Tensor) -> None:
            self.seen.mul_(x.sum(0))

    job(tmp_path, export(load_source(Forgetting(), rows), {"batch": (2, 5)}))
    names: dict[str, Any] = {}
    exec((tmp_path / "program.py").read_text(), names)
    ((name, tensor, _, parameter),) = names["WEIGHTS"]
    assert (tensor, parameter) == ("seen", False)
    program = names["Program"]()
    program.register_buffer(name, torch.full((3,), 2.0))
    assert program(torch.ones(5, 3)) == ()
    assert getattr(program, name).tolist() == [10.0] * 3
