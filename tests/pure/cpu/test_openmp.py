"""How OpenMP's threads wait: the runtime sets it while the library is loaded, unless the user has set it."""

from __future__ import annotations

import ctypes
import os

import pytest

from cgbundle.cpu import libtorch


@pytest.mark.parametrize(
    ("variables", "seen"),
    [({}, str(libtorch.SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["nothing", "count", "policy"],
)
def test_the_setting_is_there_while_the_library_is_loaded(
    variables: dict[str, str], seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in libtorch.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spin_counts: list[str | None] = []

    def load(path: str, mode: int = 0) -> None:
        spin_counts.append(os.environ.get("GOMP_SPINCOUNT"))
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(OSError):
        libtorch._loaded("libgomp.so.1")
    assert spin_counts == [seen] and os.environ.get("GOMP_SPINCOUNT") == variables.get("GOMP_SPINCOUNT")
