"""Bundles that the tests of this folder share, because a build takes half a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.helpers.built import Case


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """Returns a GPT (bf16, Inductor) and an MLP (fp32, eager). Copy a bundle before you change it."""
    from tests.gpu.helpers import built

    return {"gpt": built.build_gpt(), "mlp": built.build_mlp()}
