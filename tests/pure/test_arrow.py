"""cgcompile_cli -> cgcompile -> cgbundle, never back; the runtime runs with everything else absent, and importing it is light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_ban_bans() -> None:
    with pytest.raises(AssertionError, match="typer is banned here"):
        python(BAN + "import typer")


def test_every_module_but_the_gpus_imports_with_everything_else_absent() -> None:
    names = [name for name in MODULES if not name.startswith("cgbundle.cuda.")]
    assert len(names) > 20
    python(BAN + "from importlib import import_module\n" + "".join(f"import_module({name!r})\n" for name in names))


def test_all_names_of_the_package_can_be_had_with_everything_else_absent() -> None:
    python(BAN + "import cgbundle\nfor name in cgbundle.__all__: getattr(cgbundle, name)")


def test_a_bundle_is_read_and_checked_with_everything_else_absent(tmp_path: Path) -> None:
    from tests.helpers.support import write_bundle

    path = write_bundle(tmp_path / "tiny.cgb")
    code = f"from cgbundle.format import archive\nfrom cgbundle.validate import bundle as verify\npath = {str(path)!r}\n"
    python(BAN + code + "verify.check_bundle(path, archive.read_manifest(path), 'full')")


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
    """What would cost a serving process milliseconds at its start and is never needed there."""
    code = "import sys\nimport cgbundle\ncgbundle.load\nimport cgbundle.validate.bundle, cgbundle.cpu.backend, cgbundle.program\nprint(*sys.modules)"
    loaded = set(python(code, "-S").split())
    assert not loaded & {"asyncio", "subprocess", "tempfile", "unittest", "logging", "pathlib", "uuid", "shutil", "zipfile"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    import cgbundle

    with pytest.raises(AttributeError, match="module 'cgbundle' has no attribute 'nothing'"):
        cgbundle.nothing  # noqa: B018


# --- by reading ------------------------------------------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, late imports too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__"):
            found |= {
                part.value.partition(".")[0] for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
    return found


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("path", sources("bundles/cgbundle"), ids=lambda path: path.stem)
def test_the_runtime_imports_nothing_of_the_compilers_anywhere(path: Path) -> None:
    assert not imported(path) & {"cgcompile", "cgcompile_cli", "torch", "triton", "typer", "rich", "safetensors"}


@pytest.mark.parametrize("path", sources("cgcompile"), ids=lambda path: path.stem)
def test_the_compiler_imports_nothing_of_the_command_line(path: Path) -> None:
    assert not imported(path) & {"cgcompile_cli", "typer", "rich"}


def test_the_command_line_is_read_by_these_tests_too() -> None:
    assert {"cgcompile", "cgbundle", "typer"} <= set().union(*map(imported, sources("cli/cgcompile_cli")))
