"""Dynamic axes, the sizes that a model allows, and errors that name the dimension or the user's line."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.symbolic_shapes import cast_symbool_to_symint_guardless

from cgbundle.format.schema import Parameter
from cgcompile.checks import check, refuse
from cgcompile.export.assertions import _use_asserted_numbers, asserted, spell_conditions
from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported, Signature
from cgcompile.export.functionalization import functional, functional_form, size_in
from cgcompile.export.signature.signature import describe_signature
from cgcompile.export.torch_export import _guard
from cgcompile.model.declared_sizes import assumed_sizes, declared_sizes
from cgcompile.model.load import load_source
from cgcompile.model.source import Source, sample
from cgcompile.targets.choice import Options, choose
from tests.cpu.models import Batched, rows
from tests.helpers.raising import raises


def exported(function: Callable[..., Any] | nn.Module, inputs: Callable[..., Any] = rows, **sizes: tuple[int, ...]) -> Exported:
    model = function if isinstance(function, nn.Module) else Batched(function)
    return export(load_source(model, inputs), sizes or {"batch": (1, 8)})


def signature(function: Callable[..., Any] | nn.Module, inputs: Callable[..., Any] = rows, **sizes: tuple[int, ...]) -> Signature:
    exported_model = exported(function, inputs, **sizes)
    refuse_branches(exported_model)
    return describe_signature(exported_model)


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + y.sum(1)


def test_dimensions_are_shared_across_inputs() -> None:
    sig = signature(Two(), lambda batch, seq: (torch.rand(batch, seq), torch.rand(batch, 2 * seq + 1)), batch=(1, 4), seq=(3, 8))
    assert [spec.shape for spec in sig.inputs] == [("batch", "seq"), ("batch", ("+", ("*", "seq", 2), 1))]
    assert sig.outputs[0].shape == ("batch",)


class Converted(nn.Module):
    """A router that converts its weights' dtype in every call, as that of Switch Transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.to(x.dtype)
        return self.linear(x)


def test_a_module_may_be_converted_to_what_it_is() -> None:
    model = Converted()
    weight = model.linear.weight
    exported_model = exported(model)
    x = torch.rand(3, 4)
    assert torch.equal(exported_model.programs.first.module()(x)[0], model(x))
    assert model.linear.weight is weight and nn.Module._apply.__module__ == "torch.nn.modules.module"


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.reshape(-1), (("*", "batch", 4),)),
        (lambda x: torch.cat([x, x]), (("*", "batch", 2), 4)),
        (lambda x: x @ x.T, ("batch", "batch")),
        (lambda x: x.sum(), ()),
        (lambda x: torch.outer(x[:, 0], x[:, 1]).reshape(-1), (("*", "batch", "batch"),)),
    ],
)
def test_output_shapes_follow_from_the_dimensions(function: Callable[..., Any], shape: tuple[Any, ...]) -> None:
    from cgbundle.format.shapes import evaluate

    (spec,) = signature(function).outputs
    for batch in (1, 2, 5, 8):
        expected = tuple(function(torch.rand(batch, 4)).shape)
        assert tuple(evaluate(size, {"batch": batch}) for size in spec.shape) == expected
        assert tuple(evaluate(size, {"batch": batch}) for size in shape) == expected


def test_only_the_range_of_the_sizes_has_to_work() -> None:
    assert signature(lambda x: x[3:], batch=(5, 8)).outputs[0].shape == (("-", "batch", 3), 4)
    assert signature(lambda x: x[::2], batch=(4, 8)).outputs[0].shape == (("//", ("+", "batch", 1), 2), 4)


def test_a_multiple_that_export_finds_is_taken_up() -> None:
    sig = signature(lambda x: x.view(-1, 2, 4).sum(1), batch=(4, 8))
    assert sig.inputs[0].shape == ("batch", 4)
    with raises("size-excluded", match="in steps of 2, not for 5|batch=5"):
        signature(lambda x: x.view(-1, 2, 4).sum(1), batch=(4, 5, 8))


