"""Compares the operators that CPU bundles contain instead of libtorch with those of torch. A form is a call with random ranks,
broadcasts, strides of 0, gaps, empty tensors, alpha and beta, and dtypes.

    python -m tests.operators.forms 1000    # 1000 forms of every function; exit status 1 if a result was wrong

A function must give torch's result or return an error, in which case the build uses libtorch.  Anything else is wrong.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.own_functions import DTYPES, Code, own_functions

SIZES = (0, 1, 1, 1, 2, 3, 5, 8, 16, 17, 33, 48, 65)
FACTORS = (1.0, 1.0, 1.0, 0.0, -1.0, 0.5, 3.0)
SPECIAL = (float("inf"), float("-inf"), float("nan"), 0.0, -0.0)
TOLERANCE = 2e-4
SEED = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A call of a function. `run` computes its results, None if it returns an error; `wanted` computes torch's. `plain` marks a
    float32 form that torch's compiler uses, which must not return an error."""

    text: str
    run: Callable[[], Sequence[Tensor] | None]
    wanted: Callable[[], Sequence[Tensor]]
    plain: bool


class Draw:
    """Random choices, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        torch.manual_seed(seed)

    def one(self, choices: Sequence[Any]) -> Any:
        return self._random.choice(choices)

    def rarely(self, often: int = 8) -> bool:
        return self._random.randrange(often) == 0

    def size(self) -> int:
        return int(self.one(SIZES))

    def dtype(self) -> torch.dtype:
        drawn: torch.dtype = self.one(DTYPES) if self.rarely() else torch.float32
        return drawn

    def tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draws a tensor with axes in any memory order, some with stride 0, with or without gaps."""
        order = self._random.sample(range(len(shape)), len(shape))
        lengths = [1 if self.rarely() else shape[axis] for axis in order]
        gap = self.one((0, 0, 0, 1, 5))
        values = torch.randn([*lengths[:-1], lengths[-1] + gap] if lengths else [])
        if self.rarely(12) and values.numel():
            values.view(-1)[self._random.randrange(values.numel())] = self.one(SPECIAL)
        values = (values * 3).to(dtype) if not dtype.is_floating_point else values.to(dtype)
        values = values[..., : lengths[-1]] if lengths else values
        values = values.permute([order.index(axis) for axis in range(len(shape))])
        return (
            values.expand(list(shape)) if 0 not in shape else values[tuple([slice(0, size) for size in shape])].expand(list(shape))
        )

    def room(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns an output tensor, without strides of 0."""
        axes = list(range(len(shape)))[:: -1 if self.rarely(3) else 1]
        memory = torch.zeros([shape[axis] for axis in axes], dtype=dtype).permute(axes)
        return memory.fill_(float("nan") if dtype.is_floating_point else 1)

    def broadcast(self, shape: Sequence[int]) -> list[int]:
        """Draws a shape that broadcasts to `shape`: fewer axes, some of them 1."""
        kept = shape[self._random.randint(0, len(shape)) :]
        return [1 if self.rarely(3) else size for size in kept]


def forms(code: Code, seed: int, count: int) -> Iterator[Form]:
    """Yields `count` forms of every function."""
    for number in range(count):
        for place, make in enumerate(FUNCTIONS):
            yield make(code, Draw(seed + number * len(FUNCTIONS) + place))


def judged(form: Form) -> str:
    """Returns "right", "refused", or a text about the error."""
    try:
        wanted = form.wanted()
    except (RuntimeError, NotImplementedError, IndexError):
        wanted = None
    actual = form.run()
    if actual is None:
        return "refused by eager too" if wanted is None else "wrong: refused" if form.plain else "refused"
    if wanted is None:
        return "more than eager"
    for number, (have, want) in enumerate(zip(actual, wanted, strict=True)):
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            return f"wrong: result {number} is {have.dtype} {list(have.shape)}, torch's {want.dtype} {list(want.shape)}"
        steps = [(one, other) for size, one, other in zip(want.shape, have.stride(), want.stride(), strict=True) if size > 1]
        if want.numel() and any(one != other for one, other in steps):
            return f"wrong: result {number} has strides {have.stride()}, torch's {want.stride()}"
        if not torch.allclose(have.to(torch.complex128), want.to(torch.complex128), TOLERANCE, TOLERANCE, equal_nan=True):
            return f"wrong: result {number} differs"
    return "right"


def _described(name: str, *arguments: Any) -> str:
    parts = [
        f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)}{argument.stride()}"
        if isinstance(argument, Tensor)
        else str(argument)
        for argument in arguments
    ]
    return f"{name}({', '.join(parts)})"


def _into(code: Code, name: str, out: Tensor, *arguments: Any) -> Callable[[], Sequence[Tensor] | None]:
    return lambda: None if code(name, out, *arguments) else [out]


def _mm(code: Code, draw: Draw) -> Form:
    m, k, n, dtype = draw.size(), draw.size(), draw.size(), draw.dtype()
    other = k + 1 if draw.rarely(20) else k
    a, b, out = draw.tensor((m, k), dtype), draw.tensor((other, n), dtype), draw.room((m, n), dtype)
    return Form(
        text=_described("mm_out", out, a, b), run=_into(code, "mm_out", out, a, b), wanted=lambda: [out.clone().copy_(a @ b)],
        plain=dtype is torch.float32,
    )  # fmt: skip


def _bmm(code: Code, draw: Draw) -> Form:
    batch, m, k, n, dtype = draw.one((0, 1, 2, 3)), draw.size(), draw.size(), draw.size(), draw.dtype()
    a, b, out = draw.tensor((batch, m, k), dtype), draw.tensor((batch, k, n), dtype), draw.room((batch, m, n), dtype)
    return Form(
        text=_described("bmm_out", out, a, b), run=_into(code, "bmm_out", out, a, b), wanted=lambda: [out.clone().copy_(a @ b)],
        plain=dtype is torch.float32,
    )  # fmt: skip


def _addmm(code: Code, draw: Draw) -> Form:
    m, k, n, dtype = draw.size(), draw.size(), draw.size(), draw.dtype()
    beta, alpha = draw.one(FACTORS), draw.one(FACTORS)
    a, b, out = draw.tensor((m, k), dtype), draw.tensor((k, n), dtype), draw.room((m, n), dtype)
    added = draw.tensor(draw.broadcast((m, n)), draw.dtype() if draw.rarely() else dtype)
    if alpha == 0:  # torch omits the product, which could contain inf or NaN
        a, b = [torch.nan_to_num(tensor, 0, 0, 0) if tensor.is_floating_point() else tensor for tensor in (a, b)]
    return Form(
        text=_described("addmm_out", out, added, a, b, beta, alpha),
        run=_into(code, "addmm_out", out, added, a, b, c_double(beta), c_double(alpha)),
        wanted=lambda: [out.clone().copy_(torch.addmm(added, a, b, beta=beta, alpha=alpha))],
        plain=dtype is added.dtype is torch.float32,
    )


def _attention(code: Code, draw: Draw) -> Form:
    batch, groups, shared, dtype = draw.one((0, 1, 2)), draw.one((1, 2, 3)), draw.one((1, 1, 2, 4)), draw.dtype()
    heads, rows, width = groups * shared, draw.size(), draw.one((1, 4, 17, 32))
    causal = draw.rarely(3)
    keys = max(1, draw.size())
    wider = width + 8 if draw.rarely(20) else width
    q = draw.tensor((batch, heads, rows, width), dtype)
    k, v = draw.tensor((batch, groups, keys, width), dtype), draw.tensor((batch, groups, keys, wider), dtype)
    if dtype.is_floating_point:  # for infinite scores torch's own functions differ
        q, k, v = [torch.where(tensor.isfinite(), tensor, 0) for tensor in (q, k, v)]
    mask, scale = None, draw.one((None, None, 0.3))
    if not causal and draw.rarely(2):
        shape = draw.broadcast((batch, heads, rows, keys))
        mask = draw.tensor(shape).nan_to_num(0, 0, 0) if len(shape) in (2, 4) else None
    output, rest, handle = c_void_p(), c_void_p(), None if mask is None else code.handle(mask)

    def run() -> Sequence[Tensor] | None:
        options = (c_double(0), c_int32(causal), handle and byref(handle), None if scale is None else byref(c_double(scale)))
        if code("_scaled_dot_product_flash_attention_for_cpu", q, k, v, *options, byref(output), byref(rest)):
            return None
        code.library.aoti_torch_delete_tensor_object(rest)
        return [code.result(output)]

    def wanted() -> Sequence[Tensor]:  # of contiguous copies: torch 2.13 reads wrong memory if rows of q have stride 0
        plain = [tensor.contiguous() for tensor in (q, k, v)]
        attended = F.scaled_dot_product_attention(*plain, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared > 1)
        return [torch.empty_like(q).copy_(attended) if attended.shape == q.shape else attended]

    return Form(
        text=_described("attention", q, k, v, mask, causal, scale),
        run=run,
        wanted=wanted,
        plain=dtype is torch.float32 and wider == width,
    )


def _convolution(code: Code, draw: Draw) -> Form:
    batch, channels, made_channels = draw.one((0, 1, 2, 3)), draw.one((1, 2, 3, 17)), draw.one((1, 2, 5, 40))
    sides, steps, dilation = [[draw.one((1, 2, 3)) for _ in range(2)] for _ in range(3)]
    padding, dtype, groups = [draw.one((0, 0, 1, 2)) for _ in range(2)], draw.dtype(), 2 if draw.rarely(20) else 1
    room = [wide * (side - 1) + 1 + draw.one((0, 1, 7)) for side, wide in zip(sides, dilation, strict=True)]
    x, weight = torch.randn(batch, channels, *room).to(dtype), torch.randn(made_channels, channels, *sides).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if draw.rarely(2) else x
    weight = weight.contiguous(memory_format=torch.channels_last) if draw.rarely(2) else weight
    bias = draw.tensor((made_channels,), dtype) if draw.rarely(2) else None
    numbers = [byref((c_int64 * 2)(*pair)) for pair in (steps, padding, dilation)]
    none, output = byref((c_int64 * 2)(0, 0)), c_void_p()
    handle = None if bias is None else code.handle(bias)

    def run() -> Sequence[Tensor] | None:
        lists = [word for number in numbers for word in (number, c_int64(2))]
        options = (handle and byref(handle), *lists, c_int32(0), none, c_int64(2), c_int64(groups), byref(output))
        return None if code("convolution", x, weight, *options) else [apart(code.result(output))]

    def wanted() -> Sequence[Tensor]:
        flags = torch.backends.mkldnn.flags(enabled=False) if narrow else nullcontext()
        with warnings.catch_warnings(action="ignore"), flags:  # oneDNN's convolution (torch 2.13) crashes for some narrow shapes
            return [apart(F.conv2d(x, weight, bias, steps, padding, dilation, groups))]

    def apart(result: Tensor) -> Tensor:
        return result.contiguous() if narrow else result  # torch may return either layout

    narrow = min(*x.shape, *weight.shape) < 2
    return Form(
        text=_described("convolution", x, weight, bias, steps, padding, dilation, groups), run=run, wanted=wanted,
        plain=dtype is torch.float32 and groups == 1,
    )  # fmt: skip


def _axes(draw: Draw) -> tuple[list[int], int]:
    """Draws a shape of at most four axes, and one of its axes, counted from either end. The axis of a scalar may be 0 or -1."""
    shape = [
        draw.one((0, 1, 2, 3, 7)) if draw.rarely(4) else draw.one((1, 2, 3, 40)) for _ in range(draw.one((0, 1, 1, 2, 2, 3, 4)))
    ]
    rank = max(1, len(shape))
    return shape, draw.one(range(-rank, rank))


def _cumsum(code: Code, draw: Draw) -> Form:
    (shape, dim), dtype, output = _axes(draw), draw.one(DTYPES) if draw.rarely(2) else torch.float32, c_void_p()
    x = draw.tensor(shape, dtype)

    def run() -> Sequence[Tensor] | None:
        return None if code("cumsum", x, c_int64(dim), None, byref(output)) else [code.result(output)]

    known = dtype in (torch.float32, torch.int64, torch.int32, torch.bool)
    return Form(text=_described("cumsum", x, dim), run=run, wanted=lambda: [torch.cumsum(x, dim).contiguous()], plain=known)


def _topk(code: Code, draw: Draw) -> Form:
    (shape, dim), dtype = _axes(draw), draw.dtype()
    x, largest = draw.tensor(shape, dtype), draw.rarely(2)
    x = x.round() if draw.rarely(2) and dtype.is_floating_point else x
    k = draw.one(range((x.shape[dim] if shape else 1) + 1)) + (5 if draw.rarely(20) else 0)
    values, places = c_void_p(), c_void_p()

    def run() -> Sequence[Tensor] | None:
        options = (c_int64(k), c_int64(dim), c_int32(largest), c_int32(1), byref(values), byref(places))
        return None if code("topk", x, *options) else [code.result(values), code.result(places)]

    def wanted() -> Sequence[Tensor]:
        return [tensor.contiguous() for tensor in torch.topk(x, k, dim, largest)]

    return Form(text=_described("topk", x, k, dim, largest), run=run, wanted=wanted, plain=dtype in (torch.float32, torch.bfloat16))


def _clone(code: Code, draw: Draw) -> Form:
    shape, output = _axes(draw)[0], c_void_p()
    x = draw.tensor(shape, draw.one(DTYPES))

    def run() -> Sequence[Tensor] | None:
        handle = code.handle(x)
        failed = code.library.aoti_torch_clone(handle, byref(output))
        code.library.aoti_torch_delete_tensor_object(handle)
        return None if failed else [code.result(output)]

    return Form(text=_described("clone", x), run=run, wanted=lambda: [x.clone()], plain=True)


FUNCTIONS = (_mm, _bmm, _addmm, _attention, _convolution, _cumsum, _topk, _clone)


def main(count: int) -> int:
    faulthandler.enable()
    counts = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for form in forms(own_functions(Path(folder) / "own.so"), SEED, count):
            verdict = judged(form)
            counts[form.text.partition("(")[0], verdict.partition(":")[0]] += 1
            if verdict.startswith("wrong"):
                print(f"{form.text}  {verdict}", flush=True)
    for (name, verdict), number in sorted(counts.items()):
        print(f"{name:12}  {verdict:20} {number}")
    return 1 if any(verdict == "wrong" for _, verdict in counts) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
