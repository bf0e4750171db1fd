"""Passes over Inductor's graphs: buffers that swap values, the dtype of scattered numbers, and numbers inside sympy's
`Identity`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sympy  # noqa: E402
from torch.fx import symbolic_trace  # noqa: E402
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing  # noqa: E402

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.targets.cuda.inductor import compile_graph  # noqa: E402
from cgcompile.transforms.inductor_passes import mended, passes, read_old_values  # noqa: E402

aten, rev = torch.ops.aten, torch.ops.prims.rev.default


class Swapping(torch.nn.Module):
    """Two pairs of buffers that swap their values, one pair through an addition of zero."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate("abcd"):
            self.register_buffer(name, torch.full((4,), float(number)))

    def forward(self, x: Any) -> Any:
        a, b, c, d = [buffer.clone() for buffer in (self.a, self.b, self.c, self.d)]
        for place, value in zip((self.a, self.b, self.c, self.d), (b, a, d + 0, c), strict=True):
            place.copy_(value)
        return torch.stack([self.a, self.b, self.c, self.d]) + x


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_bundle_swaps_them_as_eager_pytorch_does(tmp_path: Path, target: str) -> None:
    """The proof of a cross-compiled bundle interprets its rows and compares the buffers."""
    path = cgcompile.build(Swapping(), lambda: (torch.zeros(4),), out=tmp_path / "swapping.cgb", target=target).path
    if target == "cpu":
        eager = Swapping()
        with cgbundle.load(path) as program:
            for _ in range(3):
                assert torch.equal(program(torch.zeros(4)), eager(torch.zeros(4)))