class BothFixed(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = (x + torch.ones(8, 1)).sum()
        return rows + (y + torch.ones(8, 1)).sum()


def test_two_lines_that_fix_the_same_size_are_not_named() -> None:
    exported_model = exported(BothFixed(), lambda a, b: (torch.rand(a, 4), torch.rand(b, 4)), a=(8,), b=(8,))
    assert re.search(r"dimension '[ab]' cannot vary: the model's code fixes it to 8$", exported_model.programs.reason)


@pytest.mark.parametrize("function", [lambda x: x + 1 if x.shape[0] == 8 else x, lambda x: x + torch.ones(8, 1)])
def test_a_dimension_that_cannot_vary_keeps_its_one_size(function: Callable[..., Any]) -> None:
    exported_model = exported(function, batch=(8,))
    assert not exported_model.programs.dynamic
    assert re.match(
        r".*test_export\.py:\d+: dimension 'batch' cannot vary: the model's code fixes it to 8: ", exported_model.programs.reason
    )


def test_an_assertion_about_a_whole_tensor_can_be_made_functional() -> None:
    """torch 2.11 cannot trace the program of torch.export a second time."""

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x < 10)
        return x + 1

    program = exported(function, batch=(2, 4)).programs.first
    assert len(functional(program).user_outputs) == 1
    module = functional_form(program).module()
    spell_conditions(module)
    assert not module.graph.find_nodes(op="call_function", target=cast_symbool_to_symint_guardless), (
        "as a region of the host has it"
    )


