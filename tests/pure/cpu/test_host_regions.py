"""How a shared object is opened: which functions of its library are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.cpu import host_region
from cgbundle.cpu.host_region import HostRegion


class Library:
    """Counts calls, all of which succeed."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: object) -> int:
            self.asked.append(name.removeprefix("AOTInductorModelContainer"))
            return 0

        return self.functions.setdefault(name, function)


@pytest.mark.parametrize(
    ("built_with", "version", "asked"),
    [("2.13.0", "", True), ("2.13.1+cpu", "", True), ("2.11.0", "", False), ("2.12.9", "2.13.0", False), ("", "2.13.0", True),
     ("", "2.11.0", False), ("2.14.0", "", False)],
)  # fmt: skip
def test_handles_that_a_container_forgets_are_asked_for(
    built_with: str, version: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only containers of torch 2.13 do not free these handles. Other containers free them, and a second free would end the
    process."""
    library = Library()
    monkeypatch.setattr(host_region, "load_shared_object", lambda data, where, functions: library)
    monkeypatch.setattr(host_region, "version_of", lambda library_: version)
    region = HostRegion(
        b"", SimpleNamespace(threaded=lambda run: run, delete=lambda handle: 0), "host/model.so", built_with=built_with
    )  # type: ignore[arg-type]
    region.bind({})
    assert ("ExtractConstantsMapEntries" in library.asked) == asked
    region._container = None  # type: ignore[assignment]
