"""bundles/cgserve/language/{tokenizer,chat,answer}.py: streamed text, stop strings, chat templates, a tokenizer's folder."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.models.tokenizers import BEGIN, END, byte_tokenizer, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def modules() -> SimpleNamespace:
    """Returns the modules."""
    return SimpleNamespace(
        **{name: importlib.import_module(f"cgserve.language.{name}") for name in ("tokenizer", "answer")},
        requests=importlib.import_module("cgserve.scheduling.requests"),
    )


@pytest.fixture(scope="module")
def bytes_alone() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """Returns a tokenizer like that of Llama 2. Spaces belong to words and are dropped at the start of a text; unknown text becomes
    bytes."""
    words = ["▁", "▁the", "▁cat", "s", "a", "▁a"]
    names = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = tokenizers.decoders
    tokenizer.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)])
    return tokenizer


def pieces(modules: SimpleNamespace, tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = modules.tokenizer.Detokenizer(lambda tokens: tokenizer.decode(list(tokens)), prompt)
    return [*[detokenizer.push(token) for token in ids], detokenizer.end()]


# --- streamed text ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=8))
def test_pieces_are_whole_characters(modules: SimpleNamespace, bytes_alone: Any, text: str, prompt: str) -> None:
    chunks = pieces(modules, bytes_alone, bytes_alone.encode(prompt).ids, bytes_alone.encode(text).ids)
    assert "".join(chunks) == text
    assert "�" in text or not any("�" in piece for piece in chunks)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=40))
def test_bytes_that_are_no_text_come_as_the_tokenizer_decodes_them(modules: SimpleNamespace, bytes_alone: Any, data: bytes) -> None:
    ids = [bytes_alone.token_to_id(token) for token in spelled(data)]
    assert "".join(pieces(modules, bytes_alone, [], ids)) == data.decode(errors="replace")


def spelled(data: bytes) -> list[str]:
    """Returns bytes as a byte-level vocabulary writes them, by GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in plain}
    table |= {byte: chr(256 + number) for number, byte in enumerate([code for code in range(256) if code not in plain])}
    return [table[byte] for byte in data]


def test_a_character_of_four_tokens_comes_once_it_is_whole(modules: SimpleNamespace, bytes_alone: Any) -> None:
    ids = bytes_alone.encode("a😀é").ids
    assert pieces(modules, bytes_alone, [], ids) == ["a", "", "", "", "😀", "", "é", ""]
    assert pieces(modules, bytes_alone, [], ids[:3]) == ["a", "", "", "�"]


def test_a_space_that_belongs_to_the_first_word_is_kept(modules: SimpleNamespace, sentencepiece: Any) -> None:
    the, cat, s = [sentencepiece.token_to_id(token) for token in ("▁the", "▁cat", "s")]
    assert sentencepiece.decode([cat, s]) == "cats"
    assert pieces(modules, sentencepiece, [the], [cat, s]) == [" cat", "s", ""]
    assert pieces(modules, sentencepiece, [], [cat, s]) == ["cat", "s", ""], "the text begins here"


def test_bytes_of_a_vocabulary_of_words(modules: SimpleNamespace, sentencepiece: Any) -> None:
    the, s = [sentencepiece.token_to_id(token) for token in ("▁the", "s")]
    ids = [1 + byte for byte in "😀é".encode()]
    assert "".join(pieces(modules, sentencepiece, [the], [s, *ids, s])) == "s😀és"


# --- stop strings -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    cut=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_wherever_the_text_is_cut(modules: SimpleNamespace, cut: list[str], stops: list[str]) -> None:
    stop_strings, output, read = modules.tokenizer.StopStrings(stops), "", ""
    for piece in cut:
        read += piece
        output += stop_strings.push(piece)
        places = [place for place in (read.find(stop) for stop in stops) if place >= 0]
        assert stop_strings.matched == bool(places)
        if places:
            assert output == read[: min(places)]
            return
        assert read.startswith(output)
        held = read[len(output) :]
        assert not held or any(stop.startswith(held) for stop in stops), "held back for nothing"
    assert output + stop_strings.end() == read


def progress(modules: SimpleNamespace, ids: list[int], reason: str | None = None) -> Any:
    return modules.requests.Progress("a", tuple([modules.requests.Token(token, -1.0) for token in ids]), reason)


def test_an_answer_ends_at_a_stop_string_and_counts_its_tokens(modules: SimpleNamespace, bytes_alone: Any) -> None:
    answer = modules.answer.Answer(lambda ids: bytes_alone.decode(list(ids)), [], ["END"])
    first = answer.push(progress(modules, bytes_alone.encode("abE").ids))
    assert (first.text, len(first.tokens), first.reason) == ("ab", 3, None)
    last = answer.push(progress(modules, bytes_alone.encode("NDxyz").ids))
    assert (last.text, last.offset, last.reason, answer.count) == ("", 2, "stop", 5)


