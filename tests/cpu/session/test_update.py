"""`program.update`: other weights in place, for CPU programs, compared with eager PyTorch."""

from __future__ import annotations

import gc
import json
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bundles.shared_builds import shared_build
from tests.helpers.raising import raises

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgbundle.format import archive, file_names  # noqa: E402

SPIN = 60
"""Calls of every thread."""

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Odd(torch.nn.Module):
    """Weights that an update treats specially: tied, not row-major, small, a constant, a non-persistent buffer, state, an unused
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = torch.nn.Parameter(torch.randn(6, 6).t())
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.shift = torch.nn.Parameter(torch.ones(6))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([[1.0, 0, 1, 1, 0, 1]] * 3), persistent=False)
        self.register_buffer("calls", torch.zeros(2, 6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.embedding(ids) @ self.turned * self.scale + self.shift
        return self.head(x * self.mask[0] + torch.tensor([2.0, 0, 0, 0, 0, 1]))


def numbers(batch: int) -> torch.Tensor:
    return (torch.randint(0, 11, (batch, 5), generator=torch.Generator().manual_seed(batch)),)


def tiny(seed: int) -> torch.nn.Module:
    """Returns the model of the bundle that all CPU tests share, with other weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()


def odd(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Odd().eval()
        if seed:
            for name in ("scale", "shift", "unused"):
                torch.nn.init.normal_(getattr(model, name))
        return model


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))


def answers(program: Any) -> torch.Tensor:
    return program(X)


