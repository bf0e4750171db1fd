"""A shared object's constants are compared with the weights that a bundle binds to them. A fake library replaces the object."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.cpu.host_region import HostRegion
from cgbundle.format.schema import Weight
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.raising import raises

FLOAT32, INT32 = 6, 3
CONSTANTS = [("model_w", "model.first.weight", FLOAT32, 64), ("rng", "first.bias", FLOAT32, 64)]
"""(name in the code, name in the model, dtype, bytes) of each constant that the code needs."""

WEIGHT, BIAS, _ = manifest().weights


def region(constants: list[tuple[str, str, int, int]]) -> HostRegion:
    """Returns a host region over a library that reports `constants`."""

    def tell(place: int) -> Any:
        def function(container: object, index: Any, pointer: Any) -> int:
            pointer._obj.value = constants[index.value][place]
            return 0

        return function

    host_region = object.__new__(HostRegion)
    host_region._library = SimpleNamespace(  # type: ignore[assignment]
        AOTInductorModelContainerGetConstantDtype=tell(2), AOTInductorModelContainerGetConstantDataSize=tell(3)
    )
    host_region._torch = SimpleNamespace(dtype={"float32": FLOAT32, "int32": INT32}.__getitem__)  # type: ignore[assignment]
    host_region._where, host_region._container = "host/model.so", None  # type: ignore[assignment]
    host_region.constants = lambda: [(name, model) for name, model, *_ in constants]  # type: ignore[method-assign]
    return host_region


def check(*bound: tuple[str, Weight], constants: list[tuple[str, str, int, int]] = CONSTANTS) -> None:
    region(constants).check_constants(bound)


SOUND = (("model_w", WEIGHT), ("rng", BIAS))


def test_each_constant_once_in_any_order() -> None:
    check(*SOUND)
    check(*SOUND[::-1])
    check(constants=[])


def test_the_name_in_the_model_may_have_the_prefix_or_not() -> None:
    named = replace(WEIGHT, name="model.first.weight")
    check(("a", named), constants=[("a", "model.model.first.weight", FLOAT32, 64)])
    with raises("library-refused", match=r"'a' is weight 'first\.weight' in the code, but 'model\.first\.weight' in the manifest"):
        check(("a", named), constants=[("a", "model.first.weight", FLOAT32, 64)])


@pytest.mark.parametrize(
    ("bound", "problem"),
    [
        ((), "'model_w' of the code is not bound"),
        (SOUND[:1], "'rng' of the code is not bound"),
        ((*SOUND, ("more", BIAS)), "'more' is bound, but the code has no such constant"),
        ((SOUND[0], ("gnr", BIAS)), "'gnr' is bound, but the code has no such constant"),
        ((*SOUND, SOUND[1]), "'rng' is bound twice"),
    ],
)
def test_a_constant_too_many_or_too_few(bound: Any, problem: str) -> None:
    with raises("library-refused", match=f"^host/model.so: constant {problem}$"):
        check(*bound)


def test_weights_are_not_exchanged() -> None:
    with raises("library-refused", match=r"'model_w' is weight 'first\.weight' in the code, but 'first\.bias' in the manifest"):
        check(("model_w", BIAS), ("rng", WEIGHT))


@pytest.mark.parametrize(
    ("floats", "sizes", "fits"),
    [(16, 64, True), (17, 64, False), (17, 128, True), (16, 128, True), (0, 0, True), (1, 0, False), (16, 4096, True)],
)
def test_a_weight_is_no_larger_than_its_storage_was_rounded_up_to_64_bytes(floats: int, sizes: int, fits: bool) -> None:
    row = replace(BIAS, shape=(floats,))
    constants = [("rng", "first.bias", FLOAT32, sizes)]
    if fits:
        check(("rng", row), constants=constants)
        return
    with raises(
        "library-refused",
        match=rf"size in the code \({sizes} bytes\) than in the manifest \(float32 \[{floats}\]\)",
    ):
        check(("rng", row), constants=constants)


def test_a_part_of_a_larger_storage() -> None:
    """A part may be smaller than the bytes that the code reports, but never larger."""
    check(("rng", BIAS), constants=[("rng", "first.bias", FLOAT32, 4096)])
    with raises("library-refused", match="another dtype or size"):
        check(("rng", replace(BIAS, shape=(1025,))), constants=[("rng", "first.bias", FLOAT32, 4096)])


def test_another_dtype() -> None:
    with raises("library-refused", match="'rng' has another dtype"):
        check(SOUND[0], ("rng", replace(BIAS, dtype="int32")))
