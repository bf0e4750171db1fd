"""Bundles that the tests of this folder share: building one takes half a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.helpers.built import Case


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """A GPT (bf16, Inductor) and a perceptron (fp32, eager); copy a bundle before changing it."""
    from tests.gpu.helpers import built

    return {"gpt": built.build_gpt(), "mlp": built.build_mlp()}