def check(program: Any, model: torch.nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(program(X), model(X), **CLOSE)


@pytest.fixture(scope="module")
def odd_bundle() -> Path:
    folder = shared_build(
        "odd", lambda at: cgcompile.build(odd(0), numbers, sizes=[2], out=at / "odd.cgb", target="cpu", train=True)
    )
    return folder / "odd.cgb"


# --- accepted weights ---------------------------------------------------------------------------------------------


def as_file(weights: dict[str, torch.Tensor], folder: Path) -> object:
    save_file(weights, folder / "new.safetensors")
    return folder / "new.safetensors"


def as_shards(weights: dict[str, torch.Tensor], folder: Path) -> object:
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, shard_names in parts.items():
        save_file({name: weights[name].contiguous() for name in shard_names}, folder / file)
    places = {name: file for file, shard_names in parts.items() for name in shard_names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return str(index)


GIVEN: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "file": as_file,
    "shards": as_shards,
    "folder": lambda weights, folder: (as_shards(weights, folder), folder)[1],
    "torch": lambda weights, folder: weights,
    "parameters": lambda weights, folder: {name: torch.nn.Parameter(value) for name, value in weights.items()},
    "numpy": lambda weights, folder: {name: value.numpy() for name, value in weights.items()},
    "strided": lambda weights, folder: {
        name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in weights.items()
    },
    "dlpack": lambda weights, folder: {
        name: cgbundle.Tensor(value.data_ptr(), "float32", value.shape, value.stride(), value) for name, value in weights.items()
    },
}


@pytest.mark.parametrize("kind", GIVEN)
def test_weights_come_from_files_and_as_tensors(bundle: Path, tmp_path: Path, kind: str) -> None:
    model = tiny(7)
    with cgbundle.load(bundle) as program:
        session = program.session()
        check(program, tiny(0))
        program.update(GIVEN[kind](weights_of(model), tmp_path))
        check(program, model)
        check(session, model)
        check(program.session(), model)
        session.update(weights_of(tiny(8)))
        check(program, tiny(8))


def test_another_bundle_brings_the_first_weights_back(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        program.update(weights_of(tiny(3)))
        program.update(bundle)
        check(program, tiny(0))
        program.update(weights_of(tiny(3)))
        program.update(str(bundle / file_names.WEIGHTS))
        check(program, tiny(0))
        assert program.updated, "it says that weights were put in place, not that they differ"


def test_what_is_not_finite_is_a_number_too(bundle: Path) -> None:
    model = tiny(0)
    with torch.no_grad():
        model[2].bias[1] = torch.nan
    with cgbundle.load(bundle) as program:
        program.update(weights_of(model))
        assert answers(program).isnan().any(0).tolist() == [False, True, False]


def test_what_was_given_is_copied(bundle: Path, tmp_path: Path) -> None:
    weights, path = weights_of(tiny(7)), as_file(weights_of(tiny(7)), tmp_path)
    with cgbundle.load(bundle) as program:
        program.update(weights)
        for value in weights.values():
            value.zero_()
        check(program, tiny(7))
        program.update(path)
        path.write_bytes(b"")
        gc.collect()
        check(program, tiny(7))


@pytest.mark.parametrize("weights", ["map", "copy"])
def test_a_part_leaves_the_rest(bundle: Path, weights: str) -> None:
    model = tiny(0)
    with cgbundle.load(bundle, weights=weights) as program:
        for seed, name in enumerate(["2.bias", "0.weight", "2.weight", "2.bias"], 1):
            part = weights_of(tiny(seed))[name]
            model.load_state_dict({name: part}, strict=False)
            program.update({name: part}, partial=True)
            check(program, model)


def test_an_empty_partial_update_is_allowed(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        program.update({}, partial=True)
        check(program, tiny(0))


# --- refused weights ----------------------------------------------------------------------------------------------


def with_other(name: str, value: Any) -> dict[str, Any]:
    return {**weights_of(tiny(7)), name: value}


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "name": (lambda folder: with_other("0.wieght", torch.ones(1)), "the program has no weight '0.wieght'; it has '0.weight'"),
    "shape": (lambda folder: with_other("2.bias", torch.ones(4)), r"weight '2.bias': expected shape \[3\], got \[4\]"),
    "dtype": (lambda folder: with_other("2.bias", torch.ones(3).half()), "weight '2.bias': expected float32, got float16"),
    "no tensor": (lambda folder: with_other("2.bias", [1.0, 2.0, 3.0]), "weight '2.bias': expected a NumPy array"),
    "no name": (lambda folder: {0: torch.ones(1)}, "expected names of weights, got 0"),
    "nowhere": (
        lambda folder: with_other("2.bias", torch.ones(3, device="meta")),
        "weight '2.bias': expected a tensor with values",
    ),
    "missing": (lambda folder: {"2.bias": torch.ones(3)}, "weight '0.bias' is missing, and 2 more"),
    "no weights": (lambda folder: 3, "expected a path or a mapping of names to tensors, got int"),
    "no file": (lambda folder: folder / "none.safetensors", "none.safetensors: No such file"),
    "cut header": (lambda folder: cut(folder, 20), "the header's length does not fit"),
    "of torch.save": (lambda folder: pickled(folder), "new.pt: no safetensors file, but one of torch.save"),
    "cut data": (lambda folder: cut(folder, -4), "the file has .* bytes, its header promises"),
    "text": (lambda folder: text(folder), "header"),
    "empty folder": (lambda folder: folder, "0 files that could be the weights"),
    "shard missing": (lambda folder: sharded(folder, gone="model-00002-of-00002.safetensors"), "No such file"),
    "shard elsewhere": (lambda folder: sharded(folder, file="../x.safetensors"), "is no name of a file beside it"),
    "shard without": (lambda folder: sharded(folder, name="3.bias"), "has no tensor '3.bias'"),
    "index": (lambda folder: index(folder, "[]"), "has no weight_map"),
    "index text": (lambda folder: index(folder, "{"), "index.json: "),
}


def pickled(folder: Path) -> Path:
    torch.save(tiny(7).state_dict(), folder / "new.pt")
    return folder / "new.pt"


def cut(folder: Path, end: int) -> Path:
    as_file(weights_of(tiny(7)), folder)
    path = folder / "new.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    return path


def text(folder: Path) -> Path:
    (folder / "new.safetensors").write_text("weights, but no numbers")
    return folder / "new.safetensors"


def index(folder: Path, content: str) -> Path:
    (folder / "x.index.json").write_text(content)
    return folder / "x.index.json"


def sharded(folder: Path, gone: str = "", file: str = "", name: str = "") -> str:
    path = str(as_shards(weights_of(tiny(7)), folder))
    places = json.loads(Path(path).read_text())["weight_map"]
    if gone:
        (folder / gone).unlink()
    places |= {name or "2.bias": file or places["2.bias"]} if file or name else {}
    Path(path).write_text(json.dumps({"weight_map": places}))
    return path


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_changes_nothing(bundle: Path, tmp_path: Path, what: str) -> None:
    make, message = WRONG[what]
    with cgbundle.load(bundle) as program:
        session = program.session()
        with raises("update-invalid", match=message):
            program.update(make(tmp_path))
        assert not program.updated
        check(program, tiny(0))
        check(session, tiny(0))


def under(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in weights.items()}


HINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda folder: folder / "none.safetensors", "give the path of a .safetensors file"),
    "shard missing": (lambda folder: sharded(folder, gone="model-00002-of-00002.safetensors"), "give the path of a .safetensors"),
    "cut data": (lambda folder: cut(folder, -4), "save the checkpoint again, or copy it whole"),
    "text": (lambda folder: text(folder), "save the checkpoint again, or copy it whole"),
    "index text": (lambda folder: index(folder, "{"), "save the checkpoint again, or copy it whole"),
    "parallel": (lambda folder: under("module.", weights_of(tiny(7))), "remove the prefix 'module.' from the names"),
    "two prefixes": (lambda folder: under("module._orig_mod.", weights_of(tiny(7))), "remove the prefix 'module._orig_mod.' from"),
    "some with a prefix": (
        lambda folder: {**weights_of(tiny(7)), **under("ema.", weights_of(tiny(8)))}, "pass the weights of the model's state_dict"
    ),
    "name": (lambda folder: with_other("0.wieght", torch.ones(1)), "pass the weights of the model's state_dict"),
}  # fmt: skip


