"""The table of targets: the rules for each row, and the refusal of an unknown name."""

from __future__ import annotations

import pytest

from cgcompile.targets.architectures import ARCHES, KIB, Arch, arch
from tests.helpers.raising import raises


@pytest.mark.parametrize("row", ARCHES, ids=lambda row: row.name)
def test_every_row_is_consistent(row: Arch) -> None:
    assert arch(row.name) is row
    assert row.name == f"sm_{row.capability}"
    assert row.shared_block < row.shared_optin < row.shared_sm
    assert row.threads_sm % row.warp == 0 and row.threads_block <= row.threads_sm
    assert row.l2 < row.memory and row.source


def test_known_values() -> None:
    """These values come from the table in the CUDA C++ Programming Guide. The other fields of a row are derived from them."""
    assert (arch("sm_80").shared_optin, arch("sm_80").threads_sm) == (163 * KIB, 2048)
    assert (arch("sm_86").shared_optin, arch("sm_86").threads_sm) == (99 * KIB, 1536)
    assert (arch("sm_90").shared_optin, arch("sm_90").multiprocessors) == (227 * KIB, 132)
    assert (arch("sm_100").major, arch("sm_100").minor, arch("sm_120").capability) == (10, 0, 120)


def test_unknown() -> None:
    with raises("target-unavailable", match="'sm_75'") as caught:
        arch("sm_75")
    assert all(row.name in caught.value.hint for row in ARCHES)
