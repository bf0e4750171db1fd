"""Code that is compiled for all sizes: guards on the sizes of the example restrict no other size."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true  # noqa: E402

from cgcompile.targets.cpu.symbols import _limits, decided_alike  # noqa: E402
from tests.helpers.raising import raises  # noqa: E402

OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_cpp_only": True,
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": True,
}
"""No code of Inductor is compiled."""


class Filtered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = torch.nn.Conv2d(1, 4, 3)

    def forward(self, x: Any) -> Any:
        return self.filter(x).relu()


def exported(rows: int) -> tuple[Any, Any]:
    """Returns a convolution over at most 16 rows, exported with an example of `rows`, and the symbol of its rows."""
    sizes = {0: torch.export.Dim("batch", min=1, max=16)}
    program = torch.export.export(Filtered().eval(), (torch.zeros(rows, 1, 8, 8),), dynamic_shapes=(sizes,))
    placeholder = program.graph.find_nodes(op="placeholder")[-1]
    return program, placeholder.meta["val"].shape[0]


def ends_of_loops(folder: Path, decided: bool) -> list[str]:
    """Returns the loop ends that are expressions instead of numbers."""
    program, _ = exported(16)
    context: AbstractContextManager[None] = decided_alike(program) if decided else nullcontext()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), context:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        files = torch._inductor.aot_compile(program.module(), program.example_inputs[0], options=OPTIONS)
    code = "\n".join([Path(file).read_text() for file in files if str(file).endswith(".cpp")])
    return [end for end in re.findall(r"<static_cast<int64_t>\(([^)]+)\)", code) if not end.removesuffix("L").isdigit()]


def test_a_convolution_of_sixteen_rows_is_one_of_any_number(tmp_path: Path) -> None:
    """Before the fix, the code wrote 16 rows into the memory of one, and the build crashed."""
    assert not ends_of_loops(tmp_path / "plain", decided=False), "torch narrows nothing any more: is this still needed?"
    assert ends_of_loops(tmp_path / "decided", decided=True)


def test_answers_narrow_nothing_and_have_to_be_alike_for_all_sizes() -> None:
    program, rows = exported(16)
    environment = rows.node.shape_env
    environment.freeze()
    with raises("size-decides") as caught, decided_alike(program):
        assert rows >= 9
    assert "=1 (axis 0 of input 0) than for the example's sizes" in str(caught.value)
    with decided_alike(program):
        assert rows * 3 < 49
        assert not guard_or_false((rows * 5 + 4) // 5 == 1), "the default, which is correct for one row, too"
        assert not guard_or_false((rows * 5 + 4) // 5 > 9), "the default, which is correct for many rows, too"
    assert (rows + 1).node.expr.free_symbols, "the symbol is a number now"


def test_a_guard_with_a_default_gives_it_where_the_sizes_disagree() -> None:
    """Inductor multiplies small matrices without a library. Before the fix, such builds were refused."""
    program, rows = exported(16)
    rows.node.shape_env.freeze()
    with decided_alike(program):
        assert not guard_or_false(rows >= 9) and guard_or_true(rows < 9)
        assert guard_or_false(rows * 3 < 49) and not guard_or_true(rows > 16)
    assert guard_or_false(rows >= 9), "torch knows other sizes now: is this still needed?"


def test_numbers_that_are_read_are_no_sizes() -> None:
    """Unlike sizes, such numbers have no upper bound; only assertions of the model restrict them."""

    class Reading(torch.nn.Module):
        def forward(self, x: Any, count: Any) -> Any:
            number = count.item()
            torch._check(number > 3)
            return x * number

    sizes = ({0: torch.export.Dim("batch")}, None)
    program = torch.export.export(Reading(), (torch.ones(2), torch.tensor(9)), dynamic_shapes=sizes)
    assert len(program.range_constraints) == 2 and list(_limits(program).values()) == []
    (limits,) = _limits(exported(16)[0]).values()
    assert limits == (1, 16)


def test_a_torch_without_the_methods_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.fx.experimental.symbolic_shapes.ShapeEnv, "_maybe_guard_rel")
    with raises("torch-unsupported"), decided_alike(exported(4)[0]):
        pass