@pytest.mark.parametrize("what", HINTS)
def test_what_does_not_fit_is_told_its_cure(bundle: Path, tmp_path: Path, what: str) -> None:
    make, cure = HINTS[what]
    with cgbundle.load(bundle) as program, raises("update-invalid") as caught:
        program.update(make(tmp_path))
    assert caught.value.hint.startswith(cure)


def test_the_hint_of_names_that_lack_a_prefix(odd_bundle: Path) -> None:
    with cgbundle.load(odd_bundle) as program, raises("update-invalid", match="no weight 'weight'") as caught:
        program.update({"weight": torch.ones(11, 6)}, partial=True)
    assert caught.value.hint == "put the prefix 'embedding.' before the names"


# --- packed weights -----------------------------------------------------------------------------------------------


def quantized(seed: int) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(tiny(seed), {torch.nn.Linear}, dtype=torch.qint8)


def unpacked(layer: Any, name: str) -> dict[str, torch.Tensor]:
    weight = layer.weight()
    held = {"weight": weight.int_repr(), "scale": torch.tensor(weight.q_scale()), "bias": layer.bias().detach()}
    return under(f"{name}._packed_params.", held)


@pytest.fixture(scope="module")
def quantized_bundle() -> Path:
    folder = shared_build(
        "quantized",
        lambda at: cgcompile.build(
            quantized(0), lambda batch: (torch.randn(batch, 6),), sizes=[4], out=at / "quantized.cgb", target="cpu"
        ),
    )
    return folder / "quantized.cgb"


def test_a_packed_state_dict_is_refused_with_the_names_that_fit(quantized_bundle: Path) -> None:
    state = quantized(0).state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    with cgbundle.load(quantized_bundle) as program:
        before = program(X)
        for weights in (state, tensors, {"0.scale": state["0.scale"]}, {"0._packed_params.dtype": torch.qint8}):
            with raises("update-invalid", match="it has '0._packed_params.*weight'") as caught:
                program.update(weights, partial=True)
            assert "weight().int_repr()" in caught.value.hint
        assert torch.equal(program(X), before)


def test_unpacked_weights_are_taken(quantized_bundle: Path) -> None:
    model = quantized(7)
    with cgbundle.load(quantized_bundle) as program:
        check(program, quantized(0))
        program.update({**unpacked(model[0], "0"), **unpacked(model[2], "2")})
        check(program, model)


