"""`cgcompile serve` reports each mistake in one line before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest

for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers"):
    pytest.importorskip(package, reason="pip install '.[serve]'")

from cgbundle.errors import BundleError  # noqa: E402
from cgserve.models.options import MemoryBudget, Options, Refused, tokenizer_beside  # noqa: E402
from cgserve.serving import looker, read_access  # noqa: E402
from cgserve.settings import ServeError, Settings  # noqa: E402
from tests.helpers.bundles.tiny_bundle import write_bundle  # noqa: E402


def test_a_bundle_or_a_folder(tmp_path: Path) -> None:
    bundle = tmp_path / "models" / "tiny" / "3" / "model.cgb"
    write_bundle(bundle)
    look, essential = looker(tmp_path / "models", Settings())
    assert not essential and {name: list(versions) for name, versions in look().items()} == {"tiny": [3]}
    look, essential = looker(bundle, Settings(name="mine"))
    assert essential and look()["mine"][1][0] == bundle
    bundle.rename(tmp_path / "away")
    assert list(look()) == ["mine"], "while it is being replaced, the one that was there goes on"
    with pytest.raises(BundleError, match="no such bundle"):
        looker(tmp_path / "nothing", Settings())


@pytest.mark.parametrize(("settings", "text"), [
    (Settings(name="x"), "--name is for a bundle; the models of a folder have the names of their folders"),
    (Settings(options=Options(tokenizer=Path("x"))), "--tokenizer is for a bundle"),
    (Settings(options=Options(adapters=(("a", Path("x")),))), "--adapter and --adapter-root are for a bundle"),
    (Settings(adapter_root=Path("x")), "--adapter and --adapter-root are for a bundle"),
])  # fmt: skip
def test_options_that_are_for_a_bundle(tmp_path: Path, settings: Settings, text: str) -> None:
    with pytest.raises(ServeError, match=text):
        looker(tmp_path, settings)


def test_keys_and_certificates(tmp_path: Path) -> None:
    keys, junk = tmp_path / "keys", tmp_path / "junk"
    keys.write_text("one\n two \n\n")
    junk.write_text("")
    assert read_access(Settings(keys=keys)) == ((b"one", b"two"), {})
    for settings, text in (
        (Settings(keys=junk), "junk: no key in it"),
        (Settings(keys=tmp_path / "none"), "none: No such file"),
        (Settings(certificate=junk), "--tls-cert and --tls-key belong together"),
        (Settings(certificate=junk, private_key=tmp_path / "none"), "none: No such file"),
        (Settings(certificate=junk, private_key=junk), "junk: no PEM certificate"),
    ):
        with pytest.raises(ServeError, match=text):
            read_access(settings)


def test_where_a_tokenizer_lies(tmp_path: Path) -> None:
    model = tmp_path / "chat"
    bundle = model / "1" / "model.cgb"
    bundle.mkdir(parents=True)
    assert tokenizer_beside(bundle, "chat") is None
    for folder in (model, model / "1", model / "1" / "model"):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text("{}")
        assert tokenizer_beside(bundle, "none") == folder, "the nearest one"
    assert tokenizer_beside(model / "other.cgb", "none") == model
    assert tokenizer_beside(tmp_path / "other.cgb", "none") is None
    assert tokenizer_beside(tmp_path / "other.cgb", "chat") == model
    assert tokenizer_beside(tmp_path / "other.cgb", "chat/1") is tokenizer_beside(tmp_path / "other.cgb", "..") is None


def test_a_budget_of_memory() -> None:
    budget = MemoryBudget(10)
    budget.take(6)
    with pytest.raises(Refused, match="the bundle needs 0.0 MiB; 0.0 MiB of --memory 0.0 MiB are free") as caught:
        budget.take(5)
    assert caught.value.memory
    budget.give_back(6)
    budget.take(10)
    MemoryBudget().take(1 << 60)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    from typer.testing import CliRunner

    from cgcompile_cli.main import app

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "uvicorn" else find(name, *more))
    done = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert done.exit_code == 2 and "serving needs uvicorn, of the extra serve, which is not installed" in done.output
    assert "pip install 'cgcompile[serve]'" in done.output


@pytest.mark.parametrize(("text", "size"), [("5", 5), ("2KiB", 2048), ("1.5M", 3 << 19), ("40 GiB", 40 << 30), ("7B", 7)])
def test_sizes(text: str, size: int) -> None:
    from cgcompile_cli.commands.serve import _size

    assert _size(text) == size
