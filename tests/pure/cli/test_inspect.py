"""`inspect --graph`, `--memory`, `--dot` and the overview's lines on state: rows from the manifest and tables, and their text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from cgbundle.format import archive
from cgbundle.format.schema import (
    MEMORIES,
    Alias,
    DataSize,
    Dimension,
    EntrySpec,
    FrozenWeight,
    Lowering,
    Manifest,
    TensorSpec,
    Weight,
)
from cgbundle.format.shapes import span
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Edge, KernelNode, Recording
from cgcompile.pipeline.records import Built
from cgcompile.targets.instruction_sets import LEVELS
from cgcompile_cli import main, summary
from cgcompile_cli.commands import build
from cgcompile_cli.inspection import dot, lanes, memory_map, memory_text, names, nodes, overview, program_text
from cgcompile_cli.output import safe, show
from tests.helpers.bundles import cuda_bundles, tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.places import GOLDEN
from tests.pure.cli import shown_bundles

HOME = GOLDEN / "v1"
HOSTILE = "[red]<script>;\"'\\`${-->%s{}"


def call(*arguments: object, columns: int = 80) -> Result:
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env=environment)


def refused(result: Result) -> str:
    assert result.exit_code == 2 and (not result.stdout or list(json.loads(result.stdout)) == ["error"]), result.output
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: ") and len(rest) <= 1 and all(line.startswith("hint: ") for line in rest)
    return first


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return shown_bundles.write(tmp_path / "tiny.cgb")


def read(path: Path) -> tuple[Manifest, EntrySpec, list[list[nodes.NodeRow]]]:
    """Returns the manifest, the first entry, and the nodes of its first program."""
    manifest = archive.read_manifest(str(path))
    entry = manifest.entries[0]
    return manifest, entry, nodes.read_nodes(str(path), manifest, entry, entry.programs[0])


def node(number: int, *after: int, what: str = "k", early: tuple[int, ...] = ()) -> nodes.NodeRow:
    return nodes.NodeRow(0, number, "kernel", what, "", (1, 1, 1), (32, 1, 1), (), 0, tuple(sorted(after)), early, ())


# --- lowerings ----------------------------------------------------------------------------------------------------


def test_what_was_tried_is_shown_with_its_times_and_why_others_are_left_out(tmp_path: Path) -> None:
    def tried(chosen: str, *times: float) -> tuple[Lowering, ...]:
        timed = zip(("eager", "inductor"), times, strict=True)
        rows = [Lowering(name=name, chosen=name == chosen, microseconds=(time,)) for name, time in timed]
        return (*rows, Lowering(name="max-autotune", reason="no kernel fits"))

    def change(manifest: Manifest) -> Manifest:
        before = manifest.entries[0].programs
        kinds = [tried("inductor", 12.34, 11.0), *[tried("eager", 7.0, 8.25)] * (len(before) - 1)]
        programs = [replace(program, lowerings=rows) for program, rows in zip(before, kinds, strict=True)]
        changed: Manifest = edited(manifest, programs=tuple(programs))
        return changed

    path = shown_bundles.write(tmp_path / "tried.cgb", change=change)
    shown = call("inspect", path, columns=120).stdout
    assert re.search(r"lowerings +batch x seq +eager +inductor\n +4x2 +12.3 us +11.0 us +inductor\n", shown), shown
    assert re.search(r" +7.0 us +8.2 us +eager\n", shown) and "left out   max-autotune: no kernel fits" in shown
    answers = json.loads(call("inspect", path, "--json").stdout)["manifest"]["entries"][0]["programs"][0]["lowerings"]
    assert answers[1] == {"name": "inductor", "chosen": True, "microseconds": [11.0]}


# --- nodes --------------------------------------------------------------------------------------------------------


def test_nodes_come_in_an_order_in_which_they_may_run(bundle: Path) -> None:
    _, _, ((*recorded,), (copy,)) = read(bundle)
    assert [node.number for node in recorded] == [3, 1, 2, 0, 4], "every edge of the recording points forward"
    assert [node.after for node in recorded] == [(), (3,), (3,), (1, 2), (0,)]
    assert [node.kind for node in (*recorded, copy)] == ["memset", "kernel", "memcpy", "kernel", "empty", "copy"]


def test_what_nodes_use_has_a_name_and_a_direction_where_it_is_known(bundle: Path) -> None:
    _, _, ((memset, add, memcpy, combine, empty), (copy,)) = read(bundle)
    assert program_text.memory(memset) == "writes arena+0"
    assert program_text.memory(add) == "reads input x; refers to arena+512, arena+0"
    assert program_text.memory(memcpy) == "reads arena+0; writes arena+1024"
    assert program_text.memory(combine) == "refers to arena+1536 (v1), arena+512, arena+1024"
    assert program_text.memory(empty) == ""
    assert program_text.memory(copy) == "reads arena+1536 (v1); writes arena+2048 (output y)"
    assert [reference.bytes for reference in (*memset.references, *memcpy.references, *copy.references)] == [256] * 5


def test_a_kernel_that_can_write_one_place_alone_writes_it(tmp_path: Path) -> None:
    def record(image: str, batch: int) -> Recording:
        base = cuda_bundles.recording(image, batch)
        places = cuda_bundles.relocations((0, cuda_bundles.ARENA_AT, 512), (8, 0, 256), (16, cuda_bundles.INPUTS_AT, 4))
        return replace(base, nodes=(replace(base.nodes[1], relocations=places),), edges=())

    path = shown_bundles.write(tmp_path / "one.cgb", record=record)
    manifest, entry, ((kernel,), _) = read(path)
    assert program_text.memory(kernel) == "reads offsets, input x+4; writes arena+512"
    ((kernel,), _) = nodes.read_nodes(str(path), manifest, replace(entry, mutated_inputs=(0,)), entry.programs[0])
    assert program_text.memory(kernel) == "reads offsets; refers to arena+512, input x+4", "a call may change this input"


def test_an_early_start_is_said(tmp_path: Path) -> None:
    def record(image: str, batch: int) -> Recording:
        base = cuda_bundles.recording(image, batch)
        early = Edge(source=0, target=1, from_port=1, to_port=0, type=1)
        return replace(base, nodes=base.nodes[:2], edges=(early,))

    _, _, (kernels, _) = read(shown_bundles.write(tmp_path / "early.cgb", record=record))
    assert [program_text.waits(kernel) for kernel in kernels] == ["", "0 early"]
    assert not program_text.is_chain(kernels) and program_text.is_chain([node(3), node(1, 3)])


@pytest.mark.parametrize("name", ["gpt_two", "mlp"])
def test_every_address_of_a_golden_is_named(name: str) -> None:
    path = HOME / f"{name}.cgb"
    manifest = archive.read_manifest(str(path))
    (entry,) = manifest.entries
    for program in entry.programs:
        (shown_nodes,) = nodes.read_nodes(str(path), manifest, entry, program)
        recording = tables.decode((path / program.steps[0].file).read_bytes())
        assert len(shown_nodes) == len(recording.nodes) > 1
        for node in shown_nodes:
            known = recording.nodes[node.number]
            assert isinstance(known, KernelNode)
            assert (node.grid, node.block, node.shared) == (known.grid, known.threads, known.shared)
            assert node.what == recording.functions[known.function].symbol
            places = {(MEMORIES[item.target.memory], item.target.offset) for item in known.relocations}
            assert {(item.memory, item.offset) for item in node.references} == places
            for item in node.references:
                if item.memory == "weights":
                    assert item.how == nodes.READS and item.name.partition("+")[0] in {w.name for w in manifest.weights}
                elif item.memory == "inputs":
                    assert (item.how, item.name) == (nodes.READS, f"input {entry.inputs[0].name}")
                else:
                    assert item.how != nodes.READS and item.name.startswith(f"arena+{item.offset}")
    last = shown_nodes[-1].references[-1].name
    assert last == f"arena+{program.values[1].offset} (output output)", "the last node makes the output"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), max_size=12), st.integers(0, 4000))
def test_names_of_weights_agree_with_a_search(sizes: list[tuple[int, int]], offset: int) -> None:
    rows, end = [], 0
    for number, (gap, length) in enumerate(sizes):
        at = end + 256 * gap
        row = Weight(
            name=f"w{number}", tensor=f"w{number}", dtype="uint8", shape=(length,), strides=(1,), memory="weights", offset=at
        )
        rows += [row, replace(row, name=f"tied{number}")]
        end = at + -(-length // 256) * 256
    manifest = replace(tiny_bundle.manifest(), weights=tuple(rows))
    holding = [row for row in rows[::2] if row.offset <= offset < row.offset + span(row)]
    expected = f"weights+{offset}"
    if holding:
        expected = holding[0].name + (f"+{offset - holding[0].offset}" if offset > holding[0].offset else "")
    entry = manifest.entries[0]
    assert names.Names(manifest, entry, entry.programs[0]).of("weights", offset) == expected


def test_a_value_names_its_place_only_in_steps_that_use_it(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    entry = manifest.entries[0]
    known = names.Names(manifest, entry, entry.programs[0])
    assert known.of("arena", 1536) == "arena+1536"
    assert known.of("arena", 1536, (1,)) == "arena+1536 (v1)"
    assert known.of("arena", 1540, (1,)) == "arena+1540 (v1+4)", "a part of a value that the step was given"
    assert known.of("arena", 1540, (), (1,)) == "arena+1540", "not yet a part of the value that the step makes"
    assert known.of("inputs", 0) == "input x" and known.of("inputs", 1000) == "inputs+1000"


# --- --graph ------------------------------------------------------------------------------------------------------


def test_a_line_per_node(bundle: Path) -> None:
    result = call("inspect", bundle, "--graph", "4x2", columns=40)
    assert (result.exit_code, result.stderr) == (0, "")
    head, *lines = result.stdout.splitlines()[-6:]
    assert head.split() == ["#", "after", "kernel", "grid", "block", "memory"]
    assert [line.split()[0] for line in lines] == ["3", "1", "2", "0", "4"]
    assert "0  1, 2   combine" in lines[3] and lines[3].endswith("refers to arena+1536 (v1), arena+512, arena+1024"), "not cut"
    assert "step 0, graph g0: 5 nodes (graphs/g0-4x2.bin)" in result.stdout


def test_a_chain_needs_no_column_that_says_so() -> None:
    shown = call("inspect", HOME / "gpt_two.cgb", "--graph", "4").stdout
    assert "22 nodes, each after the one before" in shown
    head, *lines = shown.splitlines()[-23:]
    assert head.split() == ["#", "kernel", "grid", "cluster", "block", "shared", "memory"]
    assert [int(line.split()[0]) for line in lines] == list(range(22))
    assert "writes arena+0" in lines[0] and "token.weight" in lines[0]


def test_nodes_as_json(bundle: Path) -> None:
    answer = json.loads(call("inspect", bundle, "--graph", "4x2", "--json").stdout)
    assert answer["key"] == [4, 2] and [node["what"] for node in answer["nodes"]][1:4:2] == ["add", "combine"]
    assert answer["nodes"][1]["references"][-1] == {"how": "reads", "memory": "inputs", "offset": 0, "bytes": 0, "name": "input x"}


@given(st.integers(80, 200), st.lists(st.tuples(st.text("abc_", max_size=90), st.text("xyz ", max_size=200)), min_size=1))
def test_cut_lines_fit(width: int, rows: list[tuple[str, str]]) -> None:
    whole = [("#", [str(n) for n in range(len(rows))]), ("kernel", [a for a, _ in rows]), ("memory", [b for _, b in rows])]
    cut = dict(program_text.fitted(whole, width))
    for number, (kernel, memory) in enumerate(rows):
        assert len(cut["kernel"][number]) + len(cut["memory"][number]) <= width - 4
        for full, part in ((kernel, cut["kernel"][number]), (memory, cut["memory"][number])):
            begin, dots, end = part.partition(program_text.DOTS)
            assert part == full or (dots and full.startswith(begin) and full.endswith(end))


# --- --memory -----------------------------------------------------------------------------------------------------


def test_places_and_what_uses_them(bundle: Path) -> None:
    manifest, entry, steps = read(bundle)
    spans = memory_map.places(manifest, entry, entry.programs[0], memory_map.order(steps))
    assert [(place.memory, place.begin, place.end, place.name) for place in spans] == [
        ("inputs", 0, 512, "input x"), ("inputs", 512, 1024, "input places"), ("arena", 0, 512, ""), ("arena", 512, 1024, ""),
        ("arena", 1024, 1536, ""), ("arena", 1536, 2048, "v1"), ("arena", 2048, 4096, "output y"),
    ]  # fmt: skip
    assert [memory_text.uses_strip(place.uses, 6, 80) for place in spans] == [" r", "", "wxr", " x-x", "  wx", "   x-r", "     w"]


def test_the_map_of_one_int_key(bundle: Path) -> None:
    result = call("inspect", bundle, "--graph", "4x2", "--memory")
    assert result.exit_code == 0 and "weights 1.0 KiB, inputs 1.0 KiB, arena 4.0 KiB" in result.stdout
    assert re.search(r"arena\+1536 +512 B +v1 +x-r$", result.stdout, re.MULTILINE)
    assert re.search(r"steps +gggggc$", result.stdout, re.MULTILINE)
    assert call("inspect", HOME / "gpt_two.cgb", "--memory").stdout.count("arena+") == 10, "a single int_key needs no --graph"
    _, entry, steps = read(bundle)
    assert memory_text.timeline(entry.programs[0], steps, 2) == "gc", "a column with a copy says so"


def test_the_map_of_32_int_keys_is_a_line_each(tmp_path: Path) -> None:
    path = shown_bundles.write(tmp_path / "many.cgb", batches=range(1, 9), seqs=range(1, 5))
    shown = call("inspect", path, "--memory").stdout.splitlines()
    rows = [line for line in shown if re.match(r"\dx\d ", line)]
    assert len(rows) == 32 and len(shown) <= 38 and max(map(len, shown)) <= 80
    assert {len(line[line.index("|") :]) for line in rows} == {len(rows[0][rows[0].index("|") :])} and ":" in rows[0]


def test_the_map_as_json(bundle: Path) -> None:
    answer = json.loads(call("inspect", bundle, "--memory", "--json").stdout)
    assert [program["key"] for program in answer["programs"]] == [[4, 2], [8, 2]] and answer["memories"]["arena"] == 4096
    assert answer["programs"][0]["places"][2] | {"uses": 0} == {"memory": "arena", "begin": 0, "end": 512, "name": "", "uses": 0}


def test_a_cpu_bundle_has_nothing_to_draw(tmp_path: Path) -> None:
    shown = call("inspect", tiny_bundle.write_bundle(tmp_path / "cpu.cgb"), "--memory")
    assert shown.exit_code == 0 and "nothing to draw" in shown.stdout and "2 tensors, 32 B" in shown.stdout


@given(st.dictionaries(st.integers(0, 399), st.sampled_from(nodes.HOWS)), st.integers(1, 120))
def test_a_strip_shows_every_use(uses: dict[int, str], width: int) -> None:
    strip = memory_text.uses_strip(uses, 400, width)
    step = -(-400 // width)
    assert len(strip) <= width
    for cell, letter in enumerate(strip):
        inside = {how for position, how in uses.items() if position // step == cell}
        expected = next((memory_map.LETTERS[how] for how in memory_map.LETTERS if how in inside), None)
        assert letter == (expected or (memory_text.BETWEEN if min(uses) // step < cell else " "))
    assert {position // step for position in uses} <= set(range(len(strip)))


@given(st.integers(1, 5000), st.integers(20, 200))
def test_a_ruler_says_which_node_stands_below(total: int, width: int) -> None:
    step = -(-total // width)
    for mark in re.finditer(r"\d+", memory_text.ruler(total, width)):
        assert int(mark[0]) == mark.start() * step


@given(st.lists(st.integers(1, 900), max_size=20), st.integers(20, 120))
def test_shades_stop_where_the_program_does(sizes: list[int], width: int) -> None:
    ends = [sum(sizes[:count]) for count in range(1, len(sizes) + 1)]
    total = sum(sizes)
    places = [memory_map.Place("arena", e - s, e, "", {0: nodes.READS}) for s, e in zip(sizes, ends, strict=True)]
    line = memory_text.shades(places, "arena", 2 * total, total, width)
    assert set(line) <= {memory_text.SHADES[1]}
    assert abs(len(line) - width / 2) <= 1 if total else line == ""


# --- lanes --------------------------------------------------------------------------------------------------------


@given(st.data())
def test_lanes_lead_every_edge_to_its_node(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    graph_nodes = [node(n, *(data.draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else ())) for n in range(total)]
    rows = lanes.lanes(graph_nodes)
    open_edges: dict[int, set[int]] = {}  # lane -> nodes that its source still has to reach
    sources: dict[int, int] = {}
    for row, graph_node in zip(rows, graph_nodes, strict=True):
        assert {sources[lane] for lane in row.arriving} == set(graph_node.after)
        for lane in row.arriving:
            open_edges[lane].discard(graph_node.number)
        kept = {lane for lane, left in open_edges.items() if left}
        assert set(row.passing) == kept and row.lane not in kept
        open_edges = {lane: open_edges[lane] for lane in kept}
        targets = {other.number for other in graph_nodes if graph_node.number in other.after}
        assert row.leaving == bool(targets)
        if targets:
            open_edges[row.lane], sources[row.lane] = targets, graph_node.number
    assert not open_edges


def test_a_chain_has_one_lane() -> None:
    rows = lanes.lanes([node(0), node(1, 0), node(2, 1)])
    assert rows == [lanes.LaneRow(0, (), (), True), lanes.LaneRow(0, (), (0,), True), lanes.LaneRow(0, (), (0,), False)]


# --- --dot --------------------------------------------------------------------------------------------------------

STRING = r'"(?:[^"\\]|\\.)*"'


def statements(text: str) -> Iterator[str]:
    """Yields the lines of a digraph without its strings. Such lines have a small grammar."""
    for line in text.splitlines():
        yield re.sub(STRING, "S", line).strip()


def test_dot_has_the_nodes_and_edges(bundle: Path) -> None:
    digraph = call("inspect", bundle, "--dot").stdout
    assert set(re.findall(r"(\w+) -> (\w+)", digraph)) == {
        ("n0_3", "n0_1"), ("n0_3", "n0_2"), ("n0_1", "n0_0"), ("n0_2", "n0_0"), ("n0_0", "n0_4"), ("n0_4", "n1_0"),
    }  # fmt: skip
    assert 'label="1  add\\lgrid 4  block 32\\lreads input x\\lrefers to arena+512, arena+0\\l"' in digraph
    assert "int_key 4x2" in digraph and "int_key 8x2" in call("inspect", bundle, "--dot", "--graph", "8x2").stdout


@pytest.mark.parametrize("name", ["tiny", HOSTILE])
def test_dot_is_valid_whatever_the_names_are(tmp_path: Path, name: str) -> None:
    def change(manifest: Manifest) -> Manifest:
        (entry,) = manifest.entries
        spec = replace(entry.inputs[0], name=name)
        call = {"call": [[name, {"tensor": 0}], *entry.call["call"][1:]]}
        changed: Manifest = edited(manifest, name=name, inputs=(spec, *entry.inputs[1:]), call=call)
        return changed

    digraph = call("inspect", shown_bundles.write(tmp_path / "t.cgb", change=change), "--dot").stdout
    assert digraph.isprintable() or all(letter.isprintable() for line in digraph.splitlines() for letter in line)
    attribute = r"\w+=(S|[\w.]+)"
    row = rf"(digraph \{{|subgraph cluster_\d+ \{{|\}}|({attribute}; )*{attribute};"
    row += rf"|(\w+)( -> \w+)?( \[{attribute}(, {attribute})*\])?;( edge \[{attribute}\];)?)"
    assert [line for line in statements(digraph) if not re.fullmatch(row, line)] == []
    if graphviz := shutil.which("dot"):
        done = subprocess.run([graphviz, "-Tplain"], input=digraph, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@given(st.text())
def test_a_string_of_dot_means_its_text(text: str) -> None:
    literal = dot.quoted(text)
    assert re.fullmatch(STRING, literal)
    assert re.sub(r"\\(.)", r"\1", literal[1:-1]).replace("&amp;", "&") == safe(text)


# --- options, damage, state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--kernels", "--memory"), ("--memory", "--dot"), ("--html", "x.html", "--dot"), ("--html", "x.html", "--json"),
        ("--dot", "--json"), ("--html", "x.html", "--graph", "4x2"), ("--kernels", "--graph", "4x2"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other(bundle: Path, options: tuple[str, ...]) -> None:
    message = refused(call("inspect", bundle, *options))
    assert all(option in message for option in options if option.startswith("--")) and not Path("x.html").exists()


@pytest.mark.parametrize("option", ["--memory", "--dot", "--graph"])
def test_a_changed_byte_of_a_recording_is_found(bundle: Path, option: str) -> None:
    path = bundle / "graphs" / "g0-4x2.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    result = call("inspect", bundle, option, *(["4x2"] if option == "--graph" else []))
    assert (result.exit_code, result.stdout) == (1, "") and "graphs/g0-4x2.bin" in result.stderr


@pytest.mark.parametrize("options", [("--graph", "4x2"), ("--memory",), ("--graph", "4x2", "--memory"), ("--dot",)])
def test_hostile_names_are_shown_as_they_are(tmp_path: Path, options: tuple[str, ...]) -> None:
    def change(manifest: Manifest) -> Manifest:
        (entry,) = manifest.entries
        inputs = (replace(entry.inputs[0], name=HOSTILE), *entry.inputs[1:])
        call = {"call": [[HOSTILE, {"tensor": 0}], *entry.call["call"][1:]]}
        weights = (replace(manifest.weights[0], name=HOSTILE, tensor=HOSTILE), *manifest.weights[1:])
        regions = (replace(manifest.regions[0], name=HOSTILE),)
        changed: Manifest = edited(manifest, name=HOSTILE, inputs=inputs, call=call, weights=weights, regions=regions)
        return changed

    result = call("inspect", shown_bundles.write(tmp_path / "evil.cgb", change=change), *options)
    assert result.exit_code == 0 and "[red]<script>" in result.output
    assert all(letter == "\n" or letter.isprintable() for letter in result.output)


def stateful(manifest: Manifest) -> Manifest:
    cache = Weight(name="cache", tensor="cache", dtype="uint8", shape=(3,), strides=(1,), memory="state", offset=0)
    seed = Weight(name="seed", tensor="seed", dtype="int64", shape=(2,), strides=(1,), memory="state", offset=256)
    sizes = dict(manifest.memories) | {"state": 512}
    weights = (cache, *manifest.weights[1:], seed)
    before = manifest.entries[0].self_test
    after = replace(before, bounds=(*before.bounds, 0.0, 0.0))
    changed: Manifest = edited(manifest, weights=weights, random=len(weights) - 1, memories=tuple(sizes.items()), self_test=after)
    return changed


def test_the_error_against_eager_and_the_distance_from_the_recording_are_told(tmp_path: Path) -> None:
    def loose(manifest: Manifest) -> Manifest:
        before = manifest.entries[0].self_test
        proofs = tuple([replace(proof, error=2e-6, errors=(2e-6,), distance=3e-7) for proof in before.proofs])
        changed: Manifest = edited(manifest, self_test=replace(before, compare="tolerance", proofs=proofs))
        return changed

    path = shown_bundles.write(tmp_path / "loose.cgb", change=loose)
    shown = call("inspect", path).stdout
    assert "from recording" in call("inspect", path, "--html", "-").stdout
    assert re.search(r"proof +error +bound +from recording$", shown, re.MULTILINE)
    assert re.search(r"replay +2\.0e-06 +1\.0e-05 +3\.0e-07$", shown, re.MULTILINE)


def test_several_outputs_have_a_bound_each(tmp_path: Path) -> None:
    shown = call("inspect", shown_bundles.write(tmp_path / "s.cgb", change=stateful)).stdout
    rows = r"^self-test +error +bound\n +output y \(float32\) +1\.0e-05\n +state cache \(uint8\) +equal$"
    assert re.search(rows, shown, re.MULTILINE)


def test_state_and_random_numbers_are_told(tmp_path: Path) -> None:
    path = shown_bundles.write(tmp_path / "s.cgb", change=stateful)
    shown = call("inspect", path).stdout
    assert "state 512 B" in shown and "2 weights, 512 B" in shown
    assert re.search(r"^state +1 buffer that calls change, 3 B in every session$", shown, re.MULTILINE)
    assert f"seed: {summary.RANDOM}" in shown
    mapped = call("inspect", path, "--memory", "--graph", "4x2").stdout
    assert re.search(r"^state\+0 +256 B +cache", mapped, re.MULTILINE)
    assert json.loads(call("inspect", path, "--json").stdout)["state"] == ["cache", "seed"]
    manifest, entry, _ = read(path)
    assert names.Names(manifest, entry, entry.programs[0]).of("state", 257) == "state seed+1"
    assert "state" not in call("inspect", HOME / "mlp.cgb").stdout, "nothing is said where there is none"


@pytest.mark.parametrize(
    ("alias", "owner"),
    [
        (("inputs", 1), "input places"),
        (("outputs", 0), "output y"),
        (("weights", 1), "weight offsets"),
        (("state", 0), "state cache"),
    ],
)
def test_what_an_output_shares_memory_with_is_told(bundle: Path, alias: tuple[str, int], owner: str) -> None:
    manifest = stateful(archive.read_manifest(str(bundle)))
    entry = replace(manifest.entries[0], aliases=(Alias(output=0, memory=alias[0], index=alias[1]),), mutated_inputs=(0,))
    rows = summary.signature_rows(manifest, entry)
    assert [row[-1] for row in rows] == [summary.UPDATED, "", f"(shares memory with {owner})"]


def test_an_output_whose_size_depends_on_data_shows_its_bound(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    entry, count = manifest.entries[0], TensorSpec(name="y.rows", dtype="int64", shape=(), order=())
    entry = replace(entry, outputs=(*entry.outputs, count), data_sizes=(DataSize(output=0, axis=0, count=1),))
    (shown,) = [row for row in summary.signature_rows(manifest, entry) if row[0] == "out"]
    assert shown[3].startswith("[<=") and "<=" not in shown[3][2:]
    assert summary.plain_entry(manifest, entry)["outputs"] == [f"{shown[1]}: {shown[2]} {shown[3]}"]


def test_the_last_of_many_int_keys_is_shown(tmp_path: Path) -> None:
    path = shown_bundles.write(tmp_path / "many.cgb", batches=range(1, 9), seqs=range(1, 5))
    shown = call("inspect", path).stdout
    assert re.search(r"^ +8x4 +1 graph, 1 copy", shown, re.MULTILINE) and "19 more" in shown


def test_a_processors_features_are_told_by_its_level() -> None:
    held = tiny_bundle.manifest().target
    level = {"cpu x86_64 (x86-64-v3, avx_vnni, f, and 2 more)": (*LEVELS[1].features, "avx_vnni", "f", "g", "h")}
    level["cpu x86_64 (avx512f, fma)"] = ("fma", "avx512f")
    for description, features in level.items():
        shown = summary.target(replace(held, arch="x86_64", features=features, torch=""))
        assert shown == f"{description}, to run: libgomp.so.1", "nothing of torch's, but OpenMP's library"


def test_the_bytes_of_weights_on_a_gpu_are_explained() -> None:
    """Beside `weights 3 weights, 32 B`, which is what the CPU needs."""
    base = tiny_bundle.manifest()
    on_gpu = replace(base, target=replace(base.target, kind="cuda"), memories=(("weights", 1024), ("arena", 64)))
    tensors = summary.size(summary.fixed_bytes(base))
    gaps = f"weights: {tensors} of tensors; on a GPU each begins at a multiple of 256 bytes"
    assert summary.memory_lines(on_gpu) == ["weights 1.0 KiB, arena 64 B", gaps]
    assert summary.memory_lines(replace(on_gpu, target=base.target)) == ["weights 1.0 KiB, arena 64 B"]
    assert summary.memory_lines(replace(on_gpu, memories=(("weights", summary.fixed_bytes(base)),))) == [f"weights {tensors}"]


def test_files_whose_names_do_not_say_it_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")
    shown = re.sub(" +", " ", call("inspect", path).stdout)
    assert " exam.safetensors the self-test: inputs and expected outputs, which `verify --run` and `run` replay\n" in shown
    assert " weights.safetensors\n" in shown


def test_a_dimension_that_takes_its_recorded_sizes_only_is_noted() -> None:
    dims = [Dimension(name=pad, sizes=(2, 4), pad=pad, chunk=False, reason="why") for pad in ("rows", "zeros", "no")]
    (note,) = summary.unpadded(replace(tiny_bundle.manifest().entries[0], dimensions=tuple(dims)))
    assert note.startswith("no takes 2, 4 only: other sizes are refused") and "`cgcompile explain padding`" in note
    assert "record the sizes of your calls too (--sizes no=2,4,N); " in note


def test_the_note_of_a_sum_over_padded_elements_tells_how_to_hide_them() -> None:
    """A mask that forward() makes from lengths hides none of the zeros that a call is padded with."""
    reason = "softmax combines elements along seq (model.py:9: x = self.encoder(x, src_key_padding_mask=mask)); may change"
    row = Dimension(name="seq", sizes=(8, 16), pad="no", chunk=False, reason=reason)
    (note,) = summary.unpadded(replace(tiny_bundle.manifest().entries[0], dimensions=(row,)))
    assert (
        "(--sizes seq=8,16,N), or hide padded elements before that line: let inputs() give a mask that is True for real tokens"
        in note
    )
    assert "key_padding_mask=~mask" in note and "\n" not in note


def test_a_language_model_is_served_with_the_tokenizer_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    assert summary.serve_line("m.cgb", str(folder)) == f"cgcompile serve m.cgb --tokenizer '{folder}'"
    assert summary.serve_line("out/m.cgb", "hub/tiny.gguf") == "cgcompile serve out/m.cgb --tokenizer out/tiny"
    assert summary.serve_line("m.cgb", "model.py") == "cgcompile serve m.cgb --tokenizer FOLDER"


def test_weights_that_python_read_are_listed_with_the_line() -> None:
    base = tiny_bundle.manifest()
    rows = [FrozenWeight(weight=at, reason="baked", sha256="0" * 64, where=f"model.py:{at + 3}") for at in (0, 1)]
    lines = [line.replace(", tied.bias", "") for line in overview.update(replace(base, frozen=tuple(rows)))[1:]]
    names = [base.weights[row.weight].name for row in rows]
    text = "Python read its value at model.py:{} while the bundle was built; for other values, build again"
    assert lines == [f"not {name}: {text.format(at + 3)}" for at, name in enumerate(names)]


def test_a_build_tells_which_weights_no_update_can_change(capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_bundle.manifest()
    folded = replace(base, frozen=(FrozenWeight(weight=0, reason="folded", sha256="0" * 64),))
    for manifest, is_folded in ((base, False), (folded, True)):
        show(build._summary(Built(path=Path("tiny.cgb"), manifest=manifest, seconds=()), "tiny.py", 1.0, None), sys.stderr)
        (line,) = [*[row for row in capsys.readouterr().err.splitlines() if base.weights[0].name in row], ""][:1]
        assert ("folded" in line) == is_folded