# --- files that change --------------------------------------------------------------------------------------------


def test_a_file_that_is_written_to_meanwhile_changes_nothing(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgbundle.call.update import OpenFile

    path = as_file(weights_of(tiny(7)), tmp_path)
    read = OpenFile.read

    def disturbed(self: Any, *arguments: int) -> None:
        read(self, *arguments)
        with open(path, "ab") as file:
            file.write(b"!")

    monkeypatch.setattr(OpenFile, "read", disturbed)
    with cgbundle.load(bundle) as program, raises("update-invalid", match="was written to while it was read"):
        program.update(path)
    monkeypatch.setattr(OpenFile, "read", lambda self, *arguments: (path.write_bytes(b""), read(self, *arguments)))
    with cgbundle.load(bundle) as program:
        with raises("update-invalid", match=r"new.safetensors: ends at byte \d+"):
            program.update(path if as_file(weights_of(tiny(7)), tmp_path) else None)
        check(program, tiny(0))


def test_a_session_that_cannot_take_them_leaves_all_as_they_are(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgbundle.cpu.backend import CpuBackend

    with cgbundle.load(bundle) as program:
        sessions = [program.session() for _ in range(3)]
        over, left = CpuBackend._over, iter([True, True, False])

        def failing(self: CpuBackend, *arguments: Any) -> Any:
            if not next(left):
                raise MemoryError
            return over(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(CpuBackend, "_over", failing)
            with pytest.raises(MemoryError):
                program.update(weights_of(tiny(7)))
        for caller in (program, *sessions):
            check(caller, tiny(0))
        program.update(weights_of(tiny(7)))
        for caller in (program, *sessions):
            check(caller, tiny(7))


def test_a_closed_program_has_no_weights(bundle: Path) -> None:
    program = cgbundle.load(bundle)
    session = program.session()
    session.close()
    program.update(weights_of(tiny(7)))
    check(program, tiny(7))
    program.close()
    with raises("program-closed"):
        program.update(weights_of(tiny(7)))


# --- what an update does not change -------------------------------------------------------------------------------


def test_state_small_weights_and_tied_ones(odd_bundle: Path, tmp_path: Path) -> None:
    manifest = archive.read_manifest(str(odd_bundle))
    reasons = {manifest.weights[row.weight].name: row.reason for row in manifest.frozen}
    assert reasons.pop("calls") == "state" and reasons.pop("mask") == "constant"
    assert set(reasons.values()) == {"constant"} and len(reasons) == 1, "the literal of forward()"
    (ids,) = numbers(2)
    model = odd(1)
    with cgbundle.load(odd_bundle) as program, torch.no_grad():
        torch.testing.assert_close(program(ids), odd(0)(ids), **CLOSE)
        program.update(weights_of(model))
        torch.testing.assert_close(program(ids), model(ids), **CLOSE)
        assert program.state["calls"].tolist() == [[2.0] * 6] * 2, "state stays, and goes on"
        for leave in ("head.weight", "embedding.weight"):  # as in checkpoints
            checkpoint = {name: value.contiguous() for name, value in weights_of(odd(2)).items() if name not in (leave, "calls")}
            program.update(as_file(checkpoint, tmp_path))
            torch.testing.assert_close(program(ids), odd(2)(ids), **CLOSE)
        with raises("update-invalid", match="'embedding.weight' and 'head.weight' are one tensor in the model, and differ"):
            program.update({**weights_of(odd(2)), "head.weight": torch.ones(11, 6)})
        torch.testing.assert_close(program(ids), odd(2)(ids), **CLOSE)


def test_what_is_fixed_may_be_given_as_it_is(odd_bundle: Path) -> None:
    checkpoint = {"mask": odd(0).mask, **weights_of(odd(1))}
    (ids,) = numbers(2)
    with cgbundle.load(odd_bundle) as program, torch.no_grad():
        program.update(checkpoint)
        torch.testing.assert_close(program(ids), odd(1)(ids), **CLOSE)
        with raises("update-refused", match="weight 'mask' is a constant of the model, and not in its state_dict"):
            program.update({**weights_of(odd(2)), "mask": torch.zeros(3, 6)})
        with raises("update-refused", match="weight 'calls' is state, which calls change") as caught:
            program.update({"calls": torch.ones(2, 6)}, partial=True)
        assert "program.state" in caught.value.hint
        torch.testing.assert_close(program(ids), odd(1)(ids), **CLOSE)


def test_the_self_test_is_about_the_first_weights(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        assert all(result.exact or result.error <= result.tolerance for result in self_test.replay_self_test(program))
        program.update(weights_of(tiny(7)))
        assert program.updated and program.session().updated
        with raises("self-test-outdated", match="was updated, and its self-test is about the weights that were loaded"):
            self_test.replay_self_test(program)
        program.warmup()
        check(program, tiny(7))


def test_a_profile_goes_on(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        with program.profile() as profile:
            program(X)
            program.update(weights_of(tiny(7)))
            check(program, tiny(7))
        assert len([row for row in profile.spans if "model" in str(row)]) >= 2
        check(program, tiny(7))


# --- updates during calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True], ids=["program", "sessions"])
def test_every_answer_is_by_the_old_weights_or_the_new_ones_entirely(bundle: Path, alone: bool) -> None:
    """Four threads call while the weights are replaced. Each call is split into three chunks, so that it runs several replays."""
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(9))
    models = [tiny(seed) for seed in range(5)]
    with torch.no_grad():
        expected = torch.stack([model(x) for model in models])
    with cgbundle.load(bundle) as program:
        callers = [program.session() if alone else program for _ in range(4)]
        seen: list[list[int]] = [[] for _ in callers]
        begun, done = threading.Barrier(len(callers) + 1), threading.Event()

        def call(place: int) -> None:
            begun.wait()
            last = False
            while not last:
                last = done.is_set() and len(seen[place]) >= SPIN  # a call that starts after the last update
                distances = (callers[place](x) - expected).abs().amax((1, 2))
                assert (distances < 1e-5).sum() == 1, distances
                seen[place].append(int(distances.argmin()))

        threads = [threading.Thread(target=checked(call, done, failures := []), args=(place,)) for place in range(len(callers))]
        for thread in threads:
            thread.start()
        begun.wait()
        try:
            for model in models[1:]:
                program.update(weights_of(model))
                torch.testing.assert_close(program(x), model(x), **CLOSE)
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert not failures and all(indices == sorted(indices) and indices[-1] == 4 for indices in seen), (failures, seen)


def test_packed_weights_are_not_used_for_later_weights_at_the_same_address(bundle: Path) -> None:
    """The threads that call free the memory of old weights, and later updates receive the same memory."""
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(9))
    models = [tiny(seed) for seed in range(5)]
    with torch.no_grad():
        expected = torch.stack([model(x) for model in models])

    def index_of(answer: torch.Tensor) -> int:
        distances = (answer - expected).abs().amax((1, 2))
        assert (distances < 1e-5).sum() == 1, distances
        return int(distances.argmin())

    with cgbundle.load(bundle) as program:
        sessions, done = [program.session() for _ in range(4)], threading.Event()

        def call(place: int) -> None:
            while not done.is_set():
                index_of(sessions[place](x))

        threads = [threading.Thread(target=checked(call, done, failures := []), args=(place,)) for place in range(len(sessions))]
        for thread in threads:
            thread.start()
        try:
            for turn in range(300):
                program.update(weights_of(models[1 + turn % 4]))
                assert index_of(program(x)) == 1 + turn % 4
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert not failures


def checked(call: Callable[[int], None], done: threading.Event, failures: list[BaseException]) -> Callable[[int], None]:
    def run(place: int) -> None:
        try:
            call(place)
        except BaseException as error:  # the test reports it
            failures.append(error)
            done.set()
            raise

    return run


def test_the_memory_of_old_weights_is_given_back(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        seen = []
        for seed in range(3):
            program.update(weights_of(tiny(seed)))
            bound = program._backend._bound
            seen += map(weakref.ref, [bound.weights._moved["2.bias"][1], *bound.regions])
        gc.collect()
        assert [reference() is not None for reference in seen] == [False] * 4 + [True] * 2
        del bound