def test_the_stop_token_is_no_text_and_what_was_held_is(modules: SimpleNamespace, bytes_alone: Any) -> None:
    answer = modules.answer.Answer(lambda ids: bytes_alone.decode(list(ids)), [], ["END"])
    assert answer.push(progress(modules, bytes_alone.encode("E").ids)) is None
    last = answer.push(progress(modules, [*bytes_alone.encode("N").ids, END], "stop"))
    assert (last.text, len(last.tokens), last.reason, answer.count) == ("EN", 2, "stop", 3)


def test_an_answer_that_ends_inside_a_character(modules: SimpleNamespace, bytes_alone: Any) -> None:
    answer = modules.answer.Answer(lambda ids: bytes_alone.decode(list(ids)), [], [])
    last = answer.push(progress(modules, bytes_alone.encode("aé").ids[:2], "length"))
    assert (last.text, last.reason) == ("a�", "length")


def test_a_log_probability_has_json(modules: SimpleNamespace) -> None:
    completions = importlib.import_module("cgserve.language.completions")
    assert [completions.finite(logprob) for logprob in (-1.5, float("-inf"), float("nan"))] == [-1.5, -9999.0, -9999.0]


# --- a tokenizer's folder -------------------------------------------------------------------------------------------------


def test_what_a_folder_says(modules: SimpleNamespace, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    language = modules.tokenizer.Language(tmp_path)
    assert language.stop == (END,) and language.size == 258 and language.positions is None and language.chat is None
    assert language.text(language.tokens("hé", special=True)) == "hé"
    part = language.tokens("é", special=False)[0]
    assert language.token_text(part) == "Ã" and language.bytes_of(part) is None, "a part of a character as the vocabulary spells it"
    assert language.token_text(BEGIN) == "<s>" and language.bytes_of(language.tokens("a", special=False)[0]) == [97]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9, "max_position_embeddings": 77}))
    assert (modules.tokenizer.Language(tmp_path).stop, modules.tokenizer.Language(tmp_path).positions) == ((9,), 77)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 7]}))
    assert modules.tokenizer.Language(tmp_path).stop == (8, 7)


def test_versions_share_a_tokenizer_that_is_the_same(modules: SimpleNamespace, tmp_path: Path) -> None:
    """The package tokenizers never frees the words and tokens of a tokenizer, so versions with equal files share one."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder, letters in zip(folders, (120, 120, 100), strict=True):
        folder.mkdir()
        write_tokenizer(folder, letters=letters)
    (folders[1] / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    first = modules.tokenizer.Language(folders[0])
    second, third = [modules.tokenizer.Language(folder, first) for folder in folders[1:]]
    assert second._tokenizer is first._tokenizer and (first.positions, second.positions) == (None, 77)
    assert third._tokenizer is not first._tokenizer and (second.size, third.size) == (122, 102)


def test_a_folder_without_a_tokenizer(modules: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        modules.tokenizer.Language(tmp_path)


TEMPLATE = """{{ bos_token }}{% for each in messages %}
  {%- if each.role == 'odd' %}{{ raise_exception('no role ' ~ each.role) }}{% endif %}
  {%- if each.role == 'skip' %}{% continue %}{% endif %}
[{{ each.role }}] {{ each.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "a list"])
def test_chat_templates(modules: SimpleNamespace, tmp_path: Path, place: str) -> None:
    pytest.importorskip("jinja2")
    write_tokenizer(tmp_path)
    if place.endswith("jinja"):
        (tmp_path / place).write_text(TEMPLATE)
    else:
        several = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        settings["chat_template"] = several if place == "a list" else TEMPLATE
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = modules.tokenizer.Language(tmp_path).chat
    messages = [{"role": "user", "content": "Hi"}, {"role": "skip", "content": ""}, {"role": "assistant", "content": "Yes?"}]
    assert chat.render(messages, {}) == "<s>[user] Hi\n[assistant] Yes?\n[assistant]"
    with pytest.raises(ValueError, match="no role odd"):
        chat.render([{"role": "odd", "content": ""}], {})


def test_a_template_reaches_nothing_but_the_conversation(modules: SimpleNamespace) -> None:
    pytest.importorskip("jinja2")
    template = importlib.import_module("cgserve.language.chat").ChatTemplate
    with pytest.raises(ValueError, match="unsafe"):
        template("{{ messages.__class__.__mro__ }}", {}).render([], {})
    with pytest.raises(ValueError, match="chat template, line 2: "):
        template("\n{% if %}", {})
    with pytest.raises(ValueError, match="not iterable"):
        template("{% for call in messages[0].calls %}{% endfor %}", {}).render([{"calls": 5}], {})


def test_what_transformers_adds_to_jinja(modules: SimpleNamespace) -> None:
    pytest.importorskip("jinja2")
    template = importlib.import_module("cgserve.language.chat").ChatTemplate
    source = "{{ strftime_now('%Y') }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    said = template(source, {}).render([{"role": "é"}], {})
    assert said[:2] == "20" and said[4:] == '{"role": "é"}'
