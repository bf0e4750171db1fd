"""Packages import only cgcompile_cli -> cgcompile -> cgbundle and cgcompile_cli -> cgserve -> cgbundle, and inside each package
only downwards. The runtime runs without everything else, and importing it is cheap."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.imports import PACKAGES, graph
from tests.helpers.places import ROOT

BANNED = ("torch", "numpy", "triton", "typer", "rich", "cgcompile", "cgcompile_cli", "safetensors", "ml_dtypes", "cupy", "cuda")
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "bundles").with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "bundles/cgbundle").rglob("*.py")
)

BAN = f"""
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BANNED!r}:
            raise ModuleNotFoundError(f"{{name}} is banned here", name=name)
sys.meta_path.insert(0, Ban())
"""


def python(code: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={"PYTHONPATH": str(ROOT / "bundles")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ban_of_imports_works() -> None:
    with pytest.raises(AssertionError, match="typer is banned here"):
        python(BAN + "import typer")


def test_every_module_but_the_gpus_imports_with_everything_else_absent() -> None:
    names = [name for name in MODULES if not name.startswith(("cgbundle.cuda.", "cgbundle.gpu."))]
    assert len(names) > 20
    python(BAN + "from importlib import import_module\n" + "".join(f"import_module({name!r})\n" for name in names))


def test_all_names_of_the_package_can_be_had_with_everything_else_absent() -> None:
    python(BAN + "import cgbundle\nfor name in cgbundle.__all__: getattr(cgbundle, name)")


def test_a_bundle_is_read_and_checked_with_everything_else_absent(tmp_path: Path) -> None:
    from tests.helpers.bundles.tiny_bundle import write_bundle

    path = write_bundle(tmp_path / "tiny.cgb")
    code = f"from cgbundle.format import archive\nfrom cgbundle.validate import bundle as verify\npath = {str(path)!r}\n"
    python(BAN + code + "verify.check_bundle(archive.Archive(path), 'full')")


def test_importing_the_runtime_is_light_and_the_standard_librarys() -> None:
    code = """
import sys
before = set(sys.modules)
import cgbundle
import json
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = set(json.loads(python("import json, typing\n" + code, "-S")))
    assert {name for name in loaded if name.startswith("cgbundle")} == {"cgbundle", "cgbundle.errors"}
    assert {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"cgbundle"}
    assert len(loaded) < 12, sorted(loaded)


def test_loading_needs_no_more_of_the_standard_library_than_it_uses() -> None:
    """These modules would cost a serving process milliseconds at its start, and it never needs them there."""
    modules = "cgbundle.validate.bundle, cgbundle.cpu.backend, cgbundle.program"
    code = f"import sys\nimport cgbundle\ncgbundle.load\nimport {modules}\nprint(*sys.modules)"
    loaded = set(python(code, "-S").split())
    unused = {
        "asyncio",
        "dataclasses",
        "inspect",
        "logging",
        "pathlib",
        "shutil",
        "subprocess",
        "tempfile",
        "unittest",
        "uuid",
        "zipfile",
    }
    assert not loaded & unused


def test_a_context_begins_before_anything_slow_is_imported() -> None:
    """Imports before the creation of the context delay the first answer; imports during it do not."""
    loaded = set(python("import sys, cgbundle\ncgbundle.load\nimport cgbundle.cuda.driver\nprint(*sys.modules)", "-S").split())
    assert "ctypes" in loaded
    assert not loaded & {"typing", "re", "enum", "collections", "functools", "contextlib", "threading", "dataclasses", "json"}
    ours = {".".join(name.split(".")[1:]) for name in loaded if name.partition(".")[0] == "cgbundle"}
    assert ours == {"", "cuda", "cuda.driver", "cuda.libcuda", "errors", "loader", "process"}


def test_dir_shows_the_public_names_alone() -> None:
    import cgbundle

    assert dir(cgbundle) == sorted(cgbundle.__all__)


def test_a_typed_script_uses_every_public_name() -> None:
    """`make check` checks that script with `mypy --strict`."""
    import cgbundle

    used = (ROOT / "tests/typed/serving.py").read_text(encoding="utf-8")
    assert [name for name in cgbundle.__all__ if not re.search(rf"\b{name}\b", used)] == []
    assert (ROOT / "bundles/cgbundle/py.typed").exists()


def test_an_unknown_name_is_an_attribute_error() -> None:
    import cgbundle

    with pytest.raises(AttributeError, match="module 'cgbundle' has no attribute 'nothing'"):
        cgbundle.nothing  # noqa: B018