class Emptied(torch.nn.Module):
    """A counter that a call resets to the value of another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.full((4,), 7.0))
        self.register_buffer("held", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        total = self.held + x
        self.held.copy_(self.first)
        return total


def test_a_bundle_begins_with_the_buffers_of_the_model(tmp_path: Path) -> None:
    """While Inductor compiles, it copies one buffer to another. The bundle has the values before."""
    path = cgcompile.build(Emptied(), lambda: (torch.zeros(4),), out=tmp_path / "emptied.cgb", target="cpu").path
    with cgbundle.load(path) as program:
        assert [float(program(torch.zeros(4))[0]) for _ in range(2)] == [0, 7]


def test_only_values_of_what_is_written_before_are_made_first() -> None:
    def shifted(a: Any, b: Any, c: Any) -> Any:
        aten.copy_.default(a, b)
        aten.copy_.default(b, c)
        return aten.add.Tensor(c, 1)

    def swapped(a: Any, b: Any) -> Any:
        old = aten.clone.default(a)
        aten.copy_.default(a, b)
        aten.copy_.default(b, old)
        return aten.add.Tensor(b, 1)

    kept, changed = symbolic_trace(shifted).graph, symbolic_trace(swapped).graph
    for graph in (kept, changed):
        read_old_values(graph)
        graph.lint()
    assert not kept.find_nodes(op="call_function", target=rev)
    (node,) = changed.find_nodes(op="call_function", target=rev)
    (user,) = node.users
    assert user.args[0].name == "b" and user.args[1] is node


def test_caches_know_the_pass_by_its_text() -> None:
    assert [pass_.uuid() for pass_ in passes().values()] == [pass_.uuid() for pass_ in passes().values()]


class Scattered(torch.nn.Module):
    """Writes numbers to one column of every row, in each dtype."""

    def forward(self, columns: Any) -> Any:
        def one(dtype: Any, number: Any) -> Any:
            return torch.zeros(2, 8, dtype=dtype).scatter_(1, columns, number)

        masks = [
            one(torch.float32, 1),
            one(torch.float32, 0.5),
            one(torch.bfloat16, 1.5),
            one(torch.int32, 3),
            one(torch.bool, True),
        ]
        return *masks, one(torch.bool, True), torch.full((2, 8), 2).scatter_(1, columns, 5)


def test_numbers_that_are_scattered_keep_the_dtype() -> None:
    columns = torch.tensor([[1], [3]])
    exported = torch.export.export(Scattered(), (columns,)).module()
    # one kernel: no compile processes, no precompiled headers, no probes of instruction sets
    options = {"force_disable_caches": True, "compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
    with torch.no_grad():
        outputs = compile_graph(exported, [columns], options, dynamic=False)(columns)
    for one, want in zip(outputs, Scattered()(columns), strict=True):
        assert one.dtype == want.dtype and torch.equal(one, want)


class Repeating(torch.nn.Module):
    """Equal outputs, which become one operation."""

    def forward(self, x: Any) -> Any:
        count = x.gt(0.5).sum()
        shown = torch.where(torch.arange(x.shape[0]) < count, x, 0.0)
        return count.clone(), shown.clone(), shown.clone(), count.clone()


def test_equal_outputs_are_tensors_of_their_own(tmp_path: Path) -> None:
    """Before the fix, compiled code returned one tensor twice, and the calling process crashed."""
    x = torch.rand(6)
    with cgbundle.load(cgcompile.build(Repeating(), lambda: (x,), out=tmp_path / "equal.cgb", target="cpu").path) as program:
        for one, want in zip(program(x), Repeating()(x), strict=True):
            assert torch.equal(one, want)


class Rotated(torch.nn.Module):
    """Concatenates transposed values with two tensors without elements, as rotary embeddings of all columns do."""

    def forward(self, x: Any) -> Any:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        joined = torch.cat([heads[..., :0], heads + 1, heads[..., 4:]], -1)
        return joined.view(-1, 6, 4)


def test_a_concatenation_with_empty_tensors_can_be_viewed(tmp_path: Path) -> None:
    """Before the fix, Inductor copied the only tensor with elements and kept its strides, with which the view is not possible."""
    x = torch.rand(3, 6, 8)
    with cgbundle.load(cgcompile.build(Rotated(), lambda: (x,), out=tmp_path / "rotated.cgb", target="cpu").path) as program:
        assert torch.equal(program(x), Rotated()(x))


def test_a_number_that_identity_is_a_part_of_is_compared() -> None:
    two, three = sympy.Integer(2), sympy.Integer(3)
    x = sympy.Symbol("x", integer=True, nonnegative=True)
    with pytest.raises(ValueError, match="not comparable"):
        sympy.Max(Identity(two) + 1, 0)
    with mended():
        assert sympy.Max(Identity(two) + 1, 0) == 3 and sympy.Min(Identity(two) + 1, 2) == 2
        assert sympy.Max(FloorDiv(Identity(three), 2) - 1, 0) == 0 and sympy.Max(ModularIndexing(Identity(two), 3, 3) - 1, 0) == 0
        assert sympy.Max(Identity(x) - 1, 1).xreplace({x: sympy.Integer(0)}) == 1
    with pytest.raises(ValueError, match="not comparable"):
        sympy.Max(Identity(sympy.Integer(0)) + 1, 0)


def test_rules_of_dtypes_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.lowering
    from torch._inductor import utils
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    calls, names = [], utils.boolean_ops()
    monkeypatch.setattr(utils, "boolean_ops", lambda: calls.append(1) or names)
    with mended():
        for _ in range(3):
            assert DtypePropagationOpsHandler().eq(1, 2) == torch.bool
        assert len(calls) == 1
        monkeypatch.setitem(utils.op_dtype_propagation_rules, "registered_later", utils.op_dtype_propagation_rules["add"])
        assert DtypePropagationOpsHandler().registered_later is not None
    assert len(calls) == 2


class Factors(torch.nn.Module):
    """Sums with scaled matrix products, one inside a branch."""

    def forward(self, x: Any, a: Any, b: Any) -> Any:
        first = torch.add(x.exp(), a @ b, alpha=-1) + torch.add(a @ b, x.exp(), alpha=0.5)
        if x.sum() > 0:
            return torch.add(first, b.T @ a.T, alpha=3)
        return torch.add(first, a @ b, alpha=-2)


def test_a_sum_keeps_its_factor(tmp_path: Path) -> None:
    draw = lambda: (torch.randn(4, 4), torch.randn(4, 6), torch.randn(6, 4))  # noqa: E731
    path = cgcompile.build(Factors(), draw, out=tmp_path / "factors.cgb", target="cpu").path
    with cgbundle.load(path) as program:
        for seed in range(6):
            torch.manual_seed(seed)
            tensors = draw()
            torch.testing.assert_close(program(*tensors), Factors()(*tensors))
