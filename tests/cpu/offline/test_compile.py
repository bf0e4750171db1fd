"""Kernels are compiled for GPUs that this machine does not have, and cached by content. The parameters of a launch are read from
their images."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.lowered_programs import assembled
from tests.helpers.raising import raises

pytest.importorskip("triton")

from cgbundle.format.table import Table
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as tables
from cgcompile.offline.assemble.arena import plan
from cgcompile.offline.assemble.plan_check import check_plan
from cgcompile.offline.compile import kernels
from cgcompile.offline.compile.cubin_info import read_kernel_info
from cgcompile.offline.compile.kernels import CompiledKernel, KernelImage, compile_variants, finish
from cgcompile.offline.compile.packed_adds import split_packed_adds
from cgcompile.offline.compile.worker import first_line
from cgcompile.offline.lowered import INPUT, TEMPORARY, WEIGHT, Buffer, BufferView, KernelVariant, Launch, Lowered, Pointer
from cgcompile.targets.cuda.elf import Cubin, Symbol, read_cubin

LIMIT = 232448
"""Shared memory of a block on sm_90."""

ADD = """def add(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i, i < n) + tl.load(b + i, i < n), i < n)
"""

SOFTMAX = """def softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, i < columns, -float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * columns + i, e / tl.sum(e, 0), i < columns)
"""

MATMUL = """def matmul(a, b, c, K, M: tl.constexpr, STEP: tl.constexpr):
    i = tl.arange(0, M)
    k = tl.arange(0, STEP)
    total = tl.zeros((M, M), tl.float32)
    for start in range(0, K, STEP):
        x = tl.load(a + i[:, None] * K + start + k[None, :])
        y = tl.load(b + (start + k)[:, None] * M + i[None, :])
        total = tl.dot(x, y, total)
    tl.store(c + i[:, None] * M + i[None, :], total)
