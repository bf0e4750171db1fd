"""The model on its target device. Device `cpu:0` replaces the GPU: torch copies tensors that move from `cpu` to `cpu:0`."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgcompile.model.devices import placing
from cgcompile.model.devices.placing import placed
from cgcompile.model.flat_module import FlatModule, run_eager
from cgcompile.model.load import load_source
from cgcompile.model.source import Source, sample
from tests.helpers.raising import raises

OTHER = torch.device("cpu", 0)


class Tied(torch.nn.Module):
    """Two names of one parameter, two views of one storage, a transposed view, and an unregistered tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 4)
        self.two = torch.nn.Linear(4, 4)
        self.two.weight = self.one.weight
        both = torch.arange(8.0)
        self.register_buffer("low", both[:4])
        self.register_buffer("high", both[4:])
        self.register_buffer("across", torch.zeros(3, 5).t())
        self.tables = {"first": [torch.ones(2)]}

    def forward(self, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        return self.two(self.one(x)) + self.low + self.high


def source(model: torch.nn.Module, owned: bool) -> Source:
    model_source = load_source(model, lambda batch: (torch.zeros(batch, 4), torch.zeros(1, 4).expand(batch, 4)))
    return Source(name="x", label="x", code="", model=model, inputs=model_source.inputs, dimensions=("batch",), owned=owned)


def test_all_that_a_model_holds_moves_and_what_is_shared_still_is() -> None:
    model = Tied()
    tensors = [*model.parameters(), *model.buffers(), model.tables["first"][0]]
    before = {tensor.data_ptr() for tensor in tensors}
    with placed(source(model, owned=True), OTHER) as there:
        assert there.device == OTHER
        assert not before & {tensor.data_ptr() for tensor in tensors}
        assert model.one.weight is model.two.weight
        assert model.high.tolist() == [4, 5, 6, 7]
        low, high = model.low.untyped_storage(), model.high.untyped_storage()
        assert low._cdata == high._cdata and model.high.storage_offset() == 4
        assert model.across.stride() == (1, 5)


class Slotted:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table = torch.ones(2)


class Scale:
    def __init__(self) -> None:
        self.factor = torch.ones(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Odd:
    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise ValueError("not to be looked at")


class Scattered(torch.nn.Module):
    """Tensors that are in no list or dict of a module's attributes."""

    def __init__(self) -> None:
        super().__init__()
        inside, bound = torch.ones(2), torch.ones(2)
        self.odd, self.slotted, self.scale = Odd(), Slotted(), Scale()
        self.later, self.near = functools.partial(torch.add, bound), collections.deque([torch.ones(2)])
        self.function = lambda x: x + inside
        self.all = [self.slotted.table, self.scale.factor, bound, self.near[0], inside]


def test_tensors_in_objects_and_functions_move_too() -> None:
    model = Scattered()
    tensors = model.__dict__.pop("all")
    before = {tensor.data_ptr() for tensor in tensors}
    with placed(source(model, owned=True), OTHER):
        assert not before & {tensor.data_ptr() for tensor in tensors}


def test_the_memory_of_an_owned_model_goes_while_it_is_moved() -> None:
    model = Tied()
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (model.one.weight, model.low)]
    with placed(source(model, owned=True), OTHER):
        assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_of_the_callers_is_at_the_end_what_it_was(fails: bool) -> None:
    model = Tied()
    model.one.kept = None
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    try:
        with placed(source(model, owned=False), OTHER):
            model.one.kept = torch.zeros(1, device=OTHER)  # forward() fills a cache
            model.one.more = torch.zeros(1, device=OTHER)
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert model.tables["first"][0].tolist() == [1, 1] and model.one.kept is None and not hasattr(model.one, "more")
    assert model(torch.zeros(2, 4)).shape == (2, 4)


def test_inputs_are_drawn_here_and_go_where_the_model_is() -> None:
    with placed(source(Tied(), owned=True), OTHER) as there:
        example = sample(there, {"batch": 3})
        assert example.tensors[0].data_ptr() != example.args[0].data_ptr()
        assert example.tensors[1].stride() == (0, 1)  # the strides of the user's tensor


def test_a_model_that_is_too_large_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: list[torch.Tensor], device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")

    monkeypatch.setattr(placing, "_move", full)
    with raises("gpu-memory", match="x: CUDA out of memory. Tried"), placed(source(Tied(), owned=True), OTHER):
        pass


class Moving(torch.nn.Module):
    """Moves to the host and back, writes there, and creates tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.devices: list[str] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.devices = [
            str(tensor.device) for tensor in (x, x.cpu(), torch.zeros(1), torch.ones(1, device="cpu"), self.layer.weight)
        ]
        y = self.layer(x).cpu()
        self.seen += y.sum(0).to(x.device)
        return y.to(x.device) + torch.arange(4) + torch.tensor([1.0] * 4), y * torch.ones(4, device="cpu")


def test_eager_pytorch_runs_a_model_where_it_was_placed() -> None:
    """Outside of a trace, device moves are executed, and the user's code sees the real devices."""
    model = Moving().eval()
    x = torch.randn(3, 4)
    inside = model.layer(x).detach()
    model_source = Source(
        name="x", label="x", code="", model=model, inputs=lambda batch: (torch.ones(batch, 4),), dimensions=("batch",), owned=True
    )
    with placed(model_source, OTHER) as there:
        ran = run_eager(FlatModule(model, sample(there, {"batch": 3}), there.device), [x])
    first, second = ran.outputs
    torch.testing.assert_close(first, inside + torch.arange(4) + 1)
    torch.testing.assert_close(second, inside)
    torch.testing.assert_close(ran.state["seen"], inside.sum(0))
    assert model.devices == ["cuda:0", "cpu", "cuda:0", "cpu", "cuda:0"] and not model.seen.any()