# --- by reading ------------------------------------------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports anywhere, also late."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            packages.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__"):
            packages |= {
                part.value.partition(".")[0] for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
    return packages


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("path", sources("bundles/cgbundle"), ids=lambda path: path.stem)
def test_the_runtime_imports_nothing_of_the_compilers_anywhere(path: Path) -> None:
    assert not imported(path) & {"cgcompile", "cgcompile_cli", "torch", "triton", "typer", "rich", "safetensors"}


@pytest.mark.parametrize("path", sources("cgcompile"), ids=lambda path: path.stem)
def test_the_compiler_imports_nothing_of_the_command_line(path: Path) -> None:
    assert not imported(path) & {"cgcompile_cli", "typer", "rich"}


@pytest.mark.parametrize("path", sources("bundles/cgserve"), ids=lambda path: path.stem)
def test_the_servers_import_nothing_of_the_compilers_anywhere(path: Path) -> None:
    assert not imported(path) & {"cgcompile", "cgcompile_cli", "torch", "triton", "typer", "rich", "transformers"}


@pytest.mark.parametrize("package", ["cgbundle", "cgcompile"])
def test_nothing_below_imports_the_servers(package: str) -> None:
    assert "cgserve" not in set().union(*map(imported, sources(str(PACKAGES[package].relative_to(ROOT)))))


def test_the_command_line_is_read_by_these_tests_too() -> None:
    assert {"cgcompile", "cgbundle", "typer"} <= set().union(*map(imported, sources("cli/cgcompile_cli")))


# --- layers ----------------------------------------------------------------------------------------------------------

LAYERS = {
    "cgbundle": (
        "catalogue", "errors", "process", "format", "signatures", "tensors", "validate", "call", "cuda", "cpu", "gpu", "program",
        "loader", "self_test",
    ),
    "cgserve": (
        "log", "transport", "batching", "tensors", "scheduling", "restrictions", "language", "text", "models", "routes", "settings",
        "application", "serving", "ray_replicas",
    ),
    "cgcompile": (
        "errors", "util", "model", "export", "transforms", "checks", "partition", "bundle",
        "targets", "targets.cpu", "targets.cuda", "capture", "offline", "language_models",
        "pipeline", "tools",
    ),
    "cgcompile_cli": (
        "output", "signals", "errors", "int_keys", "estimates", "progress", "summary", "benchmark", "inspection", "page", "options",
        "commands", "main", "__main__",
    ),
}  # fmt: skip
"""The contents of every package from the bottom up. A module imports only from its own layer and earlier ones, also late. The
package itself, which exports names of all, is above them."""

ENTRIES, DEPTH = 14, 3
"""The largest number of files and folders in a folder, and the largest depth of folders below the repository's root."""


def layer(module: str) -> int:
    """Returns the place of a module in its package's order."""
    package, _, rest = module.partition(".")
    places = [place for place, name in enumerate(LAYERS[package]) if rest == name or rest.startswith(f"{name}.")]
    assert places or not rest, f"{module} is in no layer"
    return places[-1] if rest else len(LAYERS[package])


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_downwards_alone(package: str) -> None:
    assert not [
        f"{module} -> {target}"
        for module, imports in graph().items()
        for target in sorted(imports)
        if module.partition(".")[0] == target.partition(".")[0] == package and layer(target) > layer(module)
    ]


def test_no_module_imports_itself_through_others() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_every_layer_is_there() -> None:
    for package, names in LAYERS.items():
        assert [name for name in names if not any(module == f"{package}.{name}" for module in graph())] == []


@pytest.mark.parametrize("folder", list(PACKAGES.values()), ids=PACKAGES)
def test_a_folder_holds_a_dozen_entries_and_lies_three_deep(folder: Path) -> None:
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        entries = {path.name for path in directory.iterdir()} - {"__init__.py", "py.typed", "README.md", "__pycache__"}
        assert len(entries) <= ENTRIES and len(directory.relative_to(ROOT).parts) <= DEPTH, f"{directory}: {sorted(entries)}"


def test_cycles_and_upward_imports_are_detected() -> None:
    """Tests of the tests above: they also check imports inside functions and under TYPE_CHECKING."""
    assert "cgcompile.pipeline.api" in graph()["cgcompile"] and "cgbundle.loader" in graph()["cgbundle"]
    assert layer("cgcompile.targets.cuda.steps") > layer("cgcompile.targets.choice") > layer("cgcompile.partition")
