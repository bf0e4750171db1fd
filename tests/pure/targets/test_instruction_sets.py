"""The processor features that compiled code needs: the compiler reports them, and they get the kernel's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cgcompile.targets.instruction_sets import ARM_NAMES, LEVELS, check_level, common_level, level_of, macros, needed
from tests.helpers.raising import raises

ZEN4 = """
__SSE3__ __SSSE3__ __SSE4_1__ __SSE4_2__ __SSE4A__ __POPCNT__ __AVX__ __AVX2__ __FMA__ __F16C__ __BMI__ __BMI2__ __LZCNT__ __ABM__
__MOVBE__ __AVX512F__ __AVX512BW__ __AVX512VL__ __AVX512VNNI__ __AVX512BF16__ __AVX512VBMI2__ __AVX512VPOPCNTDQ__ __GFNI__
__PCLMUL__ __VPCLMULQDQ__ __AES__ __VAES__ __SHA__ __ADX__ __CLZERO__ __CLWB__ __RDPID__ __RDRND__ __RDSEED__ __XSAVEOPT__
__PRFCHW__ __FSGSBASE__ __FP_FAST_FMA __LAHF_SAHF__ __GCC_ASM_FLAG_OUTPUTS__
"""
"""Macros that g++ 12 defines for -march=native on an EPYC 9004."""

ZEN4_FLAGS = """
fpu sse sse2 pni ssse3 sse4_1 sse4_2 sse4a popcnt avx avx2 fma f16c bmi1 bmi2 abm movbe avx512f avx512bw avx512vl avx512_vnni
avx512_bf16 avx512_vbmi2 avx512_vpopcntdq gfni pclmulqdq vpclmulqdq aes vaes sha_ni adx clzero clwb rdpid rdrand rdseed xsaveopt
3dnowprefetch fsgsbase lahf_lm
"""

GRAVITON3 = {
    "__ARM_NEON": "1", "__ARM_FEATURE_ATOMICS": "1", "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "1", "__ARM_FEATURE_SVE": "1",
    "__ARM_FEATURE_MATMUL_INT8": "1", "__ARM_FEATURE_AES": "1", "__ARM_FEATURE_SHA2": "1", "__ARM_FEATURE_RNG": "1",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "1", "__ARM_FEATURE_SVE_BITS": "256", "__ARM_FEATURE_UNALIGNED": "1",
}  # fmt: skip
GRAVITON3_FLAGS = "fp asimd aes sha2 atomics fphp asimdhp sve bf16 i8mm svebf16 rng"


def compiler(defines: dict[str, str]) -> Callable[..., dict[str, str]]:
    """Returns a fake compiler: with options it defines the macros `defines`, without options only __SSE2__."""
    return lambda *options: {"__SSE2__": "1"} | (defines if options else {})


def test_code_for_an_epyc_needs_what_compilers_use_and_nothing_else() -> None:
    defines = dict.fromkeys(ZEN4.split(), "1")
    defines.pop("__SSE4A__")  # switched off in compiler.py
    flags = needed(compiler(defines), [("-march=native",)], "x86_64", ZEN4_FLAGS.split())
    assert {"avx512_vbmi2", "avx512_vnni", "avx512_bf16", "avx512_vpopcntdq", "bmi1", "abm", "pni", "gfni", "fma"} <= set(flags)
    assert not {"clzero", "sse4a", "adx", "aes", "sha_ni", "rdpid", "rdrand", "rdseed", "clwb", "xsaveopt", "fsgsbase"} & set(flags)
    assert list(flags) == sorted(flags) and set(flags) <= set(ZEN4_FLAGS.split())


def test_a_set_that_nobody_knew_is_needed_by_its_name() -> None:
    assert needed(compiler({"__AVX10_9_512__": "1"}), [("-march=native",)], "x86_64", ["avx10_9_512"]) == ("avx10_9_512",)


def test_code_for_arm_names_its_sets_and_the_length_of_vectors() -> None:
    flags = needed(compiler(GRAVITON3), [("-mcpu=native",)], "aarch64", GRAVITON3_FLAGS.split())
    assert flags == ("asimd", "asimdhp", "atomics", "bf16", "i8mm", "sve", "sve256")
    others = GRAVITON3 | {"__ARM_FEATURE_SVE_BITS": "0"}
    assert "sve256" not in needed(compiler(others), [("-mcpu=native",)], "aarch64", GRAVITON3_FLAGS.split())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'cc: error: bad value native for -march' >&2; exit 1", "cc: error: bad value native for -march"),
        ("exit 0", "it lists no macros"),
        (None, "No such file"),
    ],
)
def test_a_compiler_that_does_not_answer_fails_the_build(script: str | None, why: str, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o700)
    with raises("compiler-failed", match=rf"cc does not say what its options -march=native mean: .*{why}"):
        macros(str(compiler), "-march=native")


def test_a_compiler_that_warns_has_answered(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho warning >&2\necho '#define A 1'\necho '#define B'\n")
    compiler.chmod(0o700)
    assert macros(str(compiler)) == {"A": "1", "B": ""}


def test_levels_are_each_others_parts() -> None:
    sets = [set(level.features) for level in LEVELS]
    assert sets[0] < sets[1] < sets[2] and level_of("x86-64-v3") is LEVELS[1] and level_of("sm_90") is None


def test_a_level_that_cannot_be_run_here_is_refused() -> None:
    level = LEVELS[1]
    check_level(level, "x86_64", level.features)
    with raises("target-unavailable", match=r"target x86-64-v3: this processor lacks avx2, fma; a build verifies its code"):
        check_level(level, "x86_64", set(level.features) - {"avx2", "fma"})
    with raises("target-unavailable", match=r"target x86-64-v3: the code is for x86_64, and this machine is aarch64"):
        check_level(level, "aarch64", level.features)


def test_a_version_of_arm_is_a_level_of_its_machines_alone() -> None:
    lower, upper = level_of("armv8-a"), level_of("armv8.2-a")
    assert lower is not None and upper is not None and set(lower.features) < set(upper.features) <= set(ARM_NAMES.values()) | {"fp"}
    check_level(upper, "aarch64", upper.features)
    with raises("target-unavailable", match=r"target armv8.2-a: this processor lacks atomics"):
        check_level(upper, "aarch64", set(upper.features) - {"atomics"})
    with raises("target-unavailable", match=r"target armv8-a: the code is for aarch64, and this machine is x86_64"):
        check_level(lower, "x86_64", lower.features)


def test_code_beside_a_gpu_elsewhere_is_for_the_best_level_that_such_machines_have() -> None:
    levels = {row.name: row for row in LEVELS}
    best = levels["x86-64-v4"].features
    for flags, wanted in ((best, "x86-64-v3"), (levels["x86-64-v3"].features, "x86-64-v3"), (best[:8], "x86-64-v2")):
        level = common_level("x86_64", flags)
        assert level is not None and level.name == wanted
    assert common_level("x86_64", ["fpu"]) is None
    assert common_level("aarch64", [*levels["armv8.2-a"].features, "sve"]) == levels["armv8.2-a"]
