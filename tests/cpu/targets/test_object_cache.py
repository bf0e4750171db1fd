"""The cache of compiled shared objects: an object is used again if all that affects it is equal; in doubtful cases the compiler
runs again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.export import Dim, ExportedProgram

from cgcompile.targets.cpu import object_cache
from cgcompile.targets.cpu.aoti import Compiled
from cgcompile.targets.instruction_sets import Level, level_of
from cgcompile.targets.program_contents import program_contents
from tests.helpers.raising import raises

Build = Callable[..., Compiled]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def exported(module: nn.Module | None = None, rows: int = 3, high: int = 8) -> ExportedProgram:
    inputs = (torch.ones(rows, 4),)
    return torch.export.export(module or model(), inputs, dynamic_shapes=({0: Dim("batch", min=1, max=high)},))


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Returns a function that builds with a logging compiler; every call has its own folder."""
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    number = 0

    def compiled(
        program: ExportedProgram,
        work: Path,
        tell: object,
        shared: object,
        changing: bool,
        level: Level | None,
        interface: object,
        standalone: bool,
    ) -> Compiled:
        (work / "model.so").write_bytes(f"{shared} {changing} {level} {standalone}".encode())
        return Compiled(path=work / "model.so", features=("avx2",), standalone=False)

    monkeypatch.setattr(object_cache, "compile_cpu", compiled)

    def run(
        program: ExportedProgram,
        shared: list[int] | None = None,
        changing: bool = False,
        level: Level | None = None,
        standalone: bool | None = False,
    ) -> Compiled:
        nonlocal number
        number += 1
        (work := tmp_path / str(number)).mkdir()
        about = program, program_contents([program])[id(program)], shared or [], changing, level, standalone
        known = object_cache.recalled(object_cache.kept_at(*about), work)
        return known or object_cache.compiled_and_kept(*about, work, None, lambda text: None)

    return run


def test_what_inductor_notes_in_its_options_does_not_matter(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first compilation of a process adds an entry to Inductor's options. Before the fix, the next build treated it as another
    option."""
    build(exported())
    monkeypatch.setitem(config.aot_inductor.metadata, "AOTI_DEVICE_KEY", "other")
    assert build(exported()).recalled


def entry(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "host").iterdir()
    return path


def test_the_same_program_is_compiled_once(build: Build) -> None:
    first, second = build(exported()), build(exported())
    assert (first.recalled, second.recalled) == (False, True)
    assert second.path != first.path and second.path.read_bytes() == first.path.read_bytes() and second.features == ("avx2",)


def other_weight() -> ExportedProgram:
    with torch.no_grad():
        (changed := model())[0].bias[1] += 1
    return exported(changed)


def other_operator() -> ExportedProgram:
    return exported(nn.Sequential(model()[0], nn.GELU()))


OTHERS = {
    "weight": other_weight,
    "operator": other_operator,
    "example": lambda: exported(rows=5),
    "range": lambda: exported(high=9),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_program_is_compiled(build: Build, other: Callable[[], ExportedProgram]) -> None:
    build(exported())
    assert not build(other()).recalled


@pytest.mark.parametrize(
    "options",
    [([0],), ([], True), ([], False, level_of("x86-64-v2")), ([], False, None, True)],
    ids=["shared", "changing", "level", "standalone"],
)
def test_other_options_compile(build: Build, options: tuple[object, ...]) -> None:
    build(exported())
    assert not build(exported(), *options).recalled and build(exported(), *options).recalled


def test_another_machine_or_setting_compiles(build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    build(exported())
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setattr(object_cache, "processor_name", lambda: "another"),
        lambda patch: patch.setattr(object_cache, "processor_flags", lambda: frozenset({"avx"})),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
        lambda patch: patch.setattr(torch, "__version__", "2.99"),
        lambda patch: patch.setenv("CXX", "/bin/true"),
        lambda patch: patch.setenv("ATEN_CPU_CAPABILITY", "avx2"),
    ]
    for number, change in enumerate(changes):
        with monkeypatch.context() as patch:
            change(patch)
            assert not build(exported()).recalled, number
    with torch._inductor.config.patch(epilogue_fusion=False):
        assert not build(exported()).recalled
    assert build(exported()).recalled


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


ODD: dict[str, Callable[[Path], None]] = {
    "damaged": damage,
    "of others' writing": lambda path: path.chmod(0o666),
    "a link": link,
    "cut short": cut,
}


@pytest.mark.parametrize("spoil", ODD.values(), ids=ODD)
def test_what_is_odd_is_compiled_again(build: Build, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    build(exported())
    spoil(entry(tmp_path))
    assert not build(exported()).recalled


def test_a_folder_that_others_can_write_to_is_refused(build: Build, tmp_path: Path) -> None:
    build(exported())
    (tmp_path / "cache").chmod(0o777)
    with raises("cache-unsafe", match="others can write"):
        build(exported())


def test_without_a_cache_it_is_compiled(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "file" / "cache"))
    assert not build(exported()).recalled and not build(exported()).recalled
    assert os.listdir(tmp_path).count("cache") == 0
