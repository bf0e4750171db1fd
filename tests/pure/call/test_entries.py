"""A program of several entries: each entry has its own signature, and all share the session's memory, state and lock."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

import cgbundle.program
from cgbundle.errors import BundleError, CallError, EntryMissing
from cgbundle.format import archive, file_names, limits, manifest_json
from cgbundle.format.file_names import FORWARD, all_programs
from cgbundle.format.schema import EntrySpec, Manifest, Region
from cgbundle.program import Program
from cgbundle.validate.bundle import check_bundle
from cgbundle.validate.manifest import check_manifest
from cgcompile.bundle import manifest_text
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import FakeBackend, Numbers, dimension, signature, spec
from tests.helpers.raising import raises
from tests.pure.program.test_program import numbers


def entry(manifest: Manifest, name: str) -> EntrySpec:
    return replace(manifest.entries[0], name=name)


def whole(*entries: EntrySpec) -> Manifest:
    return replace(tiny_bundle.manifest(), entries=entries)


PREFILL = entry(signature([dimension("seq", 4, 8, pad="no", chunk=False)], [spec("ids", "seq")], [spec("last", 1)]), "prefill")
DECODE = entry(signature([dimension("batch", 1, 4)], [spec("x", "batch", 2)], [spec("y", "batch", 2)]), "decode")
RESET = entry(signature([], [spec("lane", 1)], [spec("done", 1)]), "reset")
THREE = whole(PREFILL, DECODE, RESET)
"""Three entries, none of which is called forward."""


def compute(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    """Computes a sum for even keys from 4 on (prefill), and twice the input for other keys. So results show which entry was
    called."""
    return [[sum(inputs[0])]] if key and len(inputs[0]) == key[0] else [[2 * value for value in inputs[0]]]


def program(manifest: Manifest = THREE, outputs: str = "copy") -> tuple[Program, FakeBackend]:
    backend = FakeBackend(manifest, compute, static=outputs == "view")
    return Program(manifest, backend, "pad", outputs), backend


def test_every_entry_is_called_by_its_name() -> None:
    run, backend = program()
    assert list(run.entries) == ["prefill", "decode", "reset"]
    assert run.prefill(numbers((4,)))[0].tolist() == [10.0]
    assert run["decode"](numbers((1, 2)))[0].tolist() == [[2.0, 4.0]]
    assert run["reset"](numbers((1,)))[0].tolist() == [2.0]  # program.reset restores the state
    assert [key for key, _ in backend.calls] == [(4,), (1,), ()]
    assert run.decode.int_keys == ((1,), (4,)) and run["reset"].int_keys == ((),)
    assert [spec.name for spec in run.decode.inputs] == ["x"] and "decode" in repr(run.decode)


def test_every_entry_has_its_own_guards_and_its_own_dispatch() -> None:
    run, backend = program()
    assert run.decode(numbers((3, 2)))[0].tolist() == [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]]
    assert backend.calls[-1][0] == (4,)
    with raises("key-missing", match="seq"):
        run.prefill(numbers((3,)))
    with raises("input-shape", match="'x'"):
        run.decode(numbers((3, 5)))


def test_a_program_without_forward_is_not_called_itself() -> None:
    run, backend = program()
    with raises("entry-missing", match="prefill, decode, reset, and none is called forward") as caught:
        run(numbers((4,)))
    assert caught.value.hint == "call program.prefill(...)" and not backend.calls
    run.prefill.watch(None)
    run.watch(None)  # as at the end of a profile
    with raises("entry-missing"):
        run(numbers((4,)))


def test_a_name_that_is_no_entry() -> None:
    run, _ = program()
    with pytest.raises(AttributeError) as missing:
        run.decoed  # noqa: B018
    assert str(missing.value) == (
        "'Program' object has no attribute 'decoed' (did you mean decode?), and the bundle no entry but prefill, decode, reset"
    )
    with pytest.raises(AttributeError, match="'int_kyes', and the bundle no entry but prefill,"):
        run.int_kyes  # noqa: B018
    with pytest.raises(EntryMissing, match=r"no entry 'decoed' \(did you mean decode\?\), but prefill, decode, reset"):
        run["decoed"]
    with pytest.raises(EntryMissing, match="no entry 'x', but prefill, decode, reset"):
        run["x"]
    assert not hasattr(run, "__array__")
    assert issubclass(EntryMissing, KeyError) and issubclass(EntryMissing, CallError)


def test_forward_is_what_the_program_itself_calls() -> None:
    run, _ = program(whole(replace(PREFILL, name=FORWARD), DECODE))
    assert run(numbers((4,)))[0].tolist() == run.forward(numbers((4,)))[0].tolist() == [10.0]
    assert run["forward"] is run and run.decode(numbers((1, 2)))[0].tolist() == [[2.0, 4.0]]


def test_an_only_entry_is_what_the_program_itself_calls() -> None:
    run, _ = program(whole(DECODE))
    assert run(numbers((1, 2)))[0].tolist() == run.decode(numbers((1, 2)))[0].tolist() == [[2.0, 4.0]]
    assert list(run.entries) == ["decode"]


def test_a_view_is_stale_after_a_call_of_another_entry() -> None:
    run, _ = program(outputs="view")
    (y,) = run.decode(numbers((1, 2)))
    assert y.tensor.tolist() == [[2.0, 4.0]]
    run.prefill(numbers((4,)))
    with raises("stale-view", match="output 'y' of call 1 was read after call 2"):
        y.tensor  # noqa: B018


def test_an_entry_keeps_the_session_and_not_the_program() -> None:
    run, backend = program()
    decode, alive = run.decode, weakref.ref(run)
    del run
    assert alive() is None and not backend.closed  # freed at once, without a garbage collection
    assert decode(numbers((1, 2)))[0].tolist() == [[2.0, 4.0]]
    del decode
    gc.collect()
    assert backend.closed == 1


def test_a_closed_program_closes_its_entries() -> None:
    run, _ = program()
    decode = run.decode
    run.close()
    with raises("program-closed", match="tiny"):
        decode(numbers((1, 2)))


def test_a_name_of_the_programs_own_is_reached_by_brackets_alone() -> None:
    run, _ = program()
    assert callable(run.reset) and run.reset is not run["reset"]
    assert "reset" in vars(cgbundle.program.Program)


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_entries_are_written_and_read() -> None:
    assert [row.key for row in all_programs(THREE)] == [(4,), (8,), (1,), (4,), ()]
    assert manifest_json.decode(manifest_text.encode(THREE)) == THREE


def bundle() -> Manifest:
    """Returns a manifest with the entries `prefill` and `decode`, each with its own region."""
    base = tiny_bundle.manifest()
    first = replace(base.entries[0], name="prefill")
    regions = (*base.regions, Region(name="other", kind="host", file="host/other.so"))
    programs = tuple([replace(row, steps=(replace(row.steps[0], region=1),)) for row in first.programs])
    decode = replace(first, name="decode", programs=programs)
    return replace(
        base,
        entries=(first, decode),
        regions=regions,
        files=tuple([support_file(path) for path in (*FILES, "host/other.so", "programs/decode.pt2")]),
    )


FILES = (tiny_bundle.HOST_FILE, "programs/prefill.pt2", file_names.WEIGHTS, file_names.SELF_TEST)


def support_file(path: str) -> archive.File:
    return archive.File(path=path, bytes=1, sha256="0" * 64)


def test_two_entries_are_sound() -> None:
    check_manifest(bundle())
    assert file_names.program_files(bundle()) == ("programs/prefill.pt2", "programs/decode.pt2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prefill", r"entries\[1\].name: 'prefill' occurs twice"),
        ("de code", r"entries\[1\].name: 'de code' is no name"),
        (FORWARD, r"entries\[1\].name: 'forward' is not the first entry"),
    ],
)
def test_names_of_entries(name: str, message: str) -> None:
    manifest = bundle()
    with raises("manifest-invalid", match=message):
        check_manifest(replace(manifest, entries=(manifest.entries[0], replace(manifest.entries[1], name=name))))


def test_too_many_entries() -> None:
    manifest = bundle()
    many = tuple([replace(manifest.entries[0], name=f"e{number}") for number in range(limits.ENTRIES + 1)])
    with raises("manifest-invalid", match="entries: 65, expected 1 to 64"):
        check_manifest(replace(manifest, entries=many))


def test_an_error_names_the_entry() -> None:
    manifest = bundle()
    with raises("manifest-invalid", match=r"^entries\[1\].programs: 0, the dimensions' sizes make 2"):
        check_manifest(replace(manifest, entries=(manifest.entries[0], replace(manifest.entries[1], programs=()))))
    with raises("manifest-invalid", match=r"^entries\[1\].dimensions"):
        broken = replace(manifest.entries[1].dimensions[0], sizes=())
        check_manifest(replace(manifest, entries=(manifest.entries[0], replace(manifest.entries[1], dimensions=(broken,)))))


def test_a_shared_object_is_one_entrys() -> None:
    manifest = bundle()
    both = replace(manifest.entries[1], programs=manifest.entries[0].programs)
    with raises("manifest-invalid", match=r"regions\[0\]: is of two entries, 'prefill' and 'decode'"):
        check_manifest(replace(manifest, entries=(manifest.entries[0], both)))


def test_entries_with_swapped_names_are_refused(tmp_path: object) -> None:
    """Both entries take the same inputs, so only the rows of the shared objects show that the names of the entries are swapped."""
    path = tiny_bundle.write_bundle(tmp_path / "tiny.cgb")  # type: ignore[operator]
    check_bundle(archive.Archive(str(path)))
    base = archive.read_manifest(str(path))
    files = tuple([replace(file, path="programs/other.pt2") if file.path == file_names.PROGRAM else file for file in base.files])
    (path / "programs").mkdir()
    (path / file_names.PROGRAM).rename(path / "programs/other.pt2")
    (path / file_names.MANIFEST).write_bytes(
        manifest_text.encode(replace(edited(base, entries=(replace(base.entries[0], name="other"),)), files=files))
    )
    with pytest.raises(BundleError, match="was compiled for a manifest with other name"):
        check_bundle(archive.Archive(str(path)))
