"""State with a number of rows chosen at load time, on the CPU: results equal eager PyTorch; models that cannot have such state are
refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.format import archive  # noqa: E402
from cgcompile.errors import ModelError  # noqa: E402
from cgcompile.export.export import export  # noqa: E402
from cgcompile.export.signature import more_rows  # noqa: E402
from cgcompile.export.signature.more_rows import same_with_more_rows  # noqa: E402
from cgcompile.model.load import load_source, with_rows  # noqa: E402
from cgcompile.transforms.state_rows import with_counted_rows  # noqa: E402
from tests.helpers.models.paged_models import ENTRIES, MODEL_FILE, PAGES, SIZES, SLOTS, STATE, Paged, check_rows  # noqa: E402


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paged")
    (folder / "paged.py").write_text(MODEL_FILE)
    sizes = {"put": list(SIZES), "read": list(SIZES)}
    return cgcompile.build(folder / "paged.py", sizes=sizes, out=folder / "paged.cgb", target="cpu").path


@pytest.mark.parametrize(("pages", "slots"), [(PAGES, SLOTS), (PAGES + 1, SLOTS), (3000, 40)])
def test_a_load_chooses_how_many_rows(paged: Path, pages: int, slots: int) -> None:
    check_rows(paged, "cpu", pages, slots)


def test_the_manifest_says_what_varies(paged: Path) -> None:
    manifest = archive.read_manifest(str(paged))
    names = [row.name for row in manifest.weights]
    (pages, slots) = manifest.state_dimensions
    assert (pages.name, [names[index] for index in pages.weights], pages.most) == ("pages", ["keys_0", "keys_1"], None)
    assert (slots.name, [names[index] for index in slots.weights], slots.most) == ("slots", ["seen"], 50)
    assert [names[dimension.count] for dimension in (pages, slots)] == ["cgcompile_rows_pages", "cgcompile_rows_slots"]
    assert all(spec.range is None for entry in manifest.entries for spec in entry.inputs if spec.name != "place")


def test_default_numbers_of_rows(paged: Path) -> None:
    """By default pages take half of the free memory, and the number of slots is the largest one that is useful."""
    with cgbundle.load(paged, state={"pages": 9}) as program:
        assert program.state.rows == {"pages": 9, "slots": 50} and "cgcompile_rows_pages" not in program.state
    with cgbundle.load(paged) as program:
        assert program.state.rows["slots"] == 50 and program.state.rows["pages"] > 10_000
        assert program.memory["state"] > 128 * program.state.rows["pages"]


def test_an_index_behind_the_last_row_is_refused(paged: Path) -> None:
    with cgbundle.load(paged, state={"pages": 100}) as program:
        page, table = torch.tensor([100]), torch.tensor([[0, 99, -1]])
        with raises("assertion-failed", match=r"paged_models.py:\d+: .*0 <= index < number of rows of the state"):
            program.put(torch.zeros(1, 8), page, page * 0, page * 0)
        with raises("assertion-failed", match=r"paged_models.py:\d+: .*0 <= index < number of rows of the state"):
            program.read(table, table[0, :1].int())


def test_what_a_load_refuses(paged: Path, bundle: Path) -> None:
    for state, code, said in (
        ({"pages": 0}, "state-rows", "state 'pages': 0 rows, expected at least 5"),
        ({"pagse": 9}, "state-rows", r"did you mean pages\?"),
        (
            {"pages": 2**31 - 1},
            "out-of-memory",
            r"state pages=2147483647, slots=4: needs [\d,]+ bytes, the machine has [\d,]+ free",
        ),
    ):
        with raises(code, match=said):
            cgbundle.load(paged, state=state)
    with raises("option-refused", match=re.escape("state={'pages': 9}: the bundle's state has the sizes that it was built with")):
        cgbundle.load(bundle, state={"pages": 9})
    for wrong in ([5], {"pages": 5.0}, {"pages": True}):
        with pytest.raises(ValueError, match="state=.*: expected numbers of rows by dimension"):
            cgbundle.load(paged, state=wrong)  # type: ignore[arg-type]


# --- what cannot be built so -----------------------------------------------------------------------------------------------


def declared(declarations: Any, model: Any = None) -> Any:
    return with_rows((load_source(model or Paged(), ENTRIES),), declarations)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declarations", "code", "said"),
    [
        (["keys_0"], "source-invalid", "state: expected a dict from buffers to dimensions, got list"),
        ({"keys_0": 5}, "source-invalid", "state: 'keys_0': 5 is not a dimension"),
        ({"keys_0": ("pages", "many")}, "source-invalid", "is not a dimension"),
        ({"kyes_*": "pages"}, "state-refused", "the model has no buffer 'kyes_\\*'"),
        ({"keys_0": "pages", "keys_*": "rows"}, "state-refused", "'keys_0' has two dimensions"),
        (
            {"*e*": "pages"},
            "state-refused",
            r"buffer 'seen' has shape \[4, 8\], but buffers with 'pages' need the same first axis \('keys_0': 5\)",
        ),
        ({"seen": ("slots", 3)}, "state-refused", "the maximum of 'slots' is 3, but the model has 4 rows"),
    ],
)
def test_declarations_that_are_none(declarations: Any, code: str, said: str) -> None:
    with raises(code, match=said):
        declared(declarations)


def test_buffers_that_cannot_vary() -> None:
    model = Paged()
    model.keys_0[0, 0, 0] = 1
    with raises("state-refused", match="buffer 'keys_0' has values other than zero"):
        declared(STATE, model)
    model = Paged()
    model.keys_0 = torch.zeros(2, PAGES, 8).transpose(0, 1)
    with raises("state-refused", match=r"buffer 'keys_0' is not contiguous: its strides are \[8, 40, 1\]"):
        declared(STATE, model)
    model = Paged()
    model.keys_1 = model.keys_0.view(PAGES, 2, 8)
    with raises("state-refused", match="buffer 'keys_0' shares memory with another buffer"):
        declared(STATE, model)


class Uses(torch.nn.Module):
    """Calls a function with its state."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.use = use
        self.register_buffer("cache", torch.zeros(6, 3))

    def forward(self, index: Any, x: Any) -> Any:
        self.cache[index] = x
        return self.use(self.cache, index)


