"""The imports of our packages as a graph of modules: late ones and those of TYPE_CHECKING included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.helpers.places import ROOT

PACKAGES = {
    "cgbundle": ROOT / "bundles/cgbundle", "cgserve": ROOT / "bundles/cgserve", "cgcompile": ROOT / "cgcompile",
    "cgcompile_cli": ROOT / "cli/cgcompile_cli",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """The file of every module of ours, by its dotted name; a package's is its __init__.py."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in PACKAGES.values()
        for path in sorted(folder.rglob("*.py"))
    }


@cache
def graph() -> dict[str, set[str]]:
    """The modules of ours that every module of ours imports."""
    return {name: set(_ours(name, path)) - {name} for name, path in modules().items()}


def _ours(name: str, path: Path) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*outer, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from [module_name for module_name in (f"{base}.{alias.name}", base) if module_name in modules()][:1]
