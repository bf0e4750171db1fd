"""Bundles that the tests of this folder share: building one takes half a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.built import Case


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """A GPT (bf16, Inductor) and a perceptron (fp32, eager); copy a bundle before changing it."""
    from tests.gpu import built

    folder = tmp_path_factory.mktemp("bundles")
    return {"gpt": built.build_gpt(folder), "mlp": built.build_mlp(folder)}
