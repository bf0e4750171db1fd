"""Variants: several manifests in one text, and the variant that a machine takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.format import limits
from cgbundle.format.manifest_json import Variants, _joined, decode
from cgbundle.format.schema import Manifest, Target
from cgbundle.format.variants import check_variants, fitting_variant, named_variant, variant_name
from cgcompile.bundle.manifest_text import _common, encode
from tests.helpers.bundles.fabricate import seal_plain
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.raising import raises

V3, V4 = (
    Target(kind="cpu", arch="x86_64", level=f"x86-64-v{n}", features=flags)
    for n, flags in ((3, ("avx2",)), (4, ("avx2", "avx512f")))
)
SM_80, SM_90A, ARM = Target(kind="cuda", arch="sm_80"), Target(kind="cuda", arch="sm_90a"), Target(kind="cpu", arch="aarch64")
ALL = (SM_80, SM_90A, V3, V4, ARM)


def variants() -> tuple[Manifest, ...]:
    """Returns the tiny bundle's manifest for two levels, and for processors that need torch."""
    base = manifest()
    (program, other) = base.entries[0].programs
    longer = replace(base.entries[0], programs=(program, replace(other, arena=0, steps=other.steps)))
    return tuple([replace(base, target=target, entries=(longer,)) for target in (V3, V4, base.target)])


def test_a_text_has_what_is_equal_once() -> None:
    manifests = variants()
    text = encode(*manifests)
    read = Variants(text)
    assert len(read) == 3 and tuple([read.manifest(number) for number in range(3)]) == manifests and decode(text) == manifests[0]
    assert read.targets() == tuple([manifest.target for manifest in manifests])
    assert len(text) < len(encode(manifests[0])) + 600 and text.count(b'"programs"') == 1
    plain = json.loads(text)
    assert plain["variants"][0] == {"target": {"features": ["avx2"], "level": "x86-64-v3"}} and "kind" in plain["target"]


def test_one_manifest_is_no_variant() -> None:
    text = encode(manifest())
    assert b'"variants"' not in text and len(Variants(text)) == 1


@pytest.mark.parametrize(
    ("rests", "message"),
    [
        ([], "expected a list of 2 to 32"), ([{}], "expected a list of 2 to 32"), ({}, "expected a list"),
        ([{}] * (limits.VARIANTS + 1), "expected a list of 2 to 32"), ([{}, 7], r"variants\[1\]: must be an object"),
        ([{}, {"entries": []}], r"variants\[1\]\.entries: must be an object, or a list as long"),
        ([{}, {"name": "x"}], r"variants\[1\]\.name"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_variants(rests: Any, message: str) -> None:
    plain = json.loads(encode(manifest()))
    with raises("manifest-invalid", match=message):
        Variants(seal_plain(plain | {"variants": rests}))


LEAVES = st.none() | st.booleans() | st.integers(0, 2) | st.just(1.0) | st.text("ab", max_size=1)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=2, max_size=4))
def test_every_variant_is_what_all_have_and_what_it_has_besides(values: list[Any]) -> None:
    common, rests = _common(values)
    for value, rest in zip(values, rests, strict=True):
        joined = _joined({} if common is ... else common, {} if rest is ... else rest, "v")
        assert json.dumps(joined, sort_keys=True) == json.dumps(value, sort_keys=True)  # tells 1, 1.0 and true apart


def test_names() -> None:
    assert [variant_name(target) for target in ALL] == ["sm_80", "sm_90a", "x86-64-v3", "x86-64-v4", "aarch64"]
    assert named_variant(ALL, "x86-64-v3") == 2
    with raises("option-refused", match=r"variant='sm_91': the bundle has the variants sm_80, .*did you mean"):
        named_variant(ALL, "sm_91")
    with raises("option-refused", match="variant='sm_90': the bundle has x86-64-v3"):
        named_variant((V3,), "sm_90")


@pytest.mark.parametrize(
    ("gpu", "machine", "flags", "expected"),
    [
        ("sm_80", "x86_64", {"avx2", "avx512f"}, SM_80), ("sm_90", "x86_64", {"avx2"}, SM_90A), ("sm_100", "x86_64", {"avx2"}, V3),
        ("", "x86_64", {"avx2", "avx512f", "more"}, V4), ("", "x86_64", {"avx2"}, V3), ("", "aarch64", set(), ARM),
    ],
)  # fmt: skip
def test_a_machine_takes_its_gpus_or_the_most_of_its_processor(gpu: str, machine: str, flags: set[str], expected: Target) -> None:
    assert ALL[fitting_variant(ALL, gpu, machine, flags)] is expected
    assert ALL[::-1][fitting_variant(ALL[::-1], gpu, machine, flags)] is expected


def test_a_machine_for_which_there_is_none() -> None:
    with raises(
        "wrong-machine", match="there are sm_80, sm_90a, x86-64-v3, x86-64-v4, aarch64; it has no GPU, and its processor lacks"
    ):
        fitting_variant(ALL, "", "x86_64", {"sse2"})
    with raises("wrong-machine", match="its GPU is sm_75"):
        fitting_variant((SM_80,), "sm_75", "x86_64", ())


def test_variants_fit_together() -> None:
    first, second, third = variants()
    check_variants((first, second, third))
    for changed, message in (
        (replace(second, target=first.target), "a second variant for x86-64-v3"),
        (replace(second, name="other"), "another name"),
        (replace(second, files=second.files[:-1] if second.files else (*second.files, None)), "other files"),
        (replace(second, entries=(replace(second.entries[0], name="other"),)), "have other names"),
        (replace(second, weights=(replace(second.weights[0], memory="state"), *second.weights[1:])), "other state"),
    ):
        with raises("manifest-invalid", match=rf"^variants\[1\]\..*{message}|^variants\[1\]: .*{message}"):
            check_variants((first, changed, third))
