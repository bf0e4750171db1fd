"""Donations in a malicious or wrong manifest: names, dtypes, shapes, and memory that another entry uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.format import limits, manifest_json
from cgbundle.format.schema import Alias, Manifest
from cgbundle.validate.contents import check_tables
from cgbundle.validate.module_state import ModuleState
from cgbundle.validate.state import check_donations
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import encode_states
from tests.helpers.bundles import donation_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import ARENA_AT, INPUTS_AT, relocations
from tests.helpers.bundles.donation_bundles import ADDS, AGAIN_AT, ARENA, DONATIONS, MAKE_AT, SHARED_AT, N, write
from tests.helpers.bundles.edits import edited
from tests.helpers.raising import raises

MAKE, AGAIN, TAKE = range(3)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write(tmp_path / "chained.cgb")


def bad(manifest: Manifest, match: str) -> None:
    with raises("manifest-invalid", match=match):
        check_donations(manifest)


def entry(manifest: Manifest, number: int, **changes: Any) -> Manifest:
    specs = list(manifest.entries)
    specs[number] = replace(specs[number], **changes)
    return replace(manifest, entries=tuple(specs))


def donation(manifest: Manifest, **changes: Any) -> Manifest:
    """Returns the manifest with one changed donation, from make's output to take's second input."""
    return edited(manifest, donations=(replace(DONATIONS[-1], **changes),))


def value(manifest: Manifest, number: int, index: int, **changes: Any) -> Manifest:
    """Returns the manifest with another value in the only program of an entry."""
    (program,) = manifest.entries[number].programs
    values = list(program.values)
    values[index] = replace(values[index], **changes)
    return entry(manifest, number, programs=(replace(program, values=tuple(values)),))


def test_a_sound_manifest(manifest: Manifest) -> None:
    check_donations(manifest)
    check_donations(edited(manifest, donations=(), donated=()))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"source": "made"}, r"donations\[0\].source: no entry 'made'"),
        ({"target": "took"}, r"donations\[0\].target: no entry 'took'"),
        ({"output": 1}, r"donations\[0\].output: 'make' has no output 1"),
        ({"output": -1}, "'make' has no output -1"),
        ({"input": 2}, r"donations\[0\].input: 'take' has no input 2"),
        ({"input": -1}, "'take' has no input -1"),
    ],
)
def test_names_and_numbers(manifest: Manifest, changes: dict[str, Any], match: str) -> None:
    bad(donation(manifest, **changes), match)


def test_donations_ascend(manifest: Manifest) -> None:
    bad(edited(manifest, donations=DONATIONS[::-1]), "not ascending")
    bad(edited(manifest, donations=(*DONATIONS, DONATIONS[-1])), "one occurs twice")


def test_dtypes_and_layouts(manifest: Manifest) -> None:
    take = manifest.entries[TAKE]
    half = tuple([replace(spec, dtype="float16") for spec in take.inputs])
    bad(entry(manifest, TAKE, inputs=half), r"donations\[1\]: an output of dtype float32, that input takes float16")
    bad(value(manifest, TAKE, 1, shape=(N // 2,)), r"donations\[1\]: output and input are laid out alike at no int_keys")
    bad(
        value(manifest, TAKE, 0, shape=(2, N // 2), strides=(N // 2, 1)),
        r"donations\[3\]: output and input are laid out alike at no",
    )


def test_an_output_that_is_other_memory_and_an_input_that_is_written(manifest: Manifest) -> None:
    check_donations(entry(manifest, MAKE, aliases=(Alias(output=0, memory="outputs", index=0),)))
    for memory in ("inputs", "weights", "state"):
        shared = entry(manifest, MAKE, aliases=(Alias(output=0, memory=memory, index=0),))
        bad(shared, r"donations\[2\].output: shares memory with an input, a weight or state")
    check_donations(entry(manifest, MAKE, aliases=(Alias(output=1, memory="inputs", index=0),)))  # an alias of another output
    bad(entry(manifest, AGAIN, mutated_inputs=(0,)), r"donations\[0\].input: calls write to it")


def test_what_is_reserved(manifest: Manifest) -> None:
    make, again = manifest.donated
    bad(edited(manifest, donated=(make,)), r"donated: is for \['make'\], the donations' sources are \['again', 'make'\]")
    bad(edited(manifest, donated=(make, again, make)), "donated: is for")
    bad(edited(manifest, donations=()), "donated: is for")
    bad(edited(manifest, donated=(make, replace(again, bytes=ARENA))), r"donated\[1\]: outside memory arena")
    for changes in ({"offset": ARENA}, {"bytes": ARENA + 1}):
        bad(edited(manifest, donated=(replace(make, **changes), again)), r"donated\[0\]: outside memory arena")
    nothing = edited(manifest, donated=tuple([replace(row, offset=0, bytes=0) for row in manifest.donated]))
    one = replace(nothing, donated=(replace(make, offset=0, bytes=1), nothing.donated[1]))
    bad(replace(one, memories=()), r"donated\[0\]: outside memory arena")
    bad(replace(nothing, memories=()), r"outputs\[0\]: is donated, and lies outside of its entry's part")
    bad(edited(manifest, donated=(replace(make, bytes=AGAIN_AT + 1), again)), r"donated\[1\]: overlaps another row")
    bad(replace(manifest, target=replace(manifest.target, kind="cpu")), r"donated: is for .* the donations' sources are \[\]")


def test_donated_outputs_lie_in_their_own_part_and_nothing_elses(manifest: Manifest) -> None:
    bad(value(manifest, MAKE, 1, offset=SHARED_AT), r"programs\[0\].outputs\[0\]: is donated, and lies outside")
    bad(value(manifest, AGAIN, 1, offset=SHARED_AT - 4), r"entries\[1\].programs\[0\].outputs\[0\]: is donated, and lies outside")
    bad(
        value(manifest, TAKE, 2, offset=MAKE_AT + 4),
        r"entries\[2\].programs\[0\].values\[2\]: lies in a part of the arena that another",
    )
    bad(value(manifest, TAKE, 2, offset=SHARED_AT - 4), r"entries\[2\].programs\[0\].values\[2\]: lies in a part")
    bad(value(manifest, MAKE, 1, memory="weights"), r"programs\[0\].outputs\[0\]: is donated, and lies outside")
    empty = manifest
    for number, index in ((MAKE, 1), (AGAIN, 0), (AGAIN, 1), (TAKE, 0), (TAKE, 1)):
        empty = value(empty, number, index, shape=(0,), offset=SHARED_AT)
    check_donations(empty)
    bad(value(manifest, AGAIN, 1, offset=MAKE_AT), r"entries\[1\].programs\[0\].values\[1\]: lies in a part")


def test_a_part_is_its_entrys_to_the_last_byte(manifest: Manifest) -> None:
    make, again = manifest.donated
    size = 4 * N
    check_donations(edited(manifest, donated=(replace(make, bytes=size), replace(again, bytes=size))))
    for number, row in ((MAKE, make), (AGAIN, again)):
        last = row.offset + row.bytes - size
        check_donations(value(manifest, number, 1, offset=last))
        late = replace(row, offset=row.offset + 4, bytes=row.bytes - 4)
        rows = (late, again) if number == MAKE else (make, late)
        bad(edited(manifest, donated=rows), r"outputs\[0\]: is donated, and lies outside")
        bad(value(manifest, number, 1, offset=last + 4), r"outputs\[0\]: is donated, and lies outside|another entry donates")


def rewritten(monkeypatch: pytest.MonkeyPatch, manifest: Manifest, folder: Path, name: str, adds: list[Any]) -> None:
    monkeypatch.setitem(donation_bundles.ADDS, name, adds)
    image = next(file.sha256 for file in manifest.files if file.path.startswith("kernels/"))
    (folder / f"graphs/{name}.bin").write_bytes(tables.encode(donation_bundles.recording(image, name)))


@pytest.mark.parametrize("place", [MAKE_AT, AGAIN_AT, SHARED_AT - 4])
@pytest.mark.parametrize("argument", [0, 1])
def test_a_recording_that_uses_what_is_another_entrys(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, argument: int
) -> None:
    folder = tmp_path / "chained.cgb"
    check_tables(ArchiveOf(folder, manifest))
    first, last = ADDS["take"]
    broken = tuple([(ARENA_AT, place) if index == argument else operand for index, operand in enumerate(first)])
    rewritten(monkeypatch, manifest, folder, "take", [broken, last])
    with raises("table-invalid", match=f"a node uses byte {place} of memory arena, which is reserved for another entry"):
        check_tables(ArchiveOf(folder, manifest))


def test_its_own_part_is_an_entrys_to_use(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "chained.cgb"
    inputs = (INPUTS_AT, 0)
    rewritten(monkeypatch, manifest, folder, "make", [((ARENA_AT, MAKE_AT), inputs, inputs), ((ARENA_AT, MAKE_AT),) * 3])
    check_tables(ArchiveOf(folder, manifest))


def test_a_variable_that_points_at_the_inputs(manifest: Manifest, tmp_path: Path) -> None:
    folder = tmp_path / "chained.cgb"
    image = next(file.sha256 for file in manifest.files if file.path.startswith("kernels/"))
    state = ModuleState(image=image, symbol="table", contents=bytes(8), relocations=relocations((0, INPUTS_AT, 0)))
    (folder / "graphs/modules.bin").write_bytes(encode_states([state]))
    changed = replace(manifest, module_state="graphs/modules.bin")
    with raises("table-invalid", match="a variable points at memory inputs, and donations give calls inputs that lie elsewhere"):
        check_tables(ArchiveOf(folder, changed))
    check_tables(ArchiveOf(folder, edited(changed, donations=(), donated=())))


def test_donations_are_lines_of_the_manifest_where_there_are_any(manifest: Manifest) -> None:
    text = manifest_text.encode(manifest)
    assert manifest_json.decode(text) == manifest and b'"donations"' in text and b'"donated"' in text
    bare = edited(manifest, donations=(), donated=())
    plain = manifest_text.encode(bare)
    assert manifest_json.decode(plain) == bare and b'"donations"' not in plain and b'"donated"' not in plain


@pytest.mark.parametrize("most", [1, 2, 10])
def test_what_donations_cost_is_limited(manifest: Manifest, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(limits, "CHAINED", most)
    words = "2 programs" if most == 1 else "[0-9]+ (programs|pairs of programs)"
    bad(manifest, f"donations: {words}, more than the limit of {most} in all")
    monkeypatch.setattr(limits, "CHAINED", 3 * len(DONATIONS))
    check_donations(manifest)