"""

PADDED = """def padded(x, w, out):
    m = (tl.program_id(0) * 32 + tl.arange(0, 32)) % 256
    k = tl.arange(0, 32)
    n = tl.arange(0, 16)
    total = tl.zeros((32, 16), tl.float32)
    for step in range(0, 3):
        i = k[None, :] + step * 32
        row = (m // 16)[:, None] - 1 + (i // 24) % 3
        column = (m % 16)[:, None] - 1 + (i // 8) % 3
        inside = (row >= 0) & (row < 16) & (column >= 0) & (column < 16) & (i < 72)
        a = tl.load(x + (8 * m[:, None] - 136 + 128 * ((i // 24) % 3) + i % 24), inside, other=0.0)
        b = tl.load(w + (k[:, None] + step * 32 + 96 * n[None, :]))
        total += tl.dot(tl.where(inside, a + 1, 0.0), b, input_precision="tf32x3")
    tl.store(out + (16 * m[:, None] + n[None, :]), total)
"""
"""A padded 3 x 3 convolution over 8 channels as a product: LLVM computes its indices in pairs of 16 bits."""

NUMBERS = """def numbers(out, flag, small, n, scale, half, brain, double, wide):
    i = tl.arange(0, 16)
    y = scale + half.to(tl.float32) + brain.to(tl.float32) + double.to(tl.float32) + wide.to(tl.float32)
    tl.store(out + i, y + flag.to(tl.float32) + small, i < n)
"""

INDUCTORS = """def inductors(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = triton_helpers.maximum(tl.load(x + i, i < n), 0.5)
    tl.device_assert(v < 9, "too large")
    tl.store(out + i, libdevice.rsqrt(v) + tl_math.sin(v), i < n)
"""


def variant(
    source: str,
    signature: Sequence[tuple[str, str]],
    divisible: tuple[str, ...] = (),
    warps: int = 4,
    options: tuple[tuple[str, int | bool], ...] = (),
    **constants: int,
) -> KernelVariant:
    return KernelVariant(
        name=source[4 : source.index("(")],
        source=source,
        signature=(*signature, *((name, "constexpr") for name in constants)),
        constants=tuple(constants.items()),
        divisible=divisible,
        warps=warps,
        stages=3,
        options=options,
        selected_by="only",
    )


FLOATS = [("a", "*fp32"), ("b", "*fp32"), ("out", "*fp32"), ("n", "i32")]
add = variant(ADD, FLOATS, ("a", "b", "out"), BLOCK=256)
softmax = variant(SOFTMAX, [("x", "*fp32"), ("out", "*fp32"), ("columns", "i32")], ("x", "out"), warps=8, BLOCK=1024)
matmul = variant(MATMUL, [("a", "*fp16"), ("b", "*fp16"), ("c", "*fp32"), ("K", "i32")], ("a", "b", "c", "K"), M=128, STEP=64)
numbers = variant(
    NUMBERS,
    [
        ("out", "*fp32"), ("flag", "i1"), ("small", "i16"), ("n", "i32"), ("scale", "fp32"), ("half", "fp16"), ("brain", "bf16"),
        ("double", "fp64"), ("wide", "i64"),
    ],
)  # fmt: skip
inductors = variant(
    INDUCTORS, [("x", "*fp32"), ("out", "*fp32"), ("n", "i32")], options=(("debug", True), ("sanitize_overflow", False)), BLOCK=64
)


def compile_all(
    variants: Sequence[KernelVariant], cache: Path, arch: str = "sm_90", limit: int = LIMIT
) -> tuple[CompiledKernel, ...]:
    return compile_variants(variants, arch, shared_limit=limit, cache=cache, tell=lambda text: None)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the kernel cache of the tests of this file."""
    return tmp_path_factory.mktemp("kernels")


# --- images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_are_compiled_without_a_gpu(arch: str, cache: Path) -> None:
    compiled_kernels = compile_all([add, softmax, matmul], cache, arch)
    assert [kernel.symbol for kernel in compiled_kernels] == ["add", "softmax", "matmul"]
    assert [kernel.threads for kernel in compiled_kernels] == [128, 256, 128]
    for kernel, source in zip(compiled_kernels, (add, softmax, matmul), strict=True):
        assert read_cubin(kernel.image).functions == {kernel.symbol}
        assert kernel.params == tuple((type_, name) for name, type_ in source.signature if type_ != "constexpr")
        assert kernel.scratch_pointers == 2
        assert len(kernel.layout) == len(kernel.params) + 2
        assert kernel.cluster == (1, 1, 1)
        # e_flags: the architecture is in the low byte up to ptxas 12, in the second byte from 13 on
        assert int(arch[3:]) in (kernel.image[48], kernel.image[49])
    # tiles of three stages; on sm_90, shared memory holds those of two
    assert compiled_kernels[2].shared >= 2 * 2 * 128 * 64 * 2 > 48 << 10


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_layouts_are_read_from_images_of_every_architecture(arch: str, cache: Path) -> None:
    (kernel,) = compile_all([numbers], cache, arch)
    entry = read_kernel_info(kernel.image, "numbers")
    assert entry.params == ((0, 8), (8, 1), (10, 2), (12, 4), (16, 4), (20, 2), (22, 2), (24, 8), (32, 8), (40, 8), (48, 8))
    assert (entry.threads, entry.cluster) == ((128, 1, 1), None)


def test_layouts_of_large_parameters_are_read(tmp_path: Path) -> None:
    """Triton's kernels have no such parameters, but its ptxas can compile them; images describe them in another form."""
    import triton.backends.nvidia

    text = """.version 8.7
    .target sm_90
    .address_size 64
    .visible .entry big(.param .u64 p0, .param .align 4 .b8 p1[5000], .param .u8 p2) { ret; }
    """
    (tmp_path / "big.ptx").write_text(text)
    ptxas = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    subprocess.run([ptxas, "-arch=sm_90", tmp_path / "big.ptx", "-o", tmp_path / "big.cubin"], check=True)
    entry = read_kernel_info((tmp_path / "big.cubin").read_bytes(), "big")
    assert entry.params == ((0, 8), (8, 5000), (5008, 1))
    assert entry.threads is None


def test_clusters_multiply_the_blocks(cache: Path) -> None:
    (kernel,) = compile_all([replace(add, options=(("num_ctas", 2),))], cache)
    assert kernel.cluster == (2, 1, 1)
    assert read_kernel_info(kernel.image, "add").cluster == (2, 1, 1)


def test_equal_variants_give_equal_bytes_wherever_they_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes kernels with assertions, which contain the name of their source file. Triton's settings have no effect."""
    builds = []
    for name, setting in (("here", "0"), ("there", "1")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("TMPDIR", os.fspath(tmp_path / name))
        monkeypatch.setenv("DISABLE_PTXAS_OPT", setting)
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", setting)
        builds.append(compile_all([inductors, matmul], tmp_path / name / "cache"))
    for here, there in zip(*builds, strict=True):
        assert here == there
        assert os.fspath(tmp_path).encode() not in here.image
        assert b"debug_line" not in here.image


# --- the cache ------------------------------------------------------------------------------------------------


def test_what_is_remembered_is_not_compiled_again(cache: Path) -> None:
    """The second call runs in a process that imports neither Triton nor torch and starts no process."""
    first = compile_all([add, softmax], cache)
    program = """
import pickle, subprocess, sys
from pathlib import Path
from cgcompile.offline.compile.kernels import compile_variants
def refuse(*args, **kwargs):
    raise AssertionError("a process was started")
subprocess.Popen = refuse
variants, cache = pickle.loads(sys.stdin.buffer.read())
made = compile_variants(variants, "sm_90", shared_limit=232448, cache=Path(cache), tell=print)
assert not {"triton", "torch"} & set(sys.modules)
print(*(kernel.sha256 for kernel in made))
"""
    again = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(([replace(add, selected_by="table"), softmax], os.fspath(cache))),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert again.stderr.decode() == ""
    assert again.stdout.decode().split() == [kernel.sha256 for kernel in first]


def test_what_changes_a_kernel_changes_its_place_in_the_cache(cache: Path) -> None:
    others = [
        add,
        replace(add, warps=8),
        replace(add, constants=(("BLOCK", 512),)),
        replace(add, divisible=()),
        replace(add, source=ADD.replace("+ tl.load(b", "- tl.load(b")),
    ]
    compiled_kernels = compile_all(others, cache)
    fewer = compile_all([matmul, replace(matmul, stages=2)], cache, "sm_80")
    assert fewer[1].shared < fewer[0].shared
    assert len({kernel.sha256 for kernel in compiled_kernels}) == len(others)
    assert compile_all([add], cache, "sm_80")[0].sha256 not in {kernel.sha256 for kernel in compiled_kernels}


def test_a_damaged_file_of_the_cache_is_made_again(tmp_path: Path) -> None:
    (before,) = compile_all([add], tmp_path)
    (path,) = (tmp_path / "kernels").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    messages: list[str] = []
    (after,) = compile_variants([add], "sm_90", shared_limit=LIMIT, cache=tmp_path, tell=messages.append)
    assert after == before
    assert messages == ["1 of 1 kernels to compile", "1 of 1 kernels: add"]


def test_equal_variants_are_compiled_once(tmp_path: Path) -> None:
    messages: list[str] = []
    compiled_kernels = compile_variants(
        [add, add, replace(add, selected_by="nearest")], "sm_90", shared_limit=LIMIT, cache=tmp_path, tell=messages.append
    )
    assert messages == ["1 of 1 kernels to compile", "1 of 1 kernels: add"]
    assert compiled_kernels == (compiled_kernels[0],) * 3


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            replace(add, source=ADD.replace("a + i", "a + missing")),
            "kernel add: CompilationError: NameError.*missing is not defined",
        ),
        (replace(add, constants=(("BLOCK", 100),)), "arange's range must be a power of 2"),
        (replace(add, options=(("num_waves", 1),)), "ValueError: triton .* has no option num_waves"),
        (replace(add, options=(("ptx_options", "--no-such-option"),)), "PTXASError: ptxas fatal.*no-such-option"),
    ],
)
def test_kernels_that_do_not_compile_are_named(bad: KernelVariant, message: str, tmp_path: Path) -> None:
    with raises("kernel-failed", match=message):
        compile_all([bad], tmp_path)


def test_kernels_that_compiled_beside_one_that_failed_are_kept(tmp_path: Path) -> None:
    bad = replace(add, constants=(("BLOCK", 100),))
    with raises("kernel-failed"):
        compile_variants([add, bad], "sm_90", shared_limit=LIMIT, cache=tmp_path, workers=1, tell=lambda text: None)
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_the_first_failure_ends_the_other_processes(tmp_path: Path) -> None:
    bad = replace(add, constants=(("BLOCK", 100),))
    many = [replace(add, source=ADD.replace("a + i,", f"a + i + {i},")) for i in range(40)]
    with raises("kernel-failed"):
        compile_variants([bad, *many], "sm_90", shared_limit=LIMIT, cache=tmp_path, workers=2, tell=lambda text: None)
    assert len(list(tmp_path.glob("kernels/*"))) < len(many)


def test_kernels_that_need_too_much_are_refused(cache: Path) -> None:
    shared = compile_all([matmul], cache)[0].shared
    assert compile_all([matmul], cache, limit=shared)[0].shared == shared
    with raises("kernel-too-large", match=f"kernel matmul needs {shared} bytes of shared memory per block, the target has"):
        compile_all([matmul], cache, limit=shared - 1)
    with raises("kernel-too-large", match="blocks of 64 warps"):
        compile_all([replace(add, warps=64, constants=(("BLOCK", 4096),))], cache)


def test_a_compiler_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("import sys\nsys.exit('no Triton today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with raises("worker-died", match="kernel add: its compiler ended with status 1: no Triton today"):
        compile_all([add], tmp_path / "cache")


def kernel_of(kernel: CompiledKernel, **changes: Any) -> KernelImage:
    plain = KernelImage(
        image=kernel.image,
        symbol=kernel.symbol,
        shared=kernel.shared,
        tensor_columns=0,
        warps=kernel.threads // 32,
        blocks=1,
        global_scratch=0,
        profile_scratch=0,
        cooperative=False,
    )
    return replace(plain, **changes)


def test_a_variable_that_a_kernel_may_write_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = compile_all([add], cache)
    counter = Symbol(name="counter", section=".nv.global", value=0, local=False, initial=bytes(4))
    monkeypatch.setattr(kernels, "read_cubin", lambda image, what: Cubin(data=(counter,), functions=frozenset()))
    with raises("kernel-unsupported", match="kernel add has a variable that it may write, counter, in memory of the image"):
        finish(add, kernel_of(kernel), LIMIT)


def test_metadata_and_image_have_to_agree(cache: Path) -> None:
    (kernel,) = compile_all([add], cache)
    assert finish(add, kernel_of(kernel), LIMIT) == kernel
    with raises("kernel-unsupported", match="kernel add needs 128 bytes of global scratch"):
        finish(add, kernel_of(kernel, global_scratch=128), LIMIT)
    with raises("kernel-unsupported", match="needs 64 bytes of profile scratch"):
        finish(add, kernel_of(kernel, profile_scratch=64), LIMIT)
    with raises("kernel-too-large", match="1024 columns of tensor memory"):
        finish(add, kernel_of(kernel, tensor_columns=1024), LIMIT)
    with raises("kernel-failed", match=r"requires blocks of \(128, 1, 1\) threads, Triton's metadata has 256"):
        finish(add, kernel_of(kernel, warps=8), LIMIT)
    with raises("kernel-failed", match="requires clusters of None blocks, Triton's metadata has 2"):
        finish(add, kernel_of(kernel, blocks=2), LIMIT)
    with raises("kernel-failed", match="takes 6 parameters, its signature has 7"):
        finish(replace(add, signature=(*add.signature, *(("x", "i32"),) * 3)), kernel_of(kernel), LIMIT)
    with raises("kernel-failed", match="takes 6 parameters, its signature has 5"):
        finish(replace(add, signature=(*add.signature, ("x", "*fp32"))), kernel_of(kernel), LIMIT)
    with raises("kernel-unsupported", match="parameter a is a tensor descriptor"):
        finish(replace(add, signature=(("a", "tensordesc<fp16[8]>"), *add.signature[1:])), kernel_of(kernel), LIMIT)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("at 3:4:\ndef add(a):\n    i = x\n        ^\nNameError('x')", "E: NameError('x')"),
        ("PTXAS error: Internal\n`ptxas` stderr:\nptxas fatal   : Unknown option\n", "E: ptxas fatal   : Unknown option"),
        ("plain\nmore", "E: plain"),
        ("", "E: "),
    ],
)
def test_the_line_that_says_most_is_shown(text: str, line: str) -> None:
    assert first_line("E", text) == line


def test_no_packed_add_comes_to_ptxas(cache: Path, tmp_path: Path) -> None:
    """ptxas 12.8 and 12.9 drop the immediate of a packed add if only one half is used."""
    arguments = [("x", "*fp32"), ("w", "*fp32"), ("out", "*fp32")]
    (kernel,) = compile_all([variant(PADDED, arguments, ("x", "w", "out"), warps=1)], cache)
    (tmp_path / "padded.cubin").write_bytes(kernel.image)
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    disassemble = Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm"
    shown = subprocess.run([disassemble, tmp_path / "padded.cubin"], capture_output=True, text=True, check=True).stdout
    assert "STG" in shown
    assert "16x2" not in shown


def test_a_packed_add_becomes_two() -> None:
    adds = "\tadd.s16x2 \t%r120, %r116, %r119;\n\tadd.u16x2 \t%r9, %r8, 65535;\n"
    before = f"\tmov.b32 \t%r119, -65536;\n{adds}\tmin.s16x2 %r1, %r2, %r3;\n"
    after = split_packed_adds(before)
    assert after.startswith("\tmov.b32 \t%r119, -65536;\n\t{\n")
    assert "mov.b32 {%half0, %half1}, %r116;" in after
    assert "mov.b32 %second, %r119;" in after
    assert "mov.b32 %second, 65535;" in after
    assert after.count("add.s16 ") == 4
    assert "add.s16x2" not in after
    assert after.endswith("\tmin.s16x2 %r1, %r2, %r3;\n")
    with pytest.raises(ValueError, match="a packed add that cannot be split: @%p1 add"):
        split_packed_adds("@%p1 add.s16x2 %r1, %r2, %r3;\n")


# --- together -------------------------------------------------------------------------------------------------


def test_a_program_of_real_kernels_becomes_rows(cache: Path) -> None:
    def at(buffer: int) -> Pointer:
        return Pointer(buffer=buffer, offset=0)

    buffers = [
        (INPUT, "0", 2 * 128 * 128),
        (WEIGHT, "w", 2 * 128 * 128),
        *((TEMPORARY, f"buf{i}", 4 * 128 * 128) for i in range(4)),
    ]
    program = Lowered(
        key=(128,),
        buffers=tuple(Buffer(kind=kind, name=name, nbytes=size) for kind, name, size in buffers),
        variants=(matmul, softmax, add),
        events=(
            Launch(variant=0, grid=(1, 1, 1), arguments=(at(0), at(1), at(2), 128)),
            Launch(variant=1, grid=(128, 1, 1), arguments=(at(2), at(3), 128)),
            Launch(variant=2, grid=(64, 1, 1), arguments=(at(3), at(2), at(4), 128 * 128)),
            Launch(variant=2, grid=(64, 1, 1), arguments=(at(4), at(4), at(5), 128 * 128)),
        ),
        inputs=(BufferView(pointer=at(0), dtype="float16", shape=(128, 128), strides=(128, 1)),),
        outputs=(BufferView(pointer=at(5), dtype="float32", shape=(128, 128), strides=(128, 1)),),
    )
    compiled_kernels = compile_all(program.variants, cache)
    placed = plan(program)
    check_plan(program, placed)
    assert placed.bound == 3 * 4 * 128 * 128
    graph = assembled(program, compiled_kernels, placed, {"w": 0}, (0,))
    data = tables.encode(graph.recording)
    memories = {"weights": 1 << 20, "inputs": 1 << 20, "arena": graph.arena}
    check_recording(Table(data, "t"), memories, {kernel.sha256 for kernel in compiled_kernels})
    assert [function.attributes for function in graph.recording.functions] == [((8, compiled_kernels[0].shared),), (), ()]