def uses(use: Callable[..., Any]) -> Any:
    source = load_source(Uses(use), lambda: (torch.arange(3), torch.ones(3, 3)))
    return with_rows((source,), {"cache": "rows"})[0]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda cache, index: cache.sum(), "is used as a whole by aten.sum"),
        (lambda cache, index: cache * 2, "is used as a whole by aten.mul.Tensor"),
        (lambda cache, index: cache[torch.arange(6) > index[0]], "is used as a whole by aten.index.Tensor"),
        (lambda cache, index: cache[:, index], "is used as a whole by aten.index.Tensor"),
        (lambda cache, index: cache[1:][index], "is used as a whole by aten.slice.Tensor"),
        (lambda cache, index: cache.flatten()[index], "is used as a whole by aten."),
        (lambda cache, index: cache[-1] + 1, "is used as a whole by aten.select.int"),
        (lambda cache, index: cache, "is returned"),
    ],
)
def test_rows_are_reached_by_an_index_alone(use: Callable[..., Any], said: str) -> None:
    source = uses(use)
    program = export(source, {}).programs.first
    with raises("state-refused", match=f"test_state_rows.py:.*state of rows rows, a number that is chosen at load, {said}"):
        with_counted_rows(program, source.rows, source.target_device)


@pytest.mark.parametrize(
    "use",
    [
        lambda cache, index: index * cache.shape[0],
        lambda cache, index: index + len(cache),
        lambda cache, index: torch.arange(cache.shape[0])[index],
        lambda cache, index: index + torch.tensor(cache.shape[0]),
        lambda cache, index: index if cache.shape[0] > 6 else index + 1,
    ],
)
def test_python_may_not_read_the_number_of_rows(use: Callable[..., Any]) -> None:
    exported = [export(uses(use), {})]
    with raises("state-refused", match=r"test_state_rows.py:.*forward\(\) exports another program with 9 rows: "):
        same_with_more_rows(exported, 4, print)
    assert exported[0].source.model.cache.shape == (6, 3), "it has its own buffers again"


def test_a_trace_shows_that_the_number_of_rows_matters_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = [export(uses(lambda cache, index: cache[index]), {})]
    monkeypatch.setattr(more_rows, "export", None)  # must not be called, because it would call the model many times
    same_with_more_rows(exported, 4, print)
    assert exported[0].source.model.cache.shape == (6, 3)


def test_state_that_nothing_writes_to_cannot_vary(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="state: no call writes to 'keys_0'"):
        cgcompile.build(Paged(), {"read": ENTRIES["read"]}, sizes=[1], state=STATE, out=tmp_path / "x.cgb", target="cpu")
