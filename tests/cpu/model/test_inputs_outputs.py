"""Arguments and results as users write them: described, rebuilt with other tensors, or refused with the user's line."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from cgbundle.call.entry import builder
from cgbundle.call.structure import flattener
from cgbundle.format.pytree import check
from cgbundle.format.schema import Parameter
from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.model.dynamic_axes import input_shapes
from cgcompile.model.load import load_source
from cgcompile.model.pytree import NamedTensor, contexts, describe, rebuild
from cgcompile.model.source import Sample, sample
from tests.helpers.raising import raises

HERE = "tests/cpu/model/test_inputs_outputs.py"


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float = 2.0
    more: tuple[Any, ...] = ()
    total: torch.Tensor | None = field(default=None, init=False)


@dataclass(slots=True)
class Slotted:
    inner: Frozen
    names: list[str]

    def __post_init__(self) -> None:
        raise AssertionError("an instance is made again without its constructor")


class Registered:
    """A class that is registered with torch's pytrees, with keys."""

    def __init__(self, a: Any, b: Any, note: Any = None) -> None:
        self.a, self.b, self.note = a, b, note


class Positions(Registered):
    """A class that is registered with torch's pytrees, without keys."""


class Constant:
    """A class without children."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant)

    def __hash__(self) -> int:
        return 0


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    keys = (pytree.MappingKey("a"), pytree.GetAttrKey("b"))
    pytree.register_pytree_node(
        Registered, lambda r: ([r.a, r.b], r.note), lambda items, note: Registered(*items, note),
        flatten_with_keys_fn=lambda r: (list(zip(keys, [r.a, r.b], strict=True)), r.note),
    )  # fmt: skip
    pytree.register_pytree_node(Positions, lambda r: ([r.a, r.b], None), lambda items, _: Positions(*items))
    pytree.register_constant(Constant)


def slotted(inner: Frozen, names: list[str]) -> Slotted:
    instance = object.__new__(Slotted)
    instance.inner, instance.names = inner, names
    return instance


def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


VALUES: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: Pair(ones(1), [ones(2), None]), ["left", "right.0"]),
    (lambda: torch.topk(ones(3), 2), ["values", "indices"]),
    (lambda: Frozen(ones(1), more=(ones(2), {"k": 3})), ["x", "more.0"]),
    (lambda: slotted(Frozen(ones(1)), ["a", "b"]), ["inner.x"]),
    (lambda: {"p": Registered(ones(1), Positions(ones(2), ones(3)))}, ["p.a", "p.b.0", "p.b.1"]),
    (lambda: OrderedDict(b=ones(1), a=defaultdict(list, {7: ones(2)})), ["b", "a.7"]),
]


@pytest.mark.parametrize(("make", "paths"), VALUES)
def test_what_is_described_is_made_again_with_other_tensors_and_the_same_types(make: Callable[[], Any], paths: list[str]) -> None:
    value = make()
    leaves: list[NamedTensor] = []
    tree = json.loads(json.dumps(describe(value, "", leaves)))
    check(tree, "result", len(leaves))
    assert [path for path, _ in leaves] == paths
    others = [tensor + 1 for _, tensor in leaves]
    instance = rebuild(tree, others, value)
    assert type(instance) is type(value) and contexts(instance, "") == contexts(value, "")
    again: list[NamedTensor] = []
    assert describe(instance, "", again) == tree
    assert all(one is other for one, (_, other) in zip(others, again, strict=True))
    # the runtime flattens the instance in the same way, and accepts its own result instead
    flatten = flattener({"call": [["value", tree]]}, [Parameter()])
    if "p" not in paths[0]:  # without keys, a registered class is a tuple there
        assert all(one is other for one, other in zip(others, flatten((instance,), {}), strict=True))
    assert all(one is other for one, other in zip(others, flatten((builder(tree)(others),), {}), strict=True))


def test_a_result_without_its_class_is_read_in_the_same_way() -> None:
    leaves: list[NamedTensor] = []
    tree = describe(slotted(Frozen(ones(1), more=(1, "two")), ["a"]), "", leaves)
    instance = builder(tree)(["tensor"])
    assert (instance.inner.x, instance.inner.scale, instance.inner.more, instance.inner.total, instance.names) == (
        "tensor",
        2.0,
        (1, "two"),
        None,
        ["a"],
    )
    assert repr(instance).startswith("Slotted(inner=Frozen(x='tensor', scale=2.0, ")
    topk = builder(describe(torch.topk(ones(3), 2), "", []))(["v", "i"])
    assert (topk.values, topk.indices, tuple(topk)) == ("v", "i", ("v", "i"))


# --- arguments -------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def forward(self, x: Any, y: Any = None, *rest: Any, scale: float = 1.0, **more: Any) -> Any:
        return x


class Named(nn.Module):
    def forward(self, states: Any, options: Any = None) -> Any:
        return states[0]


X, Y = torch.zeros(1), torch.ones(1)


def sample_of(model: nn.Module, value: Any) -> Sample:
    return sample(load_source(model, lambda: value), {})


@pytest.mark.parametrize(
    ("model", "value", "names", "args", "kwargs"),
    [
        (Plain(), X, ["x", "y", "scale"], 1, []),
        (Plain(), (X, Y), ["x", "y", "scale"], 2, []),
        (Plain(), {"y": Y, "x": X}, ["x", "y", "scale"], 0, ["y", "x"]),
        (Plain(), ((X,), {"y": Y}), ["x", "y", "scale"], 1, ["y"]),
        (Plain(), ((X, Y, X, X), {"scale": 2.0, "own": Y}), ["x", "y", "rest_0", "rest_1", "scale", "own"], 4, ["scale", "own"]),
        (Plain(), ((), {"x": X}), ["x", "y", "scale"], 0, ["x"]),
        (Plain(), ((X,), {}), ["x", "y", "scale"], 1, []),
        (Plain(), ((X, Y), {"x": X}), ["x", "y", "scale"], 2, []),  # x twice would be an error: so these are two arguments
        (Plain(), ([X], {"y": Y}), ["x", "y", "scale"], 2, []),  # `args` must be a tuple, not a list
        (Named(), ((X, Y), {"mode": 1}), ["states", "options"], 2, []),  # forward() takes no mode
        (Named(), ((X, Y), {"options": None}), ["states", "options"], 2, []),  # nor both arguments at once
        (Named(), Pair(X, Y), ["states", "options"], 2, []),
        (Named(), Frozen(X), ["states", "options"], 1, []),
    ],
)
def test_what_inputs_gives_is_one_argument_several_by_position_by_name_or_both(
    model: nn.Module, value: Any, names: list[str], args: int, kwargs: list[str]
) -> None:
    example = sample_of(model, value)
    assert [name for name, _ in example.call["call"]] == names
    assert (len(example.args), list(example.kwargs)) == (args, kwargs)


def test_two_arguments_of_one_name_are_refused() -> None:
    with raises("source-invalid", match="two arguments of forward\\(\\) have the name 'rest_0'"):
        sample_of(Plain(), ((X, Y, X), {"rest_0": X}))


# --- what is refused -------------------------------------------------------------------------------------------------


class Strange:
    """An object that no bundle can describe."""


class Gives(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "said", "hint"),
    [
        (lambda x: Strange(), r"output: .*\.Strange cannot be described", "dataclasses"),
        (lambda x: {"a": [x, Frozen(x, more=(Strange(),))]}, r"a\.1\.more\.0: .*\.Strange cannot be described", "dataclasses"),
        (lambda x: (x, type("MambaCache", (), {})()), r"1: .*\.MambaCache cannot be described", "use_cache = False"),
        (lambda x: (x, numpy.ones(2)), r"1: numpy.ndarray cannot be described", "torch.from_numpy"),
        (lambda x: (x, Constant()), r"1: .*\.Constant cannot be described", "dataclasses"),
        (lambda x: {"low": x.to(torch.float8_e8m0fnu)}, r"low: dtype torch.float8_e8m0fnu", ""),
        (lambda x: [float("nan")], r"0: a bundle holds no number nan", ""),
    ],
)
def test_a_result_that_no_bundle_holds_is_refused_with_its_path_and_the_line_of_forward(
    make: Callable[[torch.Tensor], Any], said: str, hint: str
) -> None:
    line = Gives.forward.__code__.co_firstlineno
    code = "dtype-unsupported" if "dtype" in said else "structure-unsupported"
    with raises(code, match=rf"^{HERE}:{line}: forward\(\) gives {said}") as caught:
        export(load_source(Gives(make), lambda: X), {})
    assert hint in caught.value.hint


def with_note() -> Any:
    instance = Frozen(X)
    object.__setattr__(instance, "note", X)
    return (instance,)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (lambda: ({"a": Strange()},), r"x\.a: .*\.Strange cannot be described"),
        (with_note, r"x: its attribute 'note' is no field: it can be an output, but no input"),
        (lambda: (Registered(X, Y, note=3.0),), r"x: Registered keeps 3.0 beside its tensors: it can be an output"),
    ],
)
def test_an_input_that_cannot_be_made_again_is_refused_with_its_path_and_the_line_of_inputs(
    inputs: Callable[[], Any], said: str
) -> None:
    with raises("structure-unsupported", match=rf"^{HERE}:{inputs.__code__.co_firstlineno}: inputs\(\) gives {said}"):
        sample(load_source(Gives(lambda x: x), inputs), {})


# --- caches ----------------------------------------------------------------------------------------------------------


def caches() -> Any:
    return pytest.importorskip("transformers.cache_utils")


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip


def filled(cache: Any, batch: int, tokens: int) -> Any:
    cache.update(torch.randn(batch, 2, tokens, 4), torch.randn(batch, 2, tokens, 4), 0)
    return cache


def test_a_cache_is_its_layers_tensors() -> None:
    library = caches()
    dynamic, static = filled(library.DynamicCache(), 1, 3), filled(library.StaticCache(config=config(), max_cache_len=8), 1, 3)
    both = library.EncoderDecoderCache(filled(library.DynamicCache(), 1, 3), filled(library.DynamicCache(), 1, 3))
    for value, paths in (
        (dynamic, ["layers.0.keys", "layers.0.values"]),
        (static, ["layers.0.keys", "layers.0.values", "layers.0.cumulative_length"]),
        (both, [f"{name}_attention_cache.layers.0.{part}" for name in ("self", "cross") for part in ("keys", "values")]),
    ):
        leaves: list[NamedTensor] = []
        tree = describe(value, "", leaves)
        assert sorted(path for path, _ in leaves) == sorted(paths)
        others = [tensor.clone() for _, tensor in leaves]
        again = rebuild(tree, others, value)
        assert type(again) is type(value) and again.get_seq_length() == value.get_seq_length()
        filled(getattr(again, "self_attention_cache", again), 1, 1)
        assert value.get_seq_length() == 3, "the example stays as it is"


def test_a_cache_is_an_input_whose_length_is_a_dimension() -> None:
    library = caches()
    source = load_source(Gives(lambda x: x.layers[0].keys), lambda past: filled(library.DynamicCache(), 2, past))
    assert input_shapes(source, {"past": (2, 4)}) == [(2, 2, "past", 4)] * 2
    static = load_source(
        Gives(lambda x: x.layers[0].keys),
        lambda batch, length: filled(library.StaticCache(config=config(), max_cache_len=length), batch, 1),
    )
    with raises("source-invalid", match=r"input 'x.layers.0': its max_cache_len, 4, changes with length"):
        input_shapes(static, {"batch": (1, 2), "length": (2, 4)})


def test_a_cache_that_counts_in_python_is_an_output_and_no_input() -> None:
    library = caches()
    cache = library.DynamicCache()
    cache.layers.append(library.DynamicSlidingWindowLayer(sliding_window=4))
    filled(cache, 1, 6)
    leaves: list[NamedTensor] = []
    describe(cache, "", leaves)
    assert [path for path, _ in leaves] == ["layers.0.keys", "layers.0.values"]
    with raises("structure-unsupported", match=r"x\.layers\.0: DynamicSlidingWindowLayer counts its tokens in a number of Python"):
        sample(load_source(Gives(lambda x: x), lambda: cache), {})


class Holder(nn.Module):
    """Stores a tensor where no buffer can replace it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = (torch.zeros(1),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[0].add_(x)
        return x + self.kept[0]


def test_a_write_to_a_tensor_that_a_tuple_keeps_is_refused_with_its_line_and_what_to_do() -> None:
    line = Holder.forward.__code__.co_firstlineno + 1
    exported = export(load_source(Holder(), lambda: torch.ones(1)), {})
    with raises("state-changed", match=rf"^{HERE}:{line}: forward\(\) writes to a tensor in an attribute") as caught:
        functional(exported.programs.first)
    assert "buffer" in caught.value.hint and "let inputs() give a cache" in caught.value.hint