def test_an_assertion_without_a_message_gets_the_users_line() -> None:
    """Inductor cannot compile an assertion without a message."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 3).all())
        return x + 1

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 2).all())
        return torch.cond(x.sum() > 0, inside, lambda x: x - 1, (x,))

    program = exported(function, batch=(2, 4)).programs.first
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    assertions = [node for part in parts for node in part.graph.nodes if "_assert_async" in str(node.target)]
    assert [node.target for node in assertions] == [torch.ops.aten._assert_async.msg] * 2, "one is in a branch"
    where, _, said = str(assertions[0].args[1]).partition(": ")
    assert where.startswith("tests/cpu/export/test_export.py:")
    assert said == "an assertion of the model failed: torch._assert_async((x < 2).all())"


@given(st.text(max_size=400))
def test_what_an_assertion_says_can_stand_in_cpp_and_in_a_kernel(message: str) -> None:
    said = asserted([], message)
    assert said.startswith("model: an assertion of the model failed: ") and said.isascii() and len(said) < 255
    assert not set('"\\\n\r\0') & set(said)


def test_a_line_with_quotes_that_raises_can_stand_in_cpp() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        assert not x.isnan().any(), "nan \\ nan"
        return x + 1

    program = exported(function, batch=(2, 4)).programs.first
    (said,) = [str(node.args[1]) for node in program.graph.nodes if node.target is torch.ops.aten._assert_async.msg]
    assert "assert not x.isnan().any(), 'nan // nan'" in said


def test_a_number_that_is_a_size_makes_a_program_for_each() -> None:
    """Otherwise torch.export would assume that the number is larger than 1, as it does for sizes."""

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = (x * 0 + 1).sum(0).max().long().item()
        torch._check(rows == x.shape[0])
        return x + x.new_ones(rows, 1)

    assert exported(function, batch=(2, 4)).programs.dynamic
    assert not exported(function, batch=(1, 4)).programs.dynamic


def ctc(x: torch.Tensor) -> torch.Tensor:
    """A loss whose operator has a second output with a data-dependent size (the longest target)."""
    targets, lengths = x.argsort(-1)[:, :2].clamp(min=1), torch.full_like(x[:, 0], 2, dtype=torch.int64)
    return torch.nn.functional.ctc_loss(x.expand(6, *x.shape).log_softmax(-1), targets, lengths * 3, lengths)


@pytest.mark.parametrize(
    ("function", "sizes", "error", "said"),
    [
        (lambda x: x.view(-1, 2, 4), (1, 8), "size-excluded", "batch=1"),
        (lambda x: x if round(x.sum().item(), 1) > 0 else -x, (1, 8), "data-dependent-branch", "test_export.py:"),
        (lambda x: x[x > 0.5], (1, 8), "data-dependent-output", "depends on data"),
        (lambda x: {1.5: x}, (1, 8), "structure-unsupported", "neither text nor a number"),
        (lambda x: (x, x.shape[0]), (1, 8), "structure-unsupported", "change with the sizes"),
        (lambda x: x @ x, (1, 8), "eager-failed", "test_export.py:"),
        (ctc, (2, 8), "data-dependent-shape", "test_export.py:"),
    ],
)
def test_models_that_cannot_be_exported(
    function: Callable[..., Any], sizes: tuple[int, ...], error: type[Exception], said: str
) -> None:
    with raises(error) as caught:
        signature(function, batch=sizes)
    assert said in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dimension_that_touches_no_shape() -> None:
    with raises("dimension-unused", match="'seq' changes no shape"):
        exported(Batched(torch.relu), lambda batch, seq: torch.rand(batch, 4), batch=(1, 2), seq=(3,))


def test_a_size_that_is_no_line() -> None:
    with raises("shape-irregular", match="axis 0: sizes"):
        exported(Batched(torch.relu), lambda batch: torch.rand(batch * batch, 4), batch=(1, 3))
    with raises("shape-irregular", match="axis 0: sizes"):
        exported(Batched(torch.relu), lambda batch, seq: torch.rand(batch * seq, 4), batch=(2, 3), seq=(2, 3))


def test_inputs_are_drawn_alike_each_time() -> None:
    source = load_source(Batched(torch.relu), rows)
    before = torch.random.get_rng_state()
    first, second = sample(source, {"batch": 3}).tensors[0], sample(source, {"batch": 3}).tensors[0]
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random state is left alone"


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return x + 1


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (Listed(), "mutated-attribute"),
        (Batched(lambda x: x + torch.poisson(x.abs())), "random-operation"),
    ],
    ids=["attribute", "poisson"],
)
def test_what_cannot_be_replayed_faithfully_is_refused(model: nn.Module, rule: str) -> None:
    checked = check(exported(model))
    assert rule in {finding.rule for finding in checked.findings}
    with raises("check-refused", match=rule):
        refuse(checked, False, (), "size")


@pytest.mark.parametrize("model", [nn.Dropout().eval(), nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()])
def test_dropout_outside_training_draws_nothing(model: nn.Module) -> None:
    refuse(check(exported(model)), True, (), "size")


@pytest.mark.parametrize("target", ["cpu", "auto"])
@pytest.mark.parametrize("lower", ["eager", "max-autotune"])
def test_the_cpu_target_does_not_ignore_a_lowering_it_lacks(target: str, lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose(Options(target=target)).target == "cpu"
    with raises("target-unavailable", match="the cpu target has one lowering"):
        choose(Options(target=target, lower=lower))


def test_what_autotune_cannot_be_combined_with(gpu: Callable[[str], None]) -> None:
    gpu("sm_90")
    assert choose(Options(target="cuda", autotune=True)).recorder == "capture"
    with raises("option-invalid", match="--autotune tries every lowering, and --lower is eager"):
        choose(Options(target="cuda", lower="eager", autotune=True))
    with raises("target-unavailable", match="specialize 'shared': --autotune lowers every size for itself"):
        choose(Options(target="cuda", specialize="shared", autotune=True))


# --- targets ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that makes torch see a GPU of an architecture, or none ("")."""

    def show(arch: str) -> None:
        digits = arch.removeprefix("sm_")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(arch))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (int(digits[:-1]), int(digits[-1])))

    return show


