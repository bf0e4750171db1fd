"""The import graph of the project's packages. It includes late imports and those under TYPE_CHECKING."""

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
    """Returns the file of every module by its dotted name; for a package, its __init__.py."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in PACKAGES.values()
        for path in sorted(folder.rglob("*.py"))
    }


@cache
def graph() -> dict[str, set[str]]:
    """Returns, for every module of the project, the modules of the project that it imports."""
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
