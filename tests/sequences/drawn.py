"""Generates the source of a model file: a small module with attributes of several kinds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from textwrap import indent

WIDTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """Lines for `__init__`, and lines for `forward(x, y)`, which change `y` (batch, seq, WIDTH). `{a}` is replaced by a unique
    name."""

    name: str
    init: str
    forward: str


FAITHFUL = (
    Feature(name="lazy from a weight", init="", forward="""\
if not hasattr(self, "{a}"):
    self.{a} = self.linear.weight.sum(0)
y = y + self.{a}"""),
    Feature(name="lazy, None first", init="self.{a} = None", forward="""\
if self.{a} is None:
    self.{a} = torch.linspace(0, 1, 8)
y = y * self.{a}"""),
    Feature(name="lazy in a dict", init="self.{a} = dict()", forward="""\
if "bias" not in self.{a}:
    self.{a}["bias"] = self.linear.bias.detach() * 2
y = y - self.{a}["bias"]"""),
    Feature(name="grows with the sizes", init="self.{a} = torch.zeros(0, 1)", forward="""\
if x.shape[1] > self.{a}.shape[0]:
    self.{a} = torch.arange(x.shape[1]).sin()[:, None]
y = y + self.{a}[: x.shape[1]]"""),
    Feature(name="made for other sizes", init="self.{a}_size = 0", forward="""\
if self.{a}_size != x.shape[1]:
    self.{a}_size = x.shape[1]
    self.{a} = torch.ones(x.shape[1], x.shape[1]).tril()
y = self.{a} @ y"""),
    Feature(name="by sizes in a dict", init="self.{a} = dict()", forward="""\
key = tuple(x.shape[:2])
if key not in self.{a}:
    self.{a}[key] = torch.arange(key[0])[:, None, None] * 0.5 + key[1]
y = y + self.{a}[key]"""),
    Feature(name="a counter that nobody reads", init="self.{a} = 0", forward="self.{a} += 1"),
    Feature(name="a counter", init="self.{a} = 0", forward="""\
self.{a} += 1
y = y * (1 + 0.1 * self.{a})"""),
    Feature(name="a decay", init="self.{a} = 1.0", forward="""\
y = y * self.{a}
self.{a} = self.{a} * 0.9"""),
    Feature(name="written before it is read", init="", forward="""\
self.{a} = y.abs()
y = y + self.{a}.mean()"""),
    Feature(name="a list written before it is read", init="self.{a} = []", forward="""\
self.{a} = [y]
self.{a}.append(y * 0.5)
y = sum(self.{a})"""),
    Feature(name="a tensor of the call before", init="self.{a} = torch.zeros(8)", forward="""\
y, self.{a} = y + self.{a}, y.mean((0, 1))"""),
    Feature(name="a tensor written in place", init="self.{a} = torch.zeros(8)", forward="""\
self.{a}.mul_(0.5).add_(y.mean((0, 1)))
y = y + self.{a}"""),
    Feature(name="a buffer", init='self.register_buffer("{a}", torch.zeros(8))', forward="""\
self.{a} = self.{a} * 0.5 + y.mean((0, 1))
y = y + self.{a}"""),
    Feature(name="a buffer that the first calls fill", init="""\
self.register_buffer("{a}", torch.zeros(16, 8), persistent=False)
self.{a}_length = 0""", forward="""\
if x.shape[1] > self.{a}_length:
    self.{a}[: x.shape[1]] = torch.arange(x.shape[1])[:, None].cos()
    self.{a}_length = x.shape[1]
y = y + self.{a}[: x.shape[1]]"""),
    Feature(name="an object that counts", init="self.{a} = SimpleNamespace(total=torch.zeros(()), calls=0)", forward="""\
self.{a}.total += 1
y = y + self.{a}.total"""),
    Feature(name="sizes of the call", init="self.{a} = None", forward="""\
self.{a} = (x.shape[0], x.shape[1])
y = y / (self.{a}[0] + self.{a}[1])"""),
    Feature(name="a dtype", init="self.{a} = None", forward="""\