@pytest.mark.parametrize(
    ("here", "target", "recorder", "expected"),
    [
        ("", "auto", "auto", ("cpu", "host", True)),
        ("", "cpu", "auto", ("cpu", "host", True)),
        ("", "sm_90", "auto", ("sm_90", "cross-compile", False)),
        ("", "sm_120", "cross-compile", ("sm_120", "cross-compile", False)),
        ("sm_90", "auto", "auto", ("sm_90", "capture", True)),
        ("sm_90", "cuda", "auto", ("sm_90", "capture", True)),
        ("sm_90", "sm_90", "auto", ("sm_90", "capture", True)),
        ("sm_90", "sm_90", "capture", ("sm_90", "capture", True)),
        ("sm_90", "cuda", "capture", ("sm_90", "capture", True)),
        ("sm_90", "sm_90", "cross-compile", ("sm_90", "cross-compile", True)),
        ("sm_90", "cuda", "cross-compile", ("sm_90", "cross-compile", True)),
        ("sm_90", "auto", "cross-compile", ("sm_90", "cross-compile", True)),
        ("sm_90", "cpu", "auto", ("cpu", "host", True)),
        ("sm_80", "auto", "auto", ("sm_80", "capture", True)),
        ("sm_80", "sm_90", "auto", ("sm_90", "cross-compile", False)),
        ("sm_80", "sm_90", "cross-compile", ("sm_90", "cross-compile", False)),
        ("sm_120", "sm_120", "auto", ("sm_120", "capture", True)),
        ("sm_120", "sm_100", "auto", ("sm_100", "cross-compile", False)),
    ],
)
def test_a_gpu_that_is_here_is_captured_and_every_other_is_cross_compiled(
    here: str, target: str, recorder: str, expected: tuple[str, str, bool], gpu: Callable[[str], None]
) -> None:
    gpu(here)
    chosen = choose(Options(target=target, record=recorder))
    assert (chosen.target, chosen.recorder, chosen.runs_here) == expected


@pytest.mark.parametrize(
    ("here", "target", "recorder", "said"),
    [
        ("", "cuda", "auto", "target cuda: there is no GPU on this machine"),
        ("", "cuda", "cross-compile", "target cuda: there is no GPU on this machine"),
        ("", "auto", "cross-compile", "target auto: there is no GPU on this machine"),
        ("", "sm_90", "capture", "target sm_90: this machine has no GPU, and a capture needs this GPU"),
        ("sm_80", "sm_90", "capture", "target sm_90: this machine has sm_80, and a capture needs this GPU"),
        ("", "cpu", "cross-compile", "record 'cross-compile': the cpu target records nothing"),
        ("sm_90", "cpu", "capture", "record 'capture': the cpu target records nothing"),
        ("", "auto", "capture", "record 'capture': the cpu target records nothing"),
        ("sm_90", "sm_77", "auto", "target 'sm_77': no such architecture"),
        ("sm_90", "gpu", "auto", "target 'gpu': no such architecture"),
    ],
)
def test_what_this_machine_cannot_build(here: str, target: str, recorder: str, said: str, gpu: Callable[[str], None]) -> None:
    gpu(here)
    with raises("target-unavailable") as caught:
        choose(Options(target=target, record=recorder))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize("lower", ["eager", "inductor", "max-autotune"])
@pytest.mark.parametrize("specialize", ["size", "shared"])
def test_only_a_captured_gpu_has_every_lowering(lower: str, specialize: str, gpu: Callable[[str], None]) -> None:
    gpu("sm_90")
    assert choose(Options(target="sm_90", lower=lower, specialize=specialize)).recorder == "capture"
    for target, recorder in (("sm_80", "auto"), ("sm_90", "cross-compile")):
        if (lower, specialize) == ("inductor", "size"):
            assert choose(Options(target=target, lower=lower, specialize=specialize, record=recorder)).recorder == "cross-compile"
            continue
        named = f"lower '{lower}'" if lower != "inductor" else f"specialize '{specialize}'"
        with raises("target-unavailable", match=f"^{named}: cross-compiling for {target}"):
            choose(Options(target=target, lower=lower, specialize=specialize, record=recorder))


@pytest.mark.parametrize("option", ["lower", "specialize", "record", "prove"])
def test_a_word_that_is_no_choice(option: str, gpu: Callable[[str], None]) -> None:
    gpu("sm_90")
    with raises("option-invalid", match=f"^{option} 'perhaps': expected one of ") as caught:
        choose(replace(Options(target="sm_90"), **{option: "perhaps"}))
    assert "one of the values in the message" in caught.value.hint and caught.value.exit_code == 2


