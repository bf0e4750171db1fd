"""How `inspect` and its page show branches and loops, and how `diff` compares them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cgcompile.bundle.recordings import ConditionalNode, KernelNode, Recording
from cgcompile.tools.diff.nodes import changes
from cgcompile.tools.diff.recordings import compare_recordings
from cgcompile_cli.main import app
from tests.helpers.bundles.conditional_rows import fill, recording, switching
from tests.helpers.bundles.recordings import IMAGE
from tests.pure.cli import shown_bundles


def with_branch(image: str, batch: int) -> Recording:
    return recording(image)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shown_bundles.write(tmp_path_factory.mktemp("shown") / "tiny.cgb", (4,), record=with_branch)


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_has_bodies_behind_their_nodes(bundle: Path) -> None:
    lines = shown(str(bundle), "--graph", "4x2").splitlines()
    kernels = [line for line in lines if "body" in line or "cgcompile_set_condition" in line]
    assert any("while: body 0" in line for line in kernels)
    assert any("if: body 1, else body 2" in line for line in kernels)
    assert any("    memset 1 B to 0x5" in line for line in lines), "inside two bodies"
    nodes = json.loads(shown(str(bundle), "--graph", "4x2", "--json"))["nodes"]
    numbers = [node["number"] for node in nodes if node["step"] == 0]
    assert numbers == [0, 1, 2, 5, 6, 7, 8, 16, 17, 9, 10, 11, 12, 13, 3, 4, 14, 15]
    (setter,) = [node for node in nodes if node["number"] == 3 and node["step"] == 0]
    assert [(reference["how"], reference["bytes"]) for reference in setter["references"]] == [("reads", 1)]


def test_dot_says_where_bodies_begin(bundle: Path) -> None:
    text = shown(str(bundle), "--graph", "4x2", "--dot")
    for edge in ("n0_2 -> n0_5 [style=dotted, label=iteration];", "n0_8 -> n0_17 [style=dotted, label=false];"):
        assert edge in text
    assert "n0_4 -> n1_0 [style=dashed];" in text, "the copy step waits for the graph's own last node alone"


def test_a_switch_names_its_cases(tmp_path: Path) -> None:
    path = shown_bundles.write(tmp_path / "tiny.cgb", (4,), record=lambda image, batch: switching(image))
    assert "switch: 0 body 0, 1 body 1, 2 body 2" in shown(str(path), "--graph", "4x2")
    assert "n0_2 -> n0_5 [style=dotted, label=2];" in shown(str(path), "--graph", "4x2", "--dot")


def test_differences_of_bodies_and_handles() -> None:
    one = recording(IMAGE)
    nodes = list(one.nodes)
    setter = nodes[3]
    assert isinstance(setter, KernelNode)
    nodes[3] = replace(setter, handles=(replace(setter.handles[0], conditional=2),))
    nodes[4] = ConditionalNode(type="while", bodies=(1,))
    other = replace(one, nodes=tuple(nodes))
    assert changes(one, other, 3) == [("parameter 1", "condition 1 -> condition 2")]
    assert changes(one, other, 4) == [("type", "if -> while"), ("bodies", "1x2 -> 1")]
    moved = replace(one, nodes=(*one.nodes[:14], fill(129, 1), *one.nodes[15:]), bodies=(5, 14, 14, 16, 17))
    (difference,) = compare_recordings("batch=4", one, moved)
    assert (difference.field, difference.a) == ("first nodes of bodies", "5, 14, 15, 16, 17")
