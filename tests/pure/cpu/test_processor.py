"""The features of this machine's processor, and the refusal of code that needs others."""

from __future__ import annotations

import pytest

from cgbundle.cpu import machine as processor
from cgbundle.cpu.machine import HINT, check_features, processor_flags
from tests.helpers.raising import raises


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset({"avx", "fma"}))
    check_features(("avx",), HINT)
    with raises("wrong-machine", match=r"this processor lacks avx2, avx512f, which the bundle's code uses") as caught:
        check_features(("avx512f", "avx", "avx2"), HINT)
    assert "--target x86-64-v3" in caught.value.hint


def test_vectors_of_another_length_are_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_first", lambda *names: "fp asimd sve")
    monkeypatch.setattr(processor, "_vector_bytes", lambda: 16)
    assert processor_flags() == {"fp", "asimd", "sve", "sve128"}
    with raises("wrong-machine", match=r"lacks sve256"):
        check_features(("asimd", "sve", "sve256"))


def test_what_no_compiler_writes_by_itself_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So processors that differ only in such features run the same bundles."""
    monkeypatch.setattr("cgbundle.cpu.machine.processor_flags", lambda: frozenset({"avx2"}))
    check_features(("avx2", "rdseed", "clwb"))
    with raises("wrong-machine", match="this processor lacks avx512f, which"):
        check_features(("avx2", "rdseed", "avx512f"))
