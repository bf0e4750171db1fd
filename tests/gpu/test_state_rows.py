"""State with a number of rows chosen at load time, in captured and cross-compiled bundles on a GPU; and a language model with two
sizes of its cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle import self_test  # noqa: E402
from cgcompile.errors import ModelError  # noqa: E402
from tests.helpers.models.paged_models import ENTRIES, PAGES, SIZES, SLOTS, STATE, Paged, check_rows  # noqa: E402


@pytest.fixture(scope="module", params=["capture", "cross-compile"])
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"put": list(SIZES), "read": list(SIZES)}
    out = tmp_path_factory.mktemp("paged") / "paged.cgb"
    return cgcompile.build(Paged(), ENTRIES, sizes=sizes, state=STATE, out=out, target="cuda", record=request.param).path


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize(("pages", "slots"), [(PAGES, SLOTS), (PAGES + 1, SLOTS), (3000, 40)])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_load_chooses_how_many_rows(paged: Path, pages: int, slots: int, mode: str, device: str) -> None:
    check_rows(paged, device, pages, slots, mode=mode)


def test_the_self_test_holds(paged: Path) -> None:
    answer = self_test.fresh(str(paged))
    assert "error" not in answer and all(row["passed"] for row in answer["results"])


def test_default_numbers_of_rows(paged: Path) -> None:
    """By default, pages take nine tenths of the free memory."""
    free, _ = torch.cuda.mem_get_info()
    with cgbundle.load(paged) as program:
        assert program.state.rows["slots"] == 50
        assert 0.8 * free < program.memory["state"] < 0.91 * free
    with cgbundle.load(paged, state={"pages": 1000}) as program:
        assert program.state.rows == {"pages": 1000, "slots": 50}


def test_too_little_memory_is_one_sentence(paged: Path) -> None:
    with raises("out-of-memory", match=r"state pages=2000000000, slots=4: needs [\d,]+ bytes, .* the GPU has [\d,]+ free"):
        cgbundle.load(paged, state={"pages": 2_000_000_000, "slots": 4})


def test_kernels_of_pytorch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="PyTorch's own kernels hold the number of rows") as caught:
        cgcompile.build(
            Paged(), ENTRIES, sizes={"put": [1], "read": [1]}, state=STATE, out=tmp_path / "x.cgb", target="cuda", lower="eager"
        )
    assert caught.value.code == "state-refused"


@pytest.mark.parametrize("record", ["capture", "cross-compile"])
def test_a_language_model_with_two_sizes_of_its_cache(tmp_path: Path, record: str) -> None:
    """Tokens equal those of transformers' `generate`, with the fewest pages and with many, by single steps and by the loop."""
    pytest.importorskip("transformers")
    from tests.helpers.models.causal_lm import Engine, causal_model, prompt, reference
    from tests.helpers.models.language_models import network
    from tests.helpers.models.tokenizers import write_tokenizer

    folder = tmp_path / "Tiny-0.1B"
    network("llama", torch.float32).save_pretrained(folder)
    write_tokenizer(folder, letters=120)
    path = cgcompile.build(
        folder, context=64, lanes=[2], dtype="float32", target="cuda", record=record, out=tmp_path / "tiny.cgb"
    ).path  # fmt: skip
    model = causal_model(str(folder))
    for pages in (None, 5, 400):
        with cgbundle.load(path, state=None if pages is None else {"pages": pages}) as program:
            rows = program.state.rows["pages"]
            assert rows == (9 if pages is None else pages)
            for place in range(2):  # the first pages, then the last ones
                engine = Engine(program, lanes=1, blocks=4, chunk=64)
                engine.free, engine.slots = list(range(1, 5)) if place == 0 else list(range(rows - 4, rows)), [1, 2]
                engine.add("text", prompt(20, place), 40)
                engine.prefill(["text"])
                engine.lanes = 2
                for _ in range(12):
                    engine.decode(["text"])
                engine.generate(["text"], [20])
                assert engine.remove("text")[20:] == reference(model, prompt(20, place), 33), f"{rows} pages"