def test_a_saved_program_is_a_source(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt2"
    dims = ({0: torch.export.Dim("batch", max=64)},)
    torch.export.save(torch.export.export(nn.Linear(4, 2).eval(), (torch.rand(3, 4),), dynamic_shapes=dims), path)
    source = load_source(str(path))
    assert (source.name, source.dimensions) == ("saved", ("batch",))
    exported = export(source, {"batch": (1, 8)})
    assert describe_signature(exported).inputs[0].shape == ("batch", 4)


class TwoNamed(nn.Module):
    def forward(self, x: torch.Tensor, *rest: Any, mask: torch.Tensor) -> torch.Tensor:
        return x * mask.sum(1, keepdim=True) + rest[0]["b"]


def saved(path: Path, **more: Any) -> Source:
    batch, seq = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seq", min=2)
    shapes = {"x": {0: batch}, "rest": ({"b": {0: batch}},), "mask": {0: batch, 1: seq}}
    arguments = (torch.rand(3, 4), {"b": torch.rand(3, 4)}), {"mask": torch.ones(3, 5)}
    torch.export.save(torch.export.export(TwoNamed(), *arguments, dynamic_shapes=shapes), path, **more)
    return load_source(str(path))


def test_a_saved_program_takes_inputs_by_position_and_by_name_and_says_what_its_dimensions_are(tmp_path: Path) -> None:
    source = saved(tmp_path / "two.pt2")
    assert source.dimensions == ("dim0", "dim1")
    sizes = declared_sizes(["rest_0.b.0=2,8", "mask.1=4"], source.dimensions, source.saved)
    assert sizes == {"dim0": (2, 8), "dim1": (4,)}
    assert [spec.shape for spec in describe_signature(export(source, sizes)).inputs] == [
        ("dim0", 4), ("dim0", 4), ("dim0", "dim1")
    ]  # fmt: skip
    assert assumed_sizes(source.dimensions, source.saved, (1, 100)) == {"dim0": (2, 64), "dim1": (2, 100)}
    with raises("sizes-invalid", match="there is no declared dimension 'batch'") as caught:
        declared_sizes("batch=1", source.dimensions, source.saved)
    assert caught.value.hint == "dim0 is axis 0 of x and axis 0 of rest_0.b and axis 0 of mask; dim1 is axis 1 of mask"
    with raises("size-excluded", match=r"dim0=65 is excluded: the program was exported for min=2, max=64 \(dim0 is axis 0 of x "):
        declared_sizes(["dim0=2,65", "dim1=4"], source.dimensions, source.saved)


def test_a_saved_program_may_bring_the_names_of_its_dimensions(tmp_path: Path) -> None:
    assert saved(tmp_path / "named.pt2", extra_files={"dimensions": "batch, seq"}).dimensions == ("batch", "seq")
    for wrong in ("batch", "batch,batch", "batch,a b"):
        with raises("source-invalid", match="its file 'dimensions' has .*, expected 2 different names"):
            saved(tmp_path / "wrong.pt2", extra_files={"dimensions": wrong})


class SavedFile:
    """A model that is a .pt2 file: a program, a program that lacks a part, or another object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.program = torch.export.export(nn.Linear(4, 2).eval(), (torch.rand(3, 4),))

    def without_examples(self) -> None:
        self.program.example_inputs = None
        torch.export.save(self.program, self.path)

    def misnamed(self) -> None:
        saved(self.path, extra_files={"dimensions": "batch"})

    def of_torch_save(self) -> None:
        torch.save(nn.Linear(4, 2).state_dict(), self.path)

    def of_jit_save(self) -> None:
        torch.jit.save(torch.jit.trace(nn.Linear(4, 2), torch.rand(3, 4)), self.path)

    def junk(self) -> None:
        self.path.write_text("junk")

    def empty(self) -> None:
        self.path.touch()

    def other_archive(self) -> None:
        with zipfile.ZipFile(self.path, "w") as archive:
            archive.writestr("readme.txt", "no program")

    def damaged(self) -> None:
        torch.export.save(self.program, self.path)
        with zipfile.ZipFile(self.path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(self.path, "w") as archive:
            for name, content in contents.items():
                if not name.endswith("archive_format"):
                    archive.writestr(name, content)


NO_SOURCE = {
    "without_examples": (
        "was saved without its example inputs",
        "give the unchanged file that torch.export.save(",
    ),
    "misnamed": ("expected 2 different names", "in the order of the inputs' shapes: torch.export.save(program, path, extra_files="),
    "of_torch_save": ("a file of torch.save is not an exported program", "write a model.py whose model() loads it, or"),
    "of_jit_save": ("a file of torch.jit.save is not an exported program", "write a model.py whose model() loads it, or"),
    "junk": ("not a zip archive", "give the unchanged file that torch.export.save("),
    "empty": ("an empty file", "give the unchanged file that torch.export.save("),
    "other_archive": ("a zip archive without an exported program", "give the unchanged file that torch.export.save("),
    "damaged": ("failed locating file archive_format", "the file is damaged, or of another version of torch than 2."),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", NO_SOURCE)
def test_a_saved_file_that_is_no_source_is_told_its_cure(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    message, cure = NO_SOURCE[kind]
    path = tmp_path / "saved.pt2"
    with raises("source-invalid", match=message) as caught:
        getattr(SavedFile(path), kind)()
        capfd.readouterr()
        load_source(str(path))
    assert str(caught.value).startswith(f"{path}: ") and caught.value.hint.startswith(cure)
    assert not [record for record in caplog.records if record.name.startswith("torch.export")] and not capfd.readouterr().err


def test_a_saved_program_of_fixed_shapes_has_no_inputs_to_speak_of(tmp_path: Path) -> None:
    path = tmp_path / "static.pt2"
    torch.export.save(SavedFile(path).program, path)
    source = load_source(str(path))
    assert source.dimensions == () and declared_sizes([], source.dimensions, source.saved) == {}
    for sizes in ("1,8", ["batch=1,8"]):
        with raises("sizes-invalid") as caught:
            declared_sizes(sizes, source.dimensions, source.saved)
        assert caught.value.hint.startswith("the program was exported with fixed shapes: leave --sizes out")


class Modes(nn.Module):
    def forward(self, x: torch.Tensor, mode: str = "a", times: tuple = (1, 2), *, scale: object = None, power: float = 1.0) -> Any:
        return x * power if mode == "b" else x


def test_a_saved_program_wants_its_constants(tmp_path: Path) -> None:
    """A .pt2 file stores no defaults, and its module rejects calls without constants."""
    path = tmp_path / "modes.pt2"
    torch.export.save(torch.export.export(Modes(), (torch.ones(2, 3), "b")), path)
    sig = describe_signature(export(load_source(str(path)), {}))
    assert sig.call == {"call": [["x", {"tensor": 0}], ["mode", {"value": "b"}]]}
    assert sig.parameters == (Parameter(keyword=False, default=None),) * 2


def test_parameters_have_the_models_defaults_and_are_by_name_only_where_the_model_says_so() -> None:
    model = load_source(Modes(), lambda batch: {"x": torch.ones(batch, 3), "mode": "b", "power": 2.0})
    sig = describe_signature(export(model, {"batch": (1, 4)}))
    times = {"tuple": [{"value": 1}, {"value": 2}]}
    assert sig.call == {
        "call": [
            ["x", {"tensor": 0}],
            ["mode", {"value": "b"}],
            ["times", times],
            ["scale", {"value": None}],
            ["power", {"value": 2.0}],
        ]
    }
    assert [(parameter.keyword, parameter.default) for parameter in sig.parameters] == [
        (False, None), (False, {"value": "a"}), (False, times), (True, {"value": None}), (True, {"value": 1.0}),
    ]  # fmt: skip


class Odd(nn.Module):
    def forward(
        self, x: torch.Tensor, *more: torch.Tensor, like: Any = torch.float32, limit: float = float("inf"), **by: Any
    ) -> Any:
        return x + more[0] + by["last"]


def test_a_default_that_is_no_constant_cannot_be_passed() -> None:
    one = torch.ones(2)
    by_position = sample(load_source(Odd(), lambda: (one, one)), {})
    assert by_position.call == {"call": [["x", {"tensor": 0}], ["more_0", {"tensor": 1}]]}
    by_name = sample(load_source(Odd(), lambda: {"x": one, "limit": 1.0, "last": one}), {})
    assert by_name.call == {"call": [["x", {"tensor": 0}], ["limit", {"value": 1.0}], ["last", {"tensor": 1}]]}
    assert [(parameter.keyword, parameter.default) for parameter in by_name.parameters] == [
        (False, None),
        (True, None),
        (True, None),
    ]


def test_a_number_that_a_manifest_cannot_hold_is_refused_by_name() -> None:
    with raises("structure-unsupported", match="limit: a bundle holds no number inf outside of tensors"):
        sample(load_source(Odd(), lambda: {"x": torch.ones(2), "limit": float("inf")}), {})


def test_only_what_follows_from_a_number_is_changed() -> None:
    """In graphs of some models (Qwen2-VL's vision encoder) a value's list of users lacks a user. It failed to set the arguments of
    such a user again."""

    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + 1)

    program = torch.export.export(Network(), (torch.randn(4),))
    add, relu = [node for node in program.graph.nodes if node.op == "call_function"]
    del add.users[relu]
    _use_asserted_numbers(program)
    assert relu.args == (add,)


class Spread(nn.Module):
    """Stores one number as an expanded tensor of four, in an attribute that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = torch.full((1,), 2.0).expand(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offsets


def test_a_constant_that_overlaps_itself_becomes_dense() -> None:
    program = export(load_source(Spread(), lambda batch: (torch.zeros(batch, 4),)), {"batch": (1, 8)}).programs.first
    (value,) = program.constants.values()
    assert value.is_contiguous() and torch.equal(value, torch.full((4,), 2.0))
    (node,) = [node for node in program.graph.find_nodes(op="placeholder") if "offsets" in node.name or "lifted" in node.name]
    assert node.meta["val"].is_contiguous()


class Dense(nn.Module):
    """Pads the rows of several graphs to the size of the largest one."""

    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        graphs = int(graph.max()) + 1
        counts = torch.zeros(graphs, dtype=torch.long).scatter_add_(0, graph, torch.ones_like(graph))
        most = int(counts.max())
        padded_rows = torch.as_tensor(0.0).repeat([graphs * most + 1, 4])
        padded_rows[graph * most] = x
        return padded_rows[: graphs * most].view(graphs, most, 4).sum((0, 1))


def test_the_operation_whose_size_torch_cannot_follow_is_told_with_its_line() -> None:
    program = export(load_source(Dense(), lambda: (torch.randn(6, 4), torch.arange(6) // 3)), {}).programs.first
    sized = [node for node in program.graph.nodes if node.target is torch.ops.aten.slice.Tensor][-1]
    message = size_in(program, AssertionError(f"should have been constant\n\nWhile executing %{sized.name} : [num_users=2] = ..."))
    assert message.startswith("tests/cpu/export/test_export.py:") and message.endswith(": the size of a tensor depends on data")
    assert size_in(program, AssertionError("should have been constant")) == ""


class Named(nn.Parameter):
    """A parameter of a subclass, as in libraries for manifolds."""


def test_parameters_of_another_class_become_torchs_over_the_same_memory() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Named(torch.rand(4))
            self.same = self.scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.same

    model = Model()
    program = export(load_source(model, rows), {"batch": (1, 8)}).programs.first
    assert {type(value) for value in program.state_dict.values()} == {nn.Parameter}
    assert {value.data_ptr() for value in program.state_dict.values()} == {model.scale.data_ptr()}


def test_a_condition_of_torch_is_told_in_words() -> None:
    line = "Not all values of side = side in the specified range 32 <= side <= 64 satisfy the generated guard (side % 4) != 0."
    assert _guard(line) == "torch.export needs (side % 4) != 0, which is not true for all sizes (32 <= side <= 64)"
    assert _guard("side must be even") == "side must be even"
