"""Models that mutate their inputs, on the CPU: after a call, the caller's tensors equal those of eager PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import cgbundle
import cgcompile
from cgbundle import self_test
from cgbundle.format import archive, file_names
from cgbundle.tensors.tensor import from_bytes
from cgcompile.errors import BuildError
from cgcompile_cli import main
from cgcompile_cli.commands.run import _tensors_by_name
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import signature, spec
from tests.helpers.models.written_models import MODELS, PLACES, WHOLE, Whole, draw, drawn, eager, step
from tests.helpers.raising import raises

SIZES = (1, 4)

Case = tuple[Path, nn.Module, Callable[[int], tuple[Tensor, ...]], tuple[int, ...]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that builds the bundle of one of MODELS once."""
    folder = tmp_path_factory.mktemp("written")

    def build(name: str) -> Path:
        out = folder / f"{name}.cgb"
        if not out.exists():
            model_class, inputs, _ = MODELS[name]
            cgcompile.build(model_class(), inputs, sizes=list(SIZES), out=out, target="cpu")
        return out

    return build


@pytest.fixture(scope="module", params=WHOLE)
def case(request: pytest.FixtureRequest, build: Callable[[str], Path]) -> Case:
    """Returns a bundle, its model, the model's inputs, and the inputs that it mutates."""
    model_class, inputs, written = MODELS[request.param]
    return build(request.param), model_class(), inputs, written


def close(got: Any, want: Tensor) -> None:
    actual = torch.as_tensor(got)
    assert actual.dtype == want.dtype
    step = 1e-5 if want.is_floating_point() else 0
    torch.testing.assert_close(actual, want, rtol=step, atol=step)


def outputs(answer: Any) -> list[Any]:
    return [getattr(output, "tensor", output) for output in (answer if isinstance(answer, tuple) else (answer,))]


