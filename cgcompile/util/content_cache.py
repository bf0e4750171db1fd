"""Results kept by content between builds: a folder of files named by the hash of all that a result depends on.  A file is the
SHA-256 of a pickle and the pickle.  The folder is the user's own (`offline.build.cache_folder`)."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cgbundle

PACKAGES = (Path(__file__).parents[1], Path(cgbundle.__file__).parent)


def cache_path(folder: Path, stage: str, *parts: object, code: bool = True) -> Path:
    """The file for what a stage makes of `parts`, by torch, Triton, and (with `code`) this code of the compiler and the runtime."""
    return folder / stage / digest(*parts, _version("triton"), _version("torch"), _sources() if code else "")


def digest(*parts: object) -> str:
    """The hash of values by their `repr`, of bytes as they are."""
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        whole.update(b"bytes" if isinstance(part, bytes) else b"value")
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def sources(folders: Iterable[Path]) -> str:
    """The hash of the code in folders."""
    return digest(*(path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py"))))


@cache
def _sources() -> str:
    return sources(PACKAGES)


def recall(path: Path) -> Any:
    """What `remember` wrote, or None when there is nothing, or something damaged: it is made again."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    return pickle.loads(data[32:])


def remember(path: Path, result: object) -> None:
    """Keeps a result; another process that asks meanwhile finds nothing or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pickle.dumps(result)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        file.write(hashlib.sha256(data).digest() + data)
    os.replace(file.name, path)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
