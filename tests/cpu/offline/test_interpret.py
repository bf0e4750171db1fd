"""The interpreter runs the launches of a recording on the CPU: handwritten kernels in Inductor's style equal torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cgbundle.format.schema import Value, Weight
from cgbundle.validate.module_state import Address
from cgcompile.bundle.recordings import EmptyNode, MemcpyNode, MemsetNode
from cgcompile.errors import BuildError
from cgcompile.offline.interpret.interpret import Outcome, Task, estimate, interpret
from tests.cpu.offline.written_rows import Sheet, address, raw, tensor_of
from tests.helpers.raising import raises

ADD = """
def kernel(a, b, out, n, XBLOCK: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    mask = at < n
    tl.store(out + at, tl.load(a + at, mask) + tl.load(b + at, mask), mask)
"""

SOFTMAX = """
def kernel(x, out, xnumel, rnumel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    column = tl.arange(0, R0_BLOCK)[None, :]
    mask = (row < xnumel) & (column < rnumel)
    tmp0 = tl.load(x + (column + rnumel * row), mask, other=0.0).to(tl.float32)
    tmp1 = tl.broadcast_to(tmp0, [XBLOCK, R0_BLOCK])
    tmp3 = tl.where(mask, tmp1, float("-inf"))
    tmp4 = triton_helpers.max2(tmp3, 1)[:, None].to(tl.float32)
    tmp6 = libdevice.exp(tmp0 - tmp4)
    tmp9 = tl.where(mask, tmp6, 0)
    tmp10 = tl.sum(tmp9, 1)[:, None].to(tl.float32)
    tl.store(out + (column + rnumel * row), tmp6 / tmp10, mask)
"""

LAYER_NORM = """
def kernel(x, gain, shift, out, xnumel, r0_numel, eps, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = row < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    mean = tl.zeros([XBLOCK, R0_BLOCK], tl.float32)
    m2 = tl.zeros([XBLOCK, R0_BLOCK], tl.float32)
    weight = tl.zeros([XBLOCK, R0_BLOCK], tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        column = r0_offset + r0_base
        mask = (column < r0_numel) & xmask
        tmp0 = tl.load(x + (column + r0_numel * row), mask, eviction_policy='evict_last', other=0.0).to(tl.float32)
        mean_next, m2_next, weight_next = triton_helpers.welford_reduce(tmp0, mean, m2, weight, r0_offset == 0)
        mean = tl.where(mask, mean_next, mean)
        m2 = tl.where(mask, m2_next, m2)
        weight = tl.where(mask, weight_next, weight)
    tmp1, tmp2, tmp3 = triton_helpers.welford(mean, m2, weight, 1)
    center = tmp1[:, None]
    scale = libdevice.rsqrt(tmp2[:, None] / r0_numel + eps)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        column = r0_offset + r0_base
        mask = (column < r0_numel) & xmask
        tmp0 = tl.load(x + (column + r0_numel * row), mask, other=0.0).to(tl.float32)
        tmp4 = tl.load(gain + column, column < r0_numel).to(tl.float32)
        tmp5 = tl.load(shift + column, column < r0_numel).to(tl.float32)
        tl.store(out + (column + r0_numel * row), (tmp0 - center) * scale * tmp4 + tmp5, mask)
"""

MATMUL = """
def kernel(A, B, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    if M * N == 0:
        return
    pid = tl.program_id(0).to(tl.int32)
    grid_m = (M + BLOCK_M - 1) // BLOCK_M
    grid_n = (N + BLOCK_N - 1) // BLOCK_N
    width = GROUP_M * grid_n
    group_id = pid // width
    group_size = min(grid_m - group_id * GROUP_M, GROUP_M)
    pid_m = group_id * GROUP_M + (pid % group_size)
    pid_n = (pid % width) // (group_size)
    tl.assume(pid_m >= 0)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if M >= BLOCK_M and K > 1:
        am = tl.max_contiguous(tl.multiple_of(rm % M, BLOCK_M), BLOCK_M)
    else:
        am = rm % M
    bn = rn % N
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a_mask = ks[None, :] < (K - k * BLOCK_K)
        b_mask = ks[:, None] < (K - k * BLOCK_K)
        a = tl.load(A + (am[:, None] * K + ks[None, :] + k * BLOCK_K), a_mask, other=0.0)
        b = tl.load(B + ((ks[:, None] + k * BLOCK_K) * N + bn[None, :]), b_mask, other=0.0)
        acc += tl.dot(a, b, allow_tf32=False, out_dtype=tl.float32)
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(out + (rn[None, :] + N * rm[:, None]), acc, mask)
"""

BLOCK_MATMUL = """
def kernel(A, B, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    a_ptr = tl.make_block_ptr(A, [M, K], [K, 1], [tl.program_id(0) * BLOCK_M, 0], [BLOCK_M, BLOCK_K], [1, 0])
    b_ptr = tl.make_block_ptr(B, [K, N], [N, 1], [0, tl.program_id(1) * BLOCK_N], [BLOCK_K, BLOCK_N], [1, 0])
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr, boundary_check=(0, 1), padding_option="zero")
        b = tl.load(b_ptr, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
        a_ptr = tl.advance(a_ptr, [0, BLOCK_K])
        b_ptr = tl.advance(b_ptr, [BLOCK_K, 0])
    c_ptr = tl.make_block_ptr(
        out, [M, N], [N, 1], [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N], [BLOCK_M, BLOCK_N], [1, 0]
    )
    tl.store(c_ptr, acc, boundary_check=(0, 1))
"""

GATHER = """
def kernel(ids, keep, table, out, rows, width, XBLOCK: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    mask = at < rows * width
    tmp0 = tl.load(ids + at // width, mask, eviction_policy='evict_last')
    tmp1 = tl.full([XBLOCK], 40, tl.int32)
    tmp3 = tl.where(tmp0 < 0, tmp0 + tmp1, tmp0)
    tl.device_assert(((0 <= tmp3) & (tmp3 < 40)) | ~(mask), "index out of bounds: 0 <= tmp3 < 40")
    tmp5 = tl.load(keep + at // width, mask).to(tl.int1)
    tmp6 = tl.load(table + (at % width + width * tmp3), mask & tmp5, other=0.0).to(tl.float32)
    tl.store(out + at, tl.where(tmp5, tmp6, -1.0), mask)
"""

CUMSUM = """
@triton.jit
def _triton_helper_fn_add0(arg0_0, arg1_0):
    tmp0 = arg0_0 + arg1_0
    return tmp0

def kernel(x, out, xnumel, rnumel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    column = tl.arange(0, R0_BLOCK)[None, :]
    mask = (row < xnumel) & (column < rnumel)
    tmp0 = tl.load(x + (column + rnumel * row), mask, other=0.0)
    tmp2 = tl.broadcast_to(tmp0.to(tl.float32), [XBLOCK, R0_BLOCK])
    tmp3, = tl.associative_scan((tmp2,), 1, _triton_helper_fn_add0)
    tl.store(out + (column + rnumel * row), tmp3, mask)
"""

ARGMAX = """
def kernel(x, value, index, xnumel, rnumel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    column = tl.arange(0, R0_BLOCK)[None, :]
    mask = (row < xnumel) & (column < rnumel)
    tmp0 = tl.load(x + (column + rnumel * row), mask, other=0.0)
    tmp3 = tl.where(mask, tl.broadcast_to(tmp0, [XBLOCK, R0_BLOCK]), float("-inf"))
    tmp4 = tl.broadcast_to(column, tmp3.shape)
    tmp5, tmp6 = triton_helpers.max_with_index(tmp3, tmp4, 1)
    tl.store(value + row, tmp5[:, None], row < xnumel)
    tl.store(index + row, tmp6[:, None].to(tl.int64), row < xnumel)
"""

BRANCHES = """
def kernel(x, out, XBLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = pid * XBLOCK + tl.arange(0, XBLOCK)
    value = tl.load(x + at)
    tl.store(x + at, value + 1)
    if pid % 3 == 0:
        result = value * 2
    elif pid % 3 == 1:
        result = -value
    else:
        result = value
        for step in range(0, pid):
            result = result + step
    tl.store(out + at, result)
"""

ATOMIC = """
def kernel(x, total, counts, last, n, XBLOCK: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    value = tl.load(x + at, at < n, other=0.0)
    tl.atomic_add(total + (at % 4), value, at < n, sem="relaxed")
    arrived = tl.atomic_add(counts, 1)
    if arrived == tl.num_programs(0) - 1:
        tl.store(last, tl.program_id(0))
"""

CASTS = """
def kernel(x, narrow, half, small, bits, out, XBLOCK: tl.constexpr):
    at = tl.arange(0, XBLOCK)
    value = tl.load(x + at)
    tl.store(narrow + at, value.to(tl.bfloat16))
    tl.store(half + at, value.to(tl.float16))
    tl.store(small + at, value.to(tl.float8e4nv))
    tl.store(bits + at, value.to(tl.int32, bitcast=True))
    back = tl.load(narrow + at).to(tl.float32) + tl.load(small + at).to(tl.float32) + tl.load(half + at).to(tl.float32)
    tl.store(out + at, back)
"""

MATH = """
def kernel(x, out, flags, XBLOCK: tl.constexpr):
    at = tl.arange(0, XBLOCK)
    v = tl.load(x + at)
    p = tl_math.abs(v) + 0.5
    total = libdevice.tanh(v) + libdevice.erf(v) + libdevice.log1p(p) + libdevice.pow(p, 1.5) + libdevice.rsqrt(p)
    total = total + libdevice.floor(v) + libdevice.nearbyint(v) + libdevice.sqrt(p) + libdevice.sin(v) + tl_math.cos(v)
    total = total + tl.sigmoid(v) + tl.sqrt_rn(p) + libdevice.expm1(v) + libdevice.llrint(v).to(tl.float32) + libdevice.lgamma(p)
    total = total + triton_helpers.maximum(v, p) - triton_helpers.minimum(v, p) + libdevice.ldexp(v, 2) + libdevice.fmod(v, 0.75)
    total = total + tl.inline_asm_elementwise(
        'fma.rn.f32 $0, $1, $2, $3;', '=f, f, f, f', [v, p, p], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + at, total)
    strange = tl.where(at == 0, float("nan"), tl.where(at == 1, float("inf"), v))
    odd = libdevice.isnan(strange).to(tl.int1) | libdevice.isinf(strange).to(tl.int1)
    tl.store(flags + at, odd | libdevice.signbit(strange).to(tl.int1))
"""

SORT = """
def kernel(x, values, places, xnumel, rnumel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    column = tl.arange(0, R0_BLOCK)[None, :]
    mask = (row < xnumel) & (column < rnumel)
    tmp0 = tl.load(x + (column + rnumel * row), mask, other=0.0)
    tmp2 = tl.broadcast_to(column.to(tl.int16), [XBLOCK, R0_BLOCK])
    tmp5, tmp6 = triton_helpers.sort_with_index(tmp0, tmp2, rnumel, 1, stable=True, descending=False)
    tl.store(values + (column + rnumel * row), tmp5, mask)
    tl.store(places + (column + rnumel * row), tmp6.to(tl.int64), mask)
"""

RANDOM = """
def kernel(seeds, out, XBLOCK: tl.constexpr):
    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out + at, tl.rand(tl.load(seeds), at.to(tl.uint32)))
"""

BIG = 64

Results = Callable[[str], tuple[torch.Tensor, torch.Tensor]]
"""Returns (actual, expected by torch) for the name of an output."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs every kernel above in one recording. Returns (actual, expected) by name."""
    draw = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    sheet = Sheet()
    expected: dict[str, tuple[Value, torch.Tensor]] = {}

    def out(name: str, tensor: torch.Tensor) -> Value:
        value = sheet.output(tensor.dtype, tensor.shape)
        expected[name] = (value, tensor)
        return value

    a, b = randn(1000), randn(1000)
    wa, wb = sheet.weight(a), sheet.input(b)
    sheet.launch(ADD, (8, 1, 1), wa, wb, out("add", a + b), 1000, XBLOCK=128)
    half = a.bfloat16(), b.bfloat16()
    low = [sheet.weight(t) for t in half]
    sheet.launch(ADD, (8, 1, 1), *low, out("add bf16", half[0] + half[1]), 1000, XBLOCK=128)

    x = randn(13, 50)
    wx = sheet.input(x)
    sheet.launch(SOFTMAX, (4, 1, 1), wx, out("softmax", x.softmax(1)), 13, 50, XBLOCK=4, R0_BLOCK=64)
    sheet.launch(CUMSUM, (7, 1, 1), wx, out("cumsum", x.cumsum(1)), 13, 50, XBLOCK=2, R0_BLOCK=64)
    best = x.max(1)
    sheet.launch(ARGMAX, (4, 1, 1), wx, out("max", best[0]), out("argmax", best[1]), 13, 50, XBLOCK=4, R0_BLOCK=64)
    ordered = x.sort(1)
    sheet.launch(SORT, (7, 1, 1), wx, out("sort", ordered[0]), out("argsort", ordered[1]), 13, 50, XBLOCK=2, R0_BLOCK=64)

    h, gain, shift = randn(9, 200).bfloat16(), randn(200).bfloat16(), randn(200).bfloat16()
    normed = torch.nn.functional.layer_norm(h.float(), (200,), gain.float(), shift.float())
    places = sheet.input(h), sheet.weight(gain), sheet.weight(shift), out("layer norm", normed)
    sheet.launch(LAYER_NORM, (5, 1, 1), *places, 9, 200, 1e-5, XBLOCK=2, R0_BLOCK=64)

    left, right = randn(70, 90), randn(90, 50)
    grid = (5 * 4, 1, 1)
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32}
    wl, wr = sheet.input(left), sheet.weight(right)
    sheet.launch(MATMUL, grid, wl, wr, out("matmul", left @ right), 70, 50, 90, **blocks, GROUP_M=2)
    pair = left.bfloat16(), right.bfloat16()
    narrow = [sheet.input(t) for t in pair]
    product = (pair[0].float() @ pair[1].float()).bfloat16()
    sheet.launch(MATMUL, grid, *narrow, out("matmul bf16", product), 70, 50, 90, **blocks, GROUP_M=2)
    sheet.launch(BLOCK_MATMUL, (5, 4, 1), wl, wr, out("block pointers", left @ right), 70, 50, 90, **blocks)

    ids, keep, table = torch.randint(-40, 40, (30,), generator=draw), torch.rand(30, generator=draw) > 0.3, randn(40, 24).half()
    picked = torch.where(keep[:, None], table[ids].float(), -1.0)
    places = sheet.input(ids), sheet.input(keep), sheet.weight(table), out("gather", picked)
    sheet.launch(GATHER, (6, 1, 1), *places, 30, 24, XBLOCK=128)

    y = torch.arange(160.0)
    pid = torch.arange(20).repeat_interleave(8)
    way = torch.where(pid % 3 == 0, 2 * y, torch.where(pid % 3 == 1, -y, y + pid * (pid - 1) / 2))
    changed = sheet.input(y)
    sheet.launch(BRANCHES, (20, 1, 1), changed, out("branches", way), XBLOCK=8)
    expected["branches, changed once"] = (changed, y + 1)
    sheet.outputs.append(changed)

    total, counter = out("atomic", a.reshape(-1, 4).sum(0)), out("atomic, counter", torch.tensor([32], dtype=torch.int32))
    for value in (total, counter):
        sheet.nodes.append(MemsetNode(target=address(value), value=0, element=4, width=value.shape[0], height=1, pitch=0))
    last = out("atomic, last", torch.tensor([31], dtype=torch.int32))
    sheet.launch(ATOMIC, (32, 1, 1), wa, total, counter, last, 1000, XBLOCK=32)

    z = torch.cat([torch.tensor([0.0, -0.0, 1e-3, 300.0, 447.0, -3.1, 1e-8, 65000.0]), randn(56)]).clamp(-448, 448)
    eight = z.to(torch.float8_e4m3fn)
    places = out("to bf16", z.bfloat16()), out("to fp16", z.half()), out("to fp8", eight), out("bits", z.view(torch.int32))
    sheet.launch(
        CASTS, (1, 1, 1), sheet.input(z), *places, out("back", z.bfloat16().float() + eight.float() + z.half().float()), XBLOCK=BIG
    )

    v = randn(BIG)
    flags = torch.signbit(v) | (torch.arange(BIG) < 2)
    sheet.launch(MATH, (1, 1, 1), sheet.input(v), out("math", _math(v)), out("flags", flags), XBLOCK=BIG)

    unwritten = sheet.place("arena", torch.float32, (1000,))
    sheet.launch(ADD, (8, 1, 1), wa, unwritten, out("reads poison", torch.full((1000,), torch.nan)), 1000, XBLOCK=128)

    seed = sheet.input(torch.tensor([42]))
    sheet.launch(RANDOM, (4, 1, 1), seed, out("random", torch.full((512,), 0.5)), XBLOCK=128)

    copied = out("copy", b[10:].reshape(-1)[: 3 * 100].reshape(3, 100)[:, :40].clone())
    source = Address(memory=address(wb).memory, offset=wb.offset + 40)
    sheet.nodes.append(
        MemcpyNode(source=source, target=address(copied), width=160, height=3, depth=1, source_pitch=400, source_height=3,
                   target_pitch=160, target_height=3)
    )  # fmt: skip
    sheet.nodes.append(EmptyNode())
    filled = out("fill", torch.full((6,), 0x0102, dtype=torch.int16))
    sheet.nodes.append(MemsetNode(target=address(filled), value=0x0102, element=2, width=6, height=1, pitch=0))
    expected["poison"] = (sheet.output(torch.uint8, (256,)), torch.full((256,), 255, dtype=torch.uint8))

    folder = tmp_path_factory.mktemp("interpreted")
    (outcome,) = interpret([sheet.task(folder)], folder, budget=1)
    came = dict(zip(sheet.outputs, outcome.read, strict=True))
    return lambda name: (tensor_of(came[expected[name][0]], expected[name][0]), expected[name][1])


def test_unwritten_memory_is_detected(results: Results) -> None:
    got, _ = results("reads poison")
    assert got.isnan().all()


def _math(v: torch.Tensor) -> torch.Tensor:
    v = v.double()
    p = v.abs() + 0.5
    total = v.tanh() + v.erf() + p.log1p() + p**1.5 + p.rsqrt() + v.floor() + v.round() + p.sqrt() + v.sin() + v.cos()
    total = total + v.sigmoid() + p.sqrt() + v.expm1() + v.round() + p.lgamma()
    return (total + torch.maximum(v, p) - torch.minimum(v, p) + v * 4 + v.fmod(0.75) + v * p + p).float()


@pytest.mark.parametrize(
    "name", ["add", "softmax", "cumsum", "max", "layer norm", "matmul", "block pointers", "atomic", "math", "back"]
)
def test_floats_agree(results: Results, name: str) -> None:
    got, want = results(name)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["add bf16", "matmul bf16"])
def test_bfloat16_agrees_to_a_unit_in_the_last_place(results: Results, name: str) -> None:
    got, want = results(name)
    assert (got.view(torch.int16).int() - want.view(torch.int16).int()).abs().max() <= 1


@pytest.mark.parametrize(
    "name",
    ["argmax", "sort", "argsort", "gather", "branches", "branches, changed once", "atomic, counter", "atomic, last", "to bf16",
     "to fp16", "to fp8", "bits", "flags", "copy", "fill", "poison"],
)  # fmt: skip
def test_equal_bits(results: Results, name: str) -> None:
    got, want = results(name)
    assert got.view(torch.uint8).equal(want.contiguous().view(torch.uint8))


def test_philox_draws_evenly(results: Results) -> None:
    drawn, _ = results("random")
    assert drawn.unique().numel() == drawn.numel()
    assert 0 <= drawn.min() < 0.05 and 0.95 < drawn.max() < 1 and abs(drawn.mean() - 0.5) < 0.05


# --- refusals and choices ----------------------------------------------------------------------------------------


def _one(source: str, *arguments: Value | Address | float, sheet: Sheet, folder: Path, **constants: int) -> tuple[Outcome, ...]:
    sheet.launch(source, (2, 1, 1), *arguments, **constants)
    return interpret([sheet.task(folder)], folder, budget=1)


def _refused(body: str, error: type[BuildError], words: str, folder: Path) -> None:
    """Checks that a one-line kernel raises `error` with the kernel's name and `words`."""
    sheet = Sheet()
    x = sheet.input(torch.ones(32))
    source = f"def kernel(x, out, XBLOCK: tl.constexpr):\n    at = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)\n    {body}\n"
    with raises(error, match=f"kernel kernel, row 0.*{words}"):
        _one(source, x, sheet.output(torch.float32, (32,)), sheet=sheet, folder=folder, XBLOCK=16)


def test_refuses_a_function_without_a_stand_in(tmp_path: Path) -> None:
    _refused(
        "tl.store(out + at, libdevice.popc(tl.load(x + at).to(tl.int32)))",
        "function-not-interpretable",
        r"libdevice.popc\(int32\)",
        tmp_path,
    )


def test_refuses_a_function_of_a_type_that_libdevice_does_not_have(tmp_path: Path) -> None:
    _refused(
        "tl.store(out + at, libdevice.tanh(tl.load(x + at).to(tl.float16)))",
        "function-not-interpretable",
        r"libdevice.tanh\(fp16\)",
        tmp_path,
    )


def test_refuses_assembly_that_is_not_known(tmp_path: Path) -> None:
    asm = "tl.inline_asm_elementwise('ex2.approx.f32 $0, $1;', '=f, f', [tl.load(x + at)], dtype=tl.float32, is_pure=True, pack=1)"
    _refused(f"tl.store(out + at, {asm})", "function-not-interpretable", "inline assembly 'ex2", tmp_path)


def test_refuses_a_read_outside_every_memory(tmp_path: Path) -> None:
    _refused("tl.store(out + at, tl.load(x + at - 1))", "access-outside", "reads 4 bytes at byte -4 of memory 'inputs'", tmp_path)


def test_refuses_a_write_behind_the_arena(tmp_path: Path) -> None:
    _refused("tl.store(out + at * 3, tl.load(x + at))", "access-outside", "writes 4 bytes at byte 264 of memory 'arena'", tmp_path)


def test_refuses_a_misaligned_read(tmp_path: Path) -> None:
    _refused(
        "tl.load((x.to(tl.pointer_type(tl.int8)) + 2).to(tl.pointer_type(tl.float32)) + at)",
        "access-outside",
        "not aligned",
        tmp_path,
    )


def test_refuses_a_failed_assertion(tmp_path: Path) -> None:
    _refused('tl.device_assert(at < 20, "at is too large")', "kernel-asserted", "at is too large", tmp_path)


def test_refuses_a_loop_that_waits_for_another_instance(tmp_path: Path) -> None:
    body = "while tl.load(x) == 1:\n        pass"
    _refused(body, "function-not-interpretable", "a loop of more than 65536 turns", tmp_path)


def test_names_a_kernel_that_cannot_run(tmp_path: Path) -> None:
    _refused("tl.store(out + at, undefined_name)", "kernel-unreadable", "undefined_name", tmp_path)


def test_stages_share_memory_and_meet_the_host_between_them(tmp_path: Path) -> None:
    """A stage sees the results of the previous one. The host writes inputs before a stage, and reads results after it."""
    sheet = Sheet()
    draw = torch.Generator().manual_seed(1)
    a, b, c = [torch.randn(16, generator=draw) for _ in range(3)]
    x, w = sheet.input(a), sheet.weight(b)
    kept, first, last = [sheet.place("arena", torch.float32, (16,)) for _ in range(3)]
    landing = sheet.place("inputs", torch.float32, (16,))
    sheet.launch(ADD, (1, 1, 1), x, w, kept, 16, XBLOCK=16)
    sheet.launch(ADD, (1, 1, 1), x, x, first, 16, XBLOCK=16)
    sheet.cut(first, landing)
    sheet.inputs.append((landing, raw(c)))
    sheet.launch(ADD, (1, 1, 1), kept, landing, first, 16, XBLOCK=16)
    sheet.cut(first)
    sheet.launch(ADD, (1, 1, 1), kept, kept, last, 16, XBLOCK=16)
    sheet.outputs += [last, kept, landing]
    task = sheet.task(tmp_path)
    elsewhere = Weight(name="host", tensor="host", dtype="float32", shape=(4,), strides=(1,), memory="host")
    ((path, placed),) = task.weights
    (outcome,) = interpret([replace(task, weights=((path, (*placed, elsewhere)),))], tmp_path, budget=1)
    poison = torch.full((16,), torch.nan)
    wanted = [a + a, poison, a + b + c, (a + b) * 2, a + b, c]
    tensors = [tensor_of(contents, kept) for contents in outcome.read]
    assert len(tensors) == len(wanted)
    assert all(torch.equal(got.nan_to_num(7), want.nan_to_num(7)) for got, want in zip(tensors, wanted, strict=True))


def test_what_is_given_between_two_stages_is_part_of_what_an_outcome_is_kept_by(tmp_path: Path) -> None:
    def doubled(value: float) -> Task:
        sheet = Sheet()
        x, out = sheet.place("inputs", torch.float32, (16,)), sheet.output(torch.float32, (16,))
        sheet.cut()
        sheet.inputs.append((x, raw(torch.full((16,), value))))
        sheet.launch(ADD, (1, 1, 1), x, x, out, 16, XBLOCK=16)
        return sheet.task(tmp_path)

    for value in (1.0, 3.0, 1.0):
        (outcome,) = interpret([doubled(value)], tmp_path, budget=1, cache=tmp_path / "cache")
        assert outcome.read == (raw(torch.full((16,), 2 * value)),)
    assert len(list((tmp_path / "cache" / "interpreted").iterdir())) == 2


def test_the_smallest_and_the_largest_run_first_and_the_budget_ends_the_others(tmp_path: Path) -> None:
    tasks = []
    for size in (4000, 50, 300):
        sheet = Sheet()
        x = sheet.input(torch.ones(size))
        sheet.launch(ADD, (-(-size // 16), 1, 1), x, x, sheet.output(torch.float32, (size,)), size, XBLOCK=16)
        tasks.append(sheet.task(tmp_path, (size,)))
    assert estimate(tasks[0]) > estimate(tasks[2]) > estimate(tasks[1])
    assert [outcome.key for outcome in interpret(tasks, tmp_path, budget=0)] == [(50,)]
    log: list[str] = []
    every = interpret(tasks, tmp_path, budget=600, workers=1, tell=log.append)
    assert [line.rpartition(": ")[2].partition(" took")[0] for line in log[1:]] == ["(50,)", "(4000,)", "(300,)"]
    assert log[0] == "0 of 3 int_keys, 600 s for all" and log[-1].startswith("3 of 3 int_keys, ") and " s of 600 s" in log[-1]
    assert [outcome.key for outcome in every] == [(4000,), (50,), (300,)]
    assert all(tensor_of(o.read[0], t.stages[0].read[0]).eq(2).all() for o, t in zip(every, tasks, strict=True))
