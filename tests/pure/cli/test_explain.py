"""`cgcompile explain` explains every finding and every error, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import cgbundle.catalogue
import cgcompile.errors
from cgcompile.util.explanations import explanations, nearest, spelled
from cgcompile.util.padding_reasons import REASONS
from cgcompile_cli.commands.explain import RECORDERS, names
from cgcompile_cli.main import app


def explain(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["explain", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_finding_is_told_with_cause_effect_and_cure() -> None:
    text = explain("host-scalar")
    assert text.startswith("host-scalar  a finding: host (runs on the host between graphs)\n  A number that Python reads")
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["what", "why", "effect", "fix", "source"]


def test_an_error_is_told_with_its_class_and_exit_status() -> None:
    assert explain("InputDtype") == explain("input-dtype")
    assert explain("input-dtype").startswith("input-dtype  an error of cgbundle: CallError, exit status 2\n")


def test_a_name_of_both_is_told_twice() -> None:
    both = json.loads(explain("too-many-keys", "--json"))
    assert [row["kind"] for row in both] == ["finding", "error"]


def test_without_a_name_all_are_listed() -> None:
    text = explain()
    known = explanations()
    assert len(known) > 150 and all(f"\n{explanation.name} " in text for explanation in known)
    assert {load["name"] for load in json.loads(explain("--json"))} >= {explanation.name for explanation in known}


@pytest.mark.parametrize("explanation", explanations(), ids=lambda entry: f"{entry.kind} {entry.name}")
def test_every_one_has_a_cause_and_a_cure(explanation) -> None:  # type: ignore[no-untyped-def]
    fields = dict(explanation.fields)
    assert explanation.headline.endswith((".", "!")) or ":" in explanation.headline
    assert fields["fix"]
    if explanation.kind == "finding":
        assert list(fields) == ["what", "why", "effect", "fix", "source"]


def test_padding_is_explained_reason_by_reason() -> None:
    """The output of `build` names `cgcompile explain padding`, because users may not have the source tree."""
    text = explain("padding")
    assert text.startswith("padding  what `build` and `inspect` say under that word\n")
    for reason in REASONS:
        assert f"\n  {reason.printed}\n" in text and reason.meaning in text and reason.cure in text
    (answer,) = json.loads(explain("padding", "--json"))
    assert answer["fields"].keys() == {"fix", *[reason.printed for reason in REASONS]}


def test_every_error_of_the_catalogues_is_there() -> None:
    names = {explanation.name for explanation in explanations() if explanation.kind == "error"}
    assert names == cgbundle.catalogue.CATALOGUE.keys() | cgcompile.errors.CATALOGUE.keys()


def test_a_mistyped_name_suggests_the_nearest() -> None:
    done = CliRunner().invoke(app, ["explain", "hostscaler"])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[0] == "error: hostscaler: no finding or error has that name"
    assert "did you mean host-scalar" in done.stderr
    assert CliRunner().invoke(app, ["explain", "zzz"]).stderr.endswith("hint: `cgcompile explain` lists all names\n")
    assert (spelled("InputDtype"), spelled("input_dtype")) == ("input-dtype", "input-dtype")
    assert nearest("input-dtyp", ["input-dtype", "input-kind", "usage"])[0] == "input-dtype"


def test_a_name_that_is_clearly_nearest_is_the_only_one_suggested() -> None:
    assert CliRunner().invoke(app, ["explain", "input-dtypo"]).stderr.endswith("hint: did you mean input-dtype?\n")


def test_errors_are_listed_by_where_people_meet_them() -> None:
    text = explain()
    order = [text.index(f"\n{name} ") for name in ("input-dtype", "not-a-bundle", "source-invalid", "image-unseen")]
    assert order == sorted(order)
    assert {explanation.name for explanation in explanations()} >= RECORDERS, (
        "names in the list of the recorders' that no error has"
    )


def test_names_are_completed() -> None:
    assert names("input-d") == ["input-device", "input-dtype"]
    assert len(names("")) > 150


def test_neither_torch_nor_rich_is_imported() -> None:
    code = "import sys\nfrom cgcompile_cli.main import app\napp(['explain', 'host-scalar'], standalone_mode=False)\n"
    code += "print({'torch', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
