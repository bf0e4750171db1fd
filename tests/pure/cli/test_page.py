"""`inspect --html` writes one small, valid page without other files. Names in a bundle cannot inject anything into it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import stat
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from cgbundle.format import archive
from cgbundle.format.schema import Finding, Manifest, Weight
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Edge
from cgcompile_cli import main
from cgcompile_cli.output import safe
from cgcompile_cli.page import file as pagefile
from cgcompile_cli.page import markup
from cgcompile_cli.page import parts as pageparts
from cgcompile_cli.page.page import page
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.places import GOLDEN
from tests.pure.cli import shown_bundles

ALL = sorted(path for version in GOLDEN.glob("v*") for path in version.glob("*.cgb"))
GPT = GOLDEN / "v1" / "gpt_two.cgb"

EVIL = "</title></style></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;\x1b[31m\u202e\n`${-->"

VOID = {"meta", "input", "br"}
ATTRIBUTES = {
    "id", "class", "href", "lang", "charset", "name", "content", "http-equiv", "open", "hidden", "type", "placeholder", "data-h",
    "aria-label", "aria-hidden", "d", "width", "viewbox", "preserveaspectratio", "vector-effect",
}  # fmt: skip


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "80"})


def refused(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: ") and len(rest) == 1 and rest[0].startswith("hint: "), result.stderr
    return first


class Page(HTMLParser):
    """Collects what a page holds. Fails on an element that is not closed in order, and on an unknown attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: list[str] = []
        self.raw: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names) and set(names) <= ATTRIBUTES, (tag, attrs)
        self.elements.append((tag, tuple(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "path"
        self.elements.append((tag, tuple(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.raw[self.open[-1]] = self.raw.get(self.open[-1], "") + data
        else:
            self.texts.append(data)

    def values(self, name: str) -> list[str]:
        return [value or "" for _, attributes in self.elements for key, value in attributes if key == name]


def page_text(path: Path) -> str:
    return page(str(path), archive.read_manifest(str(path)))


def shape(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the elements and the names of their attributes."""
    return [(tag, tuple(name for name, _ in attributes)) for tag, attributes in Page(text).elements]


# --- what it holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_page_of_a_golden_is_whole(path: Path) -> None:
    text = page_text(path)
    dom = Page(text)
    assert text.startswith("<!DOCTYPE html>\n<html") and dom.values("lang") == ["en"] and dom.values("charset") == ["utf-8"]
    ids = dom.values("id")
    assert len(ids) == len(set(ids)), "an id stands once"
    assert dom.values("href") and all(link[0] == "#" and link[1:] in ids for link in dom.values("href"))
    manifest = archive.read_manifest(str(path))
    words = " ".join(dom.texts)
    target = manifest.target.level or manifest.target.arch
    outputs = [entry.outputs[0].name for entry in manifest.entries if entry.outputs]
    for word in (manifest.name, manifest.provenance.machine, target, *outputs, "cgbundle.load("):
        assert word in words
    for finding in [finding for entry in manifest.entries for finding in entry.findings]:
        assert finding.message in words and finding.fix in words


def test_the_page_lists_every_node_and_kernel() -> None:
    words = "".join(Page(page_text(GPT)).texts)
    recording = tables.decode((GPT / "graphs" / "model-4.bin").read_bytes())
    for function in recording.functions:
        assert function.symbol in words and function.image[:12] in words
    assert page_text(GPT).count('<td class="l"></td>') == len(recording.nodes) == 22
    assert "writes arena+0" in words and "blocks.1.down.weight" in words


RULE = re.compile(r"([^{}/]+)\{([^{}]*)\}")
"""The selectors of a style rule, and its declarations."""


def test_a_narrow_screen_has_rows_whose_cells_say_what_they_are(tmp_path: Path) -> None:
    """At 390 pixels no table has columns, so that none is clipped. Every table has its own box, so that none widens the page."""
    for text in (page_text(GPT), page_text(shown_bundles.write(tmp_path / "t.cgb"))):
        assert text.count("<table") == len(re.findall(r'<div class="scroll"><table', text)) > 3
        for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
            heads = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", table)
            for row in re.findall(r"<tr>(.*?)</tr>", table.partition("</thead>")[2], re.DOTALL):
                cells = re.findall(r"<td[^>]*>", row)
                labels = [re.search(r'data-h="([^"]*)"', cell) for cell in cells]
                if 'class="nodes"' not in table:  # tables of nodes label only some cells
                    assert [label[1] if label else "" for label in labels] == (heads or [""] * len(cells))
    narrow = Page(page_text(GPT)).raw["style"].partition("@media (max-width: 44rem)")[2].partition("@media print")[0]
    assert "overflow-x" not in narrow and "nowrap" not in narrow and "td[data-h]::before" in narrow
    wide = Page(page_text(GPT)).raw["style"].partition("@media (max-width: 44rem)")[0]
    held = {css.strip() for selectors, rule in RULE.findall(wide) if "nowrap" in rule for css in selectors.split(",")}
    freed = {
        css.strip() for selectors, rule in RULE.findall(narrow) if "white-space: normal" in rule for css in selectors.split(",")
    }
    assert len(held) > 5 and {css for css in held if not css.endswith("th")} <= freed, "no line of text is wider than the screen"


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    for text in (page_text(GPT), page_text(shown_bundles.write(tmp_path / "t.cgb"))):
        assert "src=" not in text and "url(" not in text and "@import" not in text and "://" not in text
        assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in Page(text).elements}


def test_only_its_own_script_and_style_may_run() -> None:
    dom = Page(page_text(GPT))
    policy = next(dict(attributes)["content"] for tag, attributes in dom.elements if dict(attributes).get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    digests = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in dom.raw.items()}
    assert rules == {
        "default-src": "'none'", "base-uri": "'none'", "form-action": "'none'",
        "script-src": f"'sha256-{digests['script']}'", "style-src": f"'sha256-{digests['style']}'",
    }  # fmt: skip
    assert Counter(tag for tag, _ in dom.elements if tag in ("script", "style")) == {"script": 1, "style": 1}


def test_both_colour_schemes_name_the_same_colours() -> None:
    style = Page(page_text(GPT)).raw["style"]
    light, dark = style.partition("@media (prefers-color-scheme: dark)")[::2]
    dark = dark.partition("} }")[0]
    colours = set(re.findall(r"(--\w+): #", light))
    assert set(re.findall(r"(--\w+): #", dark)) == colours >= {"--ink", "--page", "--reads", "--writes", "--refers"}
    assert set(re.findall(r"var\((--\w+)\)", style)) <= colours | {"--mono"}, "no colour that is not defined"


# --- regions, branches, size --------------------------------------------------------------------------------------


def test_steps_are_boxes_in_order_once_for_int_keys_that_do_the_same(tmp_path: Path) -> None:
    text = page_text(shown_bundles.write(tmp_path / "t.cgb"))
    chain = text[text.index('<ol class="chain">') : text.index("</ol>")]
    assert re.findall(r'<li class="(\w+)">', chain) == ["graph", "copy"] and text.count('<ol class="chain">') == 1
    assert 'href="#nodes-1-0"' in chain and "5 nodes" in chain and "in: x, 512 B" in chain


def test_branches_are_drawn(tmp_path: Path) -> None:
    dom = Page(page_text(shown_bundles.write(tmp_path / "t.cgb")))
    assert dom.values("class").count("lanes") == 10, "5 nodes at each of 2 int_keys"
    curves = [d for d in dom.values("d") if "C" in d]
    assert "M6 0V20M6 0C6 8 18 2 18 10M18 10V20" in curves, "the lane of the memset runs on while the kernel takes one of its own"


def test_343_nodes_at_three_int_keys_take_less_than_a_megabyte(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GPT, tmp_path / "gpt.cgb"))
    manifest = archive.read_manifest(str(path))
    (entry,) = manifest.entries
    (program,) = entry.programs
    name = program.steps[0].file
    base = tables.decode((path / name).read_bytes())
    kernels = tuple([base.nodes[1 + index % 21] for index in range(343)])
    edges = tuple([Edge(source=index, target=index + 1, from_port=0, to_port=0, type=0) for index in range(342)])
    (path / name).write_bytes(tables.encode(replace(base, nodes=kernels, edges=edges)))
    described = manifest_text.describe_files(str(path))
    self_test = replace(entry.self_test, proofs=entry.self_test.proofs * 3)
    thrice = edited(manifest, programs=(program,) * 3, files=described, self_test=self_test)
    text = page(str(path), thrice)
    assert text.count('<td class="l"></td>') == 3 * 343 and 300_000 < len(text.encode()) < 1_000_000
    Page(text)


def test_what_does_not_fit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pageparts, "LISTED", 20)
    text = page_text(shown_bundles.write(tmp_path / "many.cgb", batches=range(1, 9)))
    assert re.findall(r'id="nodes-(\d)-0"', text) == ["0", "1", "7"], "the first, the last, and what fits: 6 nodes and steps each"
    assert "Left out to keep the page small: 5 int_keys." in text
    Page(text)


# --- hostile names ------------------------------------------------------------------------------------------------


def named(name: str, path: Path) -> Path:
    """Writes a bundle in which everything that has a name is called `name`."""

    def change(manifest: Manifest) -> Manifest:
        finding = Finding(rule=name, severity="note", message=name, node=name, where=name, source=name, effect=name, fix=name)
        (entry,) = manifest.entries
        inputs = (replace(entry.inputs[0], name=name), *entry.inputs[1:])
        state = Weight(name=f"{name}s", tensor="small", dtype="uint8", shape=(3,), strides=(1,), memory="state", offset=0)
        origin = replace(
            manifest.provenance, source=name, created=name, versions=((name, name),), machine=name, options=((name, name),)
        )
        changed: Manifest = edited(
            manifest, name=name, inputs=inputs, outputs=(replace(entry.outputs[0], name=f"{name}o"),),
            call={"call": [[name, {"tensor": 0}], *entry.call["call"][1:]]}, findings=(finding,), allowed=(name,),
            dimensions=(replace(entry.dimensions[0], reason=name), entry.dimensions[1]),
            regions=(replace(manifest.regions[0], name=name, reason=name),), provenance=origin,
            weights=(state, replace(manifest.weights[1], name=name), *manifest.weights[2:]),
            memories=tuple((dict(manifest.memories) | {"state": 256}).items()),
        )  # fmt: skip
        return changed

    return shown_bundles.write(path, change=change)


def test_hostile_names_change_nothing_but_text(tmp_path: Path) -> None:
    name = "".join(filter(str.isprintable, EVIL))  # other characters are not allowed in names
    benign, evil = page_text(named("plain", tmp_path / "a.cgb")), page_text(named(name, tmp_path / "b.cgb"))
    assert shape(evil) == shape(benign)
    assert all(letter == "\n" or letter.isprintable() for letter in evil)
    one, other = (Page(text) for text in (benign, evil))
    assert (one.raw, one.values("id"), one.values("href")) == (other.raw, other.values("id"), other.values("href"))
    texts = "".join(other.texts)
    # one text less: the example call uses a variable instead of the parameter's name, so that no name becomes code
    assert texts.count(name) + 1 == "".join(one.texts).count("plain") > 20


def test_the_kernels_of_hostile_choices(tmp_path: Path) -> None:
    path = shown_bundles.write(tmp_path / "t.cgb")
    (image,) = [file.name for file in (path / "kernels").iterdir()]
    rows = [{"image": image, "symbol": "add", "configuration": EVIL, "chosen": EVIL}]
    (path / "kernels.json").write_text(json.dumps(rows))
    tiny_bundle.seal(path, replace(archive.read_manifest(str(path)), files=manifest_text.describe_files(str(path))))
    assert "".join(Page(page_text(path)).texts).count(safe(EVIL)) == 2


@given(st.text())
def test_text_stays_text(text: str) -> None:
    dom = Page(markup.tag("p", text, "<b>", class_=text, id=markup.Html("x")))
    assert "".join(dom.texts) == safe(text) + "<b>"
    assert dom.elements == [("p", (("class", safe(text)), ("id", "x")))]


def test_markup() -> None:
    assert markup.tag("input", type="search", hidden=True, name=None, open=False) == '<input type="search" hidden>'
    assert markup.tag("td", markup.tag("b", 1), "&", data_h="a") == '<td data-h="a"><b>1</b>&amp;</td>'
    assert markup.tag("path", d="M0 0") == '<path d="M0 0"/>'


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return shown_bundles.write(tmp_path / "tiny.cgb")


def test_the_page_is_written_and_written_again(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    for _ in range(2):
        result = call("inspect", bundle, "--html", file)
        assert (result.exit_code, result.stdout) == (0, "") and result.stderr.startswith(f"{file}: ")
        assert file.read_text() == page_text(bundle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "tiny.cgb"], "nothing is left beside it"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_the_page_on_stdout(bundle: Path) -> None:
    result = call("inspect", bundle, "--html", "-")
    assert (result.exit_code, result.stderr, result.stdout) == (0, "", page_text(bundle)) and not Path("-").exists()


def test_an_empty_file_and_a_link_are_filled(bundle: Path, tmp_path: Path) -> None:
    file, link = tmp_path / "made.html", tmp_path / "link.html"
    file.touch()
    file.chmod(0o640)
    link.symlink_to(file)
    assert call("inspect", bundle, "--html", link).exit_code == 0
    assert link.is_symlink() and file.read_text() == page_text(bundle) and stat.S_IMODE(file.stat().st_mode) == 0o640


def test_destinations_that_a_page_refuses(bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "thesis.html"
    other.write_text("<!DOCTYPE html>\n<p>three years of work")
    assert "is not a report of cgcompile" in refused(call("inspect", bundle, "--html", other))
    assert other.read_text().endswith("three years of work")
    assert "a directory, not a file" in refused(call("inspect", bundle, "--html", tmp_path))
    assert "no such folder" in refused(call("inspect", bundle, "--html", tmp_path / "missing" / "a.html"))
    assert "expected the name of a file" in refused(call("inspect", bundle, "--html", ""))
    before = manifest_text.list_files(str(bundle))
    assert "inside the bundle" in refused(call("inspect", bundle, "--html", bundle / "a.html"))
    assert "inside the bundle" in refused(call("inspect", bundle, "--html", bundle / "graphs" / "a.html"))
    assert manifest_text.list_files(str(bundle)) == before


def test_a_folder_that_takes_no_file_is_named_as_the_user_did(bundle: Path) -> None:
    result = call("inspect", bundle, "--html", "/proc/report.html")
    assert result.exit_code == 2 and result.stderr.startswith("error: /proc/report.html: ") and len(result.stderr.splitlines()) == 1


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        pagefile.write(str(tmp_path / "a.html"), "text")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_recording_leaves_the_report_of_before(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    call("inspect", bundle, "--html", file)
    before = file.read_text()
    table = bundle / "graphs" / "g0-8x2.bin"
    table.write_bytes(table.read_bytes()[:-1] + b"\x01")
    result = call("inspect", bundle, "--html", file)
    assert result.exit_code == 1 and "graphs/g0-8x2.bin" in result.stderr and file.read_text() == before