def spread(tensor: Tensor) -> Tensor:
    """Returns the same numbers with a stride of 2."""
    return torch.stack([tensor, tensor], -1)[..., 1]


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda tensor: tensor.clone(),
    "spread": spread,
    "turned": lambda tensor: tensor.clone().permute(*range(tensor.dim())[::-1]).contiguous().permute(*range(tensor.dim())[::-1]),
    "numpy": lambda tensor: tensor.clone().numpy(),
    "numpy-spread": lambda tensor: spread(tensor).numpy(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", SIZES)
@pytest.mark.parametrize("handed", ["copy", "view"])
def test_inputs_and_outputs_equal_eager(case: Case, kind: str, batch: int, handed: str) -> None:
    path, network, inputs, _ = case
    if kind.startswith("numpy") and path.stem == "kinds":
        pytest.skip("NumPy has no bfloat16")
    with cgbundle.load(path, outputs=handed) as program:
        for seed in range(2):
            fresh = draw(inputs, batch, seed)
            wanted, after = eager(network, fresh)
            tensors = [KINDS[kind](tensor) for tensor in fresh]
            places = [tensor.__array_interface__ if isinstance(tensor, numpy.ndarray) else tensor.data_ptr() for tensor in tensors]
            for got, want in zip(outputs(program(*tensors)), wanted, strict=True):
                close(got, want)
            for tensor, want in zip(tensors, after, strict=True):
                close(tensor, want)
            assert places == [t.__array_interface__ if isinstance(t, numpy.ndarray) else t.data_ptr() for t in tensors]


def test_the_manifest_and_the_self_test_name_what_is_written(case: Case) -> None:
    path, network, _, written = case
    manifest = archive.read_manifest(str(path))
    assert manifest.entries[0].mutated_inputs == written
    names = {manifest.entries[0].inputs[index].name for index in written}
    notes = [finding for finding in manifest.entries[0].findings if finding.rule == "mutated-input"]
    assert {finding.severity for finding in notes} == {"note"} and len(notes) == len(written)
    assert {name for name in names if any(repr(name) in finding.message for finding in notes)} == names
    assert all(finding.where.startswith("tests/helpers/models/written_models.py:") for finding in notes)
    (batch,) = manifest.entries[0].dimensions
    assert (batch.pad, batch.chunk) == ("no", False) and batch.reason.startswith("forward() writes to its input '")
    stored = load_file(path / file_names.SELF_TEST)
    for size in SIZES:
        tensors = tuple([stored[f"{size}/input/{index}"] for index in range(len(manifest.entries[0].inputs))])
        _, after = eager(network, tensors)
        for index in written:
            close(stored[f"{size}/mutated/{index}"], after[index])
            assert not torch.equal(stored[f"{size}/mutated/{index}"], tensors[index]), "a self-test without a change proves nothing"
    assert {name for name in stored if "/mutated/" in name} == {f"{size}/mutated/{index}" for size in SIZES for index in written}


def test_a_fresh_process_without_torch_sits_the_self_test(case: Case) -> None:
    answer = self_test.fresh(str(case[0]))
    assert [row["passed"] for row in answer["results"]] == [True] * len(SIZES) and not answer["torch_imported"]


@pytest.fixture(scope="module")
def decoder(build: Callable[[str], Path]) -> Path:
    return build("step")


def test_a_cache_fills_call_by_call(decoder: Path) -> None:
    network = MODELS["step"][0]()
    mine = [torch.zeros(4, PLACES, 8), torch.zeros(1, dtype=torch.long)]
    theirs = [tensor.clone() for tensor in mine]
    with cgbundle.load(decoder) as program, torch.no_grad():
        for _ in range(PLACES):
            x = torch.randn(4, 8)
            close(program(x, *mine), network(x, *theirs))
            for got, want in zip(mine, theirs, strict=True):
                close(got, want)
    assert mine[1].item() == PLACES and mine[0].abs().sum(-1).min() > 0


def test_layers_of_one_cache_are_written_each_for_itself(decoder: Path) -> None:
    for cut in (lambda whole, layer: whole[layer], lambda whole, layer: whole[:, layer]):
        whole = torch.zeros(4, 4, PLACES, 8)
        with cgbundle.load(decoder) as program:
            program(torch.randn(4, 8), cut(whole, 1), torch.zeros(1, dtype=torch.long))
        row = cut(whole, 1)[:, 0]
        assert row.any()
        row.zero_()
        assert not whole.any(), "nothing else was written"


def test_what_cannot_be_written_is_refused(decoder: Path) -> None:
    x, cache, place = (tensor.numpy() for tensor in step(4))
    with cgbundle.load(decoder) as program:
        cache.flags.writeable = False
        with raises("input-unwritable", match="input 'cache': the model writes to it, and the array is read-only"):
            program(x, cache, place)
        with raises("input-unwritable", match="input 'cache': .* its elements share memory"):
            program(torch.randn(4, 8), torch.zeros(1, PLACES, 8).expand(4, -1, -1), torch.zeros(1, dtype=torch.long))
        with raises("input-unwritable", match="input 'cache': .* it shares memory with input 'x'"):
            whole = torch.zeros(4, PLACES, 8)
            program(whole[:, 0], whole, torch.zeros(1, dtype=torch.long))
        with raises("key-missing", match=r"batch cannot be padded: forward\(\) writes to its input 'cache'"):
            program(*step(3))


def test_inspect_and_run_show_what_is_written(decoder: Path, tmp_path: Path) -> None:
    def call(*arguments: object) -> str:
        result = CliRunner().invoke(
            main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "120"}
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    lines = call("inspect", decoder).splitlines()
    assert [("updated by the call" in line) for line in lines if " in " in line and "float32" in line] == [False, True]
    assert json.loads(call("inspect", decoder, "--json"))["mutated_inputs"] == ["cache", "place"]
    shown = json.loads(call("run", decoder, "--size", "4", "--json", "--outputs", tmp_path / "made.safetensors"))
    assert [row["name"] for row in shown["written"]] == ["cache", "place"] and len(shown["outputs"]) == 1
    tensors, stored = load_file(tmp_path / "made.safetensors"), load_file(decoder / file_names.SELF_TEST)
    assert tensors.keys() == {"output", "cache", "place"}
    close(tensors["cache"], stored["4/mutated/1"])
    close(tensors["place"], stored["4/mutated/2"])
    assert "cache" in call("run", decoder)


def test_run_gives_an_input_and_an_output_of_one_name_a_name_each() -> None:
    manifest = edited(signature([], [spec("x", 1)], [spec("x", 1), spec("x.written", 1)]), mutated_inputs=(0,))
    argument, first, second = [from_bytes(bytes(4), "float32", (1,)) for _ in range(3)]
    named = [("x", first), ("x.written", second), ("x.written.written", argument)]
    assert _tensors_by_name(manifest.entries[0], [argument], [first, second]) == named


# --- what a build refuses ------------------------------------------------------------------------------------------


def test_memory_that_is_shared_among_the_examples_is_refused(tmp_path: Path) -> None:
    def build(model: nn.Module, inputs: Callable[..., Any]) -> None:
        cgcompile.build(model, inputs, sizes=list(SIZES), out=tmp_path / "m.cgb", target="cpu")

    with raises("check-refused", match=r"written_models.py:\d+: mutated-input: .* it shares memory with itself"):
        build(Whole(), lambda batch: (torch.randn(batch, 1).expand(-1, 3),))

    def twice(batch: int) -> tuple[Tensor, ...]:
        x = torch.randn(batch, 4)
        return x, torch.randn(batch, 4), x

    with raises("check-refused", match="mutated-input: .* it shares memory with the input 'last'"):
        build(MODELS["both"][0](), twice)
    assert not list(tmp_path.iterdir())


class Swap(nn.Module):
    """Swaps two inputs. Inductor of torch 2.13 drops the copy and writes the same numbers to both."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
        return x - y


def test_an_input_that_the_compiler_writes_wrongly_is_no_bundle(tmp_path: Path) -> None:
    """A bundle is only published if, after a call, its inputs equal those of eager PyTorch."""
    out = tmp_path / "swap.cgb"
    try:
        cgcompile.build(Swap(), drawn(3, 3), sizes=[2], out=out, target="cpu")
    except BuildError as error:
        assert "int_key batch=2" in str(error) and not out.exists()
    else:
        arguments = draw(drawn(3, 3), 2, 1)
        _, after = eager(Swap(), arguments)
        with cgbundle.load(out) as program:
            program(*arguments)
        assert all(torch.equal(got, want) for got, want in zip(arguments, after, strict=True))