if self.{a} is None or self.{a}.dtype != x.dtype:
    self.{a} = torch.full((8,), 3.0, dtype=x.dtype)
y = y * self.{a}"""),
)  # fmt: skip
"""Each call's result depends only on its inputs, weights, and numbers and tensors that can become buffers."""

UNFAITHFUL = (
    Feature(name="lazy from an input", init="", forward="""\
if not hasattr(self, "{a}"):
    self.{a} = x.std()
y = y * self.{a}"""),
    Feature(name="from an input of other sizes", init="", forward="""\
if getattr(self, "{a}", None) is None or self.{a}.shape[0] != x.shape[0]:
    self.{a} = x.mean((1, 2))
y = y + self.{a}[:, None, None]"""),
    Feature(name="another first call", init="self.{a} = True", forward="""\
if self.{a}:
    y = y * 2
    self.{a} = False"""),
    Feature(name="the largest size so far", init="self.{a} = 0", forward="""\
self.{a} = max(self.{a}, x.shape[1])
y = y * self.{a}"""),
    Feature(name="every other call", init="self.{a} = False", forward="""\
self.{a} = not self.{a}
y = y * (2 if self.{a} else 3)"""),
    Feature(name="a count in a list", init="self.{a} = []", forward="""\
self.{a}.append(0)
y = y * len(self.{a})"""),
    Feature(name="in a dict, from an input", init="self.{a} = dict()", forward="""\
y = y + self.{a}.setdefault(x.shape[1], x.amax())"""),
)  # fmt: skip
"""Results depend on earlier calls in a way that no buffer can hold: they must be refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A model file's `text`, the names of its features, whether all are in FAITHFUL, and its sizes by dimension."""

    text: str
    features: tuple[str, ...]
    faithful: bool
    sizes: dict[str, tuple[int, ...]]


def draw(seed: int, unfaithful: float) -> Drawn:
    """Generates the module of a seed. `unfaithful` is the share of modules with a feature in UNFAITHFUL."""
    chance = random.Random(seed)
    chosen = chance.sample(FAITHFUL, chance.randint(1, 3))
    faithful = chance.random() >= unfaithful
    if not faithful:
        chosen.insert(chance.randrange(len(chosen) + 1), chance.choice(UNFAITHFUL))
    nested = [chance.random() < 0.3 for _ in chosen]
    inner = [feature for feature, below in zip(chosen, nested, strict=True) if below]
    outer = [feature for feature, below in zip(chosen, nested, strict=True) if not below]
    text = HEAD + _module("Inner", inner, "") + _module("Model", outer, "self.inner = Inner()\n" if inner else "") + TAIL
    sizes = {
        "batch": tuple(sorted(chance.sample(range(1, 7), chance.randint(1, 2)))),
        "seq": tuple(sorted(chance.sample(range(2, 9), chance.randint(1, 2)))),
    }
    return Drawn(text=text, features=tuple([feature.name for feature in chosen]), faithful=faithful, sizes=sizes)


def _module(name: str, features: list[Feature], more: str) -> str:
    parts = [(feature, {"a": f"{'abcdef'[place]}_{name.lower()}"}) for place, feature in enumerate(features)]
    init = more + "\n".join([_named(feature.init, names) for feature, names in parts])
    body = ("y = self.inner(y)\n" if more else "") + "\n".join([_named(feature.forward, names) for feature, names in parts])
    return MODULE.format(name=name, init=indent(init, " " * 8), body=indent(body, " " * 8))


def _named(text: str, names: dict[str, str]) -> str:
    return text.replace("{a}", names["a"])


HEAD = """\
from types import SimpleNamespace

import torch
from torch import nn
"""

MODULE = """

class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
{init}

    def forward(self, x):
        y = self.linear(x)
{body}
        return y
"""

TAIL = """

def model():
    torch.manual_seed(0)
    return Model().eval()


def inputs(batch, seq):
    return (torch.randn(batch, seq, 8),)
"""
