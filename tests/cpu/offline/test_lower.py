"""Cross-compilation: the records of `lower_key`, what it refuses, and that it restores torch's settings."""

from __future__ import annotations

import ast
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cgcompile.export.export import export
from cgcompile.model.load import load_source
from cgcompile.model.source import sample
from cgcompile.offline.assemble.arena import lifetimes
from cgcompile.offline.compile.worker import compile_variant
from cgcompile.offline.decompose import convolutions, decompositions, sort
from cgcompile.offline.decompose.decompositions import REPLACED
from cgcompile.offline.decompose.retrace import retrace
from cgcompile.offline.lower import fake_device
from cgcompile.offline.lower.inductor import lower_key
from cgcompile.offline.lower.launches import record_calls
from cgcompile.offline.lower.variants import BLOCKS, true_hints
from cgcompile.offline.lowered import INPUT, TEMPORARY, WEIGHT, Allocate, Copy, Fill, Launch, Lowered, Pointer, Release
from cgcompile.offline.tuning import cost_model
from cgcompile.targets.architectures import arch
from cgcompile.transforms.few_rows import decompositions as shared
from tests.helpers.raising import raises

H200 = arch("sm_90")


class Attention(nn.Module):
    """Token ids -> logits of the last token, with one transformer block."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(50, width)
        self.norm = nn.LayerNorm(width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        return self.head((x + mixed)[:, -1])


class Of(nn.Module):
    """A function of a module with a weight, a buffer and a literal, and of an input."""

    def __init__(self, function: Callable[[Of, torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("calls", torch.zeros(1))
        self.scale = torch.arange(8.0)

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randn(batch, *shape, dtype=dtype),)


def ids(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (batch, 6)),)


def exported(model: nn.Module, inputs: Callable[[int], tuple[torch.Tensor, ...]], batch: int):
    def batch_inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return inputs(batch)

    source = load_source(model.eval(), batch_inputs)
    return export(source, {"batch": tuple(sorted({2, batch}))}).programs.first, sample(source, {"batch": batch}).tensors


def lowered(model: nn.Module, inputs: Callable[[int], tuple[torch.Tensor, ...]], batch: int = 4, **options: object) -> Lowered:
    torch.manual_seed(0)
    program, tensors = exported(model, inputs, batch)
    traced = lower_key(program, (batch,), tensors, H200, **options)  # type: ignore[arg-type]
    consistent(traced, {*program.state_dict, *program.constants})
    return traced


def of(function: Callable[[Of, torch.Tensor], object], **options: object) -> Lowered:
    return lowered(Of(function), floats(8), **options)


def launches(traced: Lowered) -> list[Launch]:
    return [event for event in traced.events if isinstance(event, Launch)]


def consistent(traced: Lowered, weights: set[str]) -> None:
    """Checks every Lowered: typed arguments inside their buffers, lifetimes without gaps, complete kernels."""
    assert {b.name for b in traced.buffers if b.kind == WEIGHT} <= weights | {constant.name for constant in traced.constants}
    assert [b.name for b in traced.buffers if b.kind == INPUT] == [str(i) for i in range(len(traced.inputs))]
    alive: set[int] = set()
    kept = {tensor.pointer.buffer for tensor in traced.outputs}
    for event in traced.events:
        match event:
            case Allocate(buffer=buffer):
                assert traced.buffers[buffer].kind == TEMPORARY and buffer not in alive
                alive.add(buffer)
            case Release(buffer=buffer):
                alive.remove(buffer)
                assert buffer not in kept
            case Launch(arguments=arguments, grid=grid):
                variant = traced.variants[event.variant]
                kinds = [(name, kind) for name, kind in variant.signature if kind != "constexpr"]
                assert len(kinds) == len(arguments) and min(grid) > 0
                for (name, kind), value in zip(kinds, arguments, strict=True):
                    assert isinstance(value, Pointer) == kind.startswith("*")
                    number = value.offset if isinstance(value, Pointer) else value
                    assert name not in variant.divisible or number % 16 == 0
                    if isinstance(value, Pointer):
                        buffer = traced.buffers[value.buffer]
                        assert 0 <= value.offset < max(1, buffer.nbytes)
                        assert buffer.kind != TEMPORARY or value.buffer in alive
    assert {b for b in kept if traced.buffers[b].kind == TEMPORARY} == alive
    assert len(set(traced.variants)) == len(traced.variants)
    assert {launch.variant for launch in launches(traced)} == set(range(len(traced.variants)))
    for variant in traced.variants:
        (function, *helpers) = ast.parse(variant.source).body
        assert isinstance(function, ast.FunctionDef) and function.name == variant.name and not function.decorator_list
        assert [argument.arg for argument in function.args.args] == [name for name, _ in variant.signature]
        assert {name for name, kind in variant.signature if kind == "constexpr"} == {name for name, _ in variant.constants}
        assert all(isinstance(helper, ast.FunctionDef) and helper.decorator_list for helper in helpers)
        assert variant.warps >= 1 and not {"num_warps", "num_stages"} & {name for name, _ in variant.options}
    lifetimes(traced)


# --- the records ----------------------------------------------------------------------------------------------


def test_perceptron() -> None:
    traced = lowered(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)), floats(32))
    first, second = launches(traced)
    relu, last = traced.variants[first.variant], traced.variants[second.variant]
    assert "tl.dot(" in relu.source and "maximum" in relu.source  # the activation is fused into the product
    assert "tl.dot(" in last.source and "maximum" not in last.source
    assert 'input_precision="tf32x3"' in relu.source and "allow_tf32" not in relu.source
    assert relu.selected_by == "heuristic"
    names = {traced.buffers[place.buffer].name for place in (*first.arguments, *second.arguments) if isinstance(place, Pointer)}
    assert {"0", "model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"} <= names
    (tensor,), (output,) = traced.inputs, traced.outputs
    assert (tensor.dtype, tensor.shape, tensor.strides) == ("float32", (4, 32), (32, 1))
    assert (output.dtype, output.shape, output.strides) == ("float32", (4, 10), (10, 1))
    assert traced.buffers[output.pointer.buffer].nbytes == 4 * 10 * 4


def test_variants_are_complete() -> None:
    """Triton compiles them, for this target and an older one."""
    for name in ("sm_80", "sm_90"):
        program, tensors = exported(nn.Sequential(nn.Linear(32, 64), nn.GELU()), floats(32), 4)
        (variant,) = lower_key(program, (4,), tensors, arch(name)).variants
        assert compile_variant(variant, name).image[:4] == b"\x7fELF"


def test_scan_brings_its_helper() -> None:
    traced = of(lambda m, x: torch.cumsum(x, 1))
    (variant,) = traced.variants
    assert len(ast.parse(variant.source).body) == 2 and "@triton.jit\ndef _triton_helper" in variant.source
    assert compile_variant(variant, "sm_90").image


def test_parts_of_a_half_precision_product_are_summed_in_float32() -> None:
    """In torch 2.11 no template of a product supports a result with another dtype than the factors."""
    traced = lowered(nn.Linear(64, 48).half(), floats(64, dtype=torch.float16), split_factor=lambda problem: 2)
    (product,) = [variant for variant in traced.variants if "tl.dot(" in variant.source]
    assert "*fp32" in {kind for _, kind in product.signature}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_attention(dtype: torch.dtype) -> None:
    traced = lowered(Attention().to(dtype), ids)
    sources = [traced.variants[launch.variant].source for launch in launches(traced)]
    assert sum("tl.dot(" in source for source in sources) == 4  # qkv, scores, mix, head
    kinds = {kind for variant in traced.variants for _, kind in variant.signature}
    assert ("*bf16" in kinds) == (dtype == torch.bfloat16) and "*i64" in kinds


def test_float32_is_multiplied_as_three_products_of_tf32() -> None:
    variants = of(lambda m, x: x @ m.weight).variants
    assert 'input_precision="tf32x3"' in variants[0].source


def test_a_computed_factor_is_not_said_to_have_contiguous_rows_where_they_begin_again() -> None:
    hints = "if a and (M >= BLOCK_M and K > 1):\nif b and (N >= BLOCK_N and K > 1):\n"
    assert true_hints(hints, ["arg_A", "arg_B", "out_ptr0"]) == hints
    assert true_hints(hints, ["arg_B", "in_ptr1"]) == hints.replace("M >= BLOCK_M", "M % BLOCK_M == 0")
    assert true_hints(hints, ["arg_A", "in_ptr1"]) == hints.replace("N >= BLOCK_N", "N % BLOCK_N == 0")


def test_the_function_choose_decides() -> None:
    asked: list[cost_model.Problem] = []

    def largest(problem: cost_model.Problem, candidates: object, target: object) -> tuple[int, str]:
        asked.append(problem)
        blocks = [one.block_m * one.block_n for one in candidates]  # type: ignore[attr-defined]
        return blocks.index(max(blocks)), "table"

    traced = lowered(nn.Linear(64, 96), floats(100, 64), choose=largest)
    (variant,), (launch,) = traced.variants, launches(traced)
    assert [(p.kind, p.batch, p.m, p.n, p.k, p.dtype, p.arch) for p in asked] == [("addmm", 1, 400, 96, 64, "float32", "sm_90")]
    sizes = {name: int(size) for name, size in BLOCKS.findall(variant.source)}
    assert sizes["BLOCK_M"] * sizes["BLOCK_N"] >= 128 * 128
    assert launch.grid == (math.ceil(400 / sizes["BLOCK_M"]) * math.ceil(96 / sizes["BLOCK_N"]), 1, 1)
    assert variant.selected_by == "table"


def test_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()).half()
    model = model.to(memory_format=torch.channels_last)
    asked: list[cost_model.Problem] = []

    def choose(problem: cost_model.Problem, *rest: object) -> tuple[int, str]:
        asked.append(problem)
        return cost_model.choose(problem, *rest)  # type: ignore[arg-type]

    def pictures(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 16, 16, 16, dtype=torch.float16).to(memory_format=torch.channels_last),)

    traced = lowered(model, pictures, choose=choose)
    code = [traced.variants[launch.variant].source for launch in launches(traced)]
    assert "tl.dot(" in code[0] and len(code) <= 2  # both are fused into it (torch 2.13), or it is one kernel (2.11)
    assert [(p.kind, p.batch, p.m, p.n, p.k) for p in asked] == [("conv", 1, 4 * 8 * 8, 32, 144)]
    assert traced.inputs[0].strides == (4096, 1, 256, 16)


@pytest.mark.parametrize("kind", ["addmm", "conv"])
def test_a_configuration_that_inductor_does_not_offer_can_be_taken(kind: str) -> None:
    wanted = cost_model.Candidate(block_m=32, block_n=16, block_k=32, stages=6, warps=1, group=3 if kind == "addmm" else 0)
    offers: list[cost_model.Candidate] = []

    def choose(problem: cost_model.Problem, candidates: list[cost_model.Candidate], *rest: object) -> tuple[int, str]:
        offers.extend(candidates)
        return list(candidates).index(wanted), "table"

    model: nn.Module = nn.Linear(64, 96) if kind == "addmm" else nn.Conv2d(16, 32, 3).half()
    inputs = floats(100, 64) if kind == "addmm" else lambda batch: (torch.randn(batch, 16, 16, 16, dtype=torch.float16),)
    traced = lowered(model, inputs, choose=choose, more=lambda problem: [wanted])
    assert offers.count(wanted) == 1 and offers.index(wanted) == len(offers) - 1
    (variant,) = [variant for variant in traced.variants if "tl.dot(" in variant.source]
    sizes = {name: int(size) for name, size in BLOCKS.findall(variant.source)}
    assert (sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["BLOCK_K"]) == (32, 16, 32)
    assert (variant.stages, variant.warps, variant.selected_by) == (6, 1, "table")


def test_integer_product_with_unsigned_factor() -> None:
    a = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    b = (torch.arange(512) * 7 % 255 - 127).to(torch.int8).reshape(32, 16)
    assert torch.equal(decompositions.integer_product(a, b), a.to(torch.int32) @ b.to(torch.int32))
    assert decompositions.integer_product(a.to(torch.int8), b) is NotImplemented


def test_changed_buffer_is_written_in_place() -> None:
    def count(m: Of, x: torch.Tensor) -> torch.Tensor:
        m.calls.add_(1)
        return x * m.scale + m.calls

    traced = of(count, writes=True)
    (calls,) = [i for i, buffer in enumerate(traced.buffers) if buffer.name.endswith("calls")]
    written = [
        name
        for launch in launches(traced)
        for (name, kind), value in zip(traced.variants[launch.variant].signature, launch.arguments, strict=False)
        if isinstance(value, Pointer) and value.buffer == calls
    ]
    assert any(name.startswith(("out_ptr", "in_out_ptr")) for name in written)


def test_outputs_may_be_inputs_views_and_weights() -> None:
    traced = of(lambda m, x: (x, x[:, 2::2], m.weight, x + 1))
    alias, view, weight, temporary = traced.outputs
    (position,) = [i for i, buffer in enumerate(traced.buffers) if buffer.kind == INPUT]
    assert alias == traced.inputs[0]
    assert view == replace(alias, pointer=Pointer(buffer=position, offset=8), shape=(4, 3), strides=(8, 2))
    assert traced.buffers[weight.pointer.buffer].name == "model.weight"
    assert traced.buffers[temporary.pointer.buffer].kind == TEMPORARY


def test_no_operation_at_all() -> None:
    traced = of(lambda m, x: (x, m.weight))
    assert traced.events == () and traced.variants == ()
    assert [traced.buffers[tensor.pointer.buffer].name for tensor in traced.outputs] == ["0", "model.weight"]


SUBPROCESS = """
import hashlib, sys, torch
sys.path[:0] = {path!r}
from tests.cpu.offline.test_lower import Attention, ids, lowered
torch.manual_seed(0)
print(hashlib.sha256(repr(lowered(Attention(), ids, 3)).encode()).hexdigest())
"""


def test_equal_in_every_process() -> None:
    def run(seed: str) -> str:
        code = SUBPROCESS.format(path=[os.getcwd(), *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout

    torch.manual_seed(0)
    here = hashlib.sha256(repr(lowered(Attention(), ids, 3)).encode()).hexdigest()
    assert run("1").strip() == here


# --- what is refused ------------------------------------------------------------------------------------------


def test_library_operations_are_named_with_their_lines() -> None:
    with raises("operator-without-kernel") as caught:
        of(function := lambda m, x: (torch.digamma(x), torch.linalg.inv(x.T @ x)))
    assert "digamma" in str(caught.value) and "linalg_inv" in str(caught.value)
    assert f"test_lower.py:{function.__code__.co_firstlineno}" in str(caught.value)


def test_shape_that_depends_on_data() -> None:
    with raises("operator-without-kernel", match=r"nonzero.*test_lower.py:\d+.*depends on data"):
        of(lambda m, x: torch.nonzero(x > 0).sum() + x)


@pytest.mark.parametrize("function", [torch.rand_like, lambda x: F.dropout(x, 0.5, True)], ids=["rand", "dropout"])
def test_randomness(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with raises("random-operation", match="rand"):
        of(lambda m, x: x + function(x))


def test_what_is_written_to_is_named_and_nothing_else() -> None:
    for function, names in (
        (lambda m, x: x.mul_(2) + 1, [(INPUT, "0")]),
        (lambda m, x: x.mul(2) + m.calls, []),
        (lambda m, x: (m.calls.add_(1), x[0].add_(m.calls[0]), x * 2)[-1], [(WEIGHT, "model.calls"), (INPUT, "0")]),
    ):
        traced = of(function, writes=True)
        assert [(traced.buffers[index].kind, traced.buffers[index].name) for index in traced.written] == names


def test_running_statistics_are_written_though_no_schema_says_so() -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("var", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, self.mean, self.var, training=True)

    traced = lowered(Normalized(), floats(8), writes=True)
    assert [traced.buffers[index].name for index in traced.written] == ["model.mean", "model.var"]


def test_changed_buffer_in_shared_memory() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.zeros(16)  # its two halves are buffers: torch.export tracks writes to only one of them
            self.register_buffer("first", both[:8])
            self.register_buffer("second", both[8:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.add_(1)
            return x + self.first + self.second.sum()

    with raises("state-shared", match=r"first.*second"):
        lowered(Shared(), floats(8), writes=True)


class Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


def test_control_flow() -> None:
    """`retrace` refuses branches and loops, because a lowering splits them off before."""
    program, tensors = exported(Choosing(), floats(8), 4)
    with raises("operator-without-kernel", match="control flow"), fake_device.fake_device(H200):
        retrace(program, tensors)


def test_what_fails_while_it_is_traced_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("The tensor has no data\n    return torch.empty(/usr/lib/torch/x.py)\n" + "more of it " * 99)

    monkeypatch.setitem(REPLACED, torch.ops.aten.relu.default, broken)
    program, tensors = exported(nn.ReLU(), floats(8), 4)
    text = r"relu.* cannot be traced for cuda: RuntimeError: The tensor has no data$"
    with raises("lowering-broken", match=text) as caught, fake_device.fake_device(H200):
        retrace(program, tensors)
    assert "--fallback-op aten.relu" in caught.value.hint


def test_tensors_that_do_not_fit() -> None:
    program, tensors = exported(nn.Linear(8, 8), floats(8), 4)
    with raises("inputs-unlike", match="float64"):
        lower_key(program, (4,), (tensors[0].double(),), H200)
    with raises("inputs-unlike", match="1 tensors"):
        lower_key(program, (4,), (*tensors, *tensors), H200)


# --- the fake device ----------------------------------------------------------------------------------------


def replaced() -> dict[str, object]:
    return {f"{r.owner}.{r.name}": fake_device._find(r.owner).__dict__.get(r.name) for r in fake_device._replacements(H200)}


def test_everything_is_put_back() -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    before = replaced()
    with pytest.raises(ZeroDivisionError), fake_device.fake_device(H200):
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
        assert all(value is not before[name] for name, value in replaced().items())
        raise ZeroDivisionError
    assert replaced() == before
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert not torch.cuda.is_available()


def test_fake_devices_of_different_targets() -> None:
    """A target does not see state that torch has cached for another target."""
    from torch._inductor.runtime.hints import DeviceProperties

    seen = []
    for name in ("sm_80", "sm_90", "sm_80"):
        with fake_device.fake_device(arch(name)):
            seen.append(DeviceProperties.create(torch.device("cuda", 0)).cc)
    assert seen == [80, 90, 80]


def test_a_torch_without_a_name() -> None:
    import torch._subclasses.fake_tensor as module

    with mock.patch.object(module, "init_gpu_context", create=True):
        del module.init_gpu_context
        with raises("torch-unsupported", match="init_gpu_context.*2.13"), fake_device.fake_device(H200):
            pass
        module.init_gpu_context = None  # the patch removes it
    assert not torch.cuda.is_available()


WRAPPER = """
from torch._inductor.async_compile import AsyncCompile
empty_strided_cuda = reinterpret_tensor = None
def call(args):
    a, = args
    args.clear()
    buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
    buf0.zero_()
    buf1 = reinterpret_tensor(buf0, (2, 2), (2, 1), 4); del buf0  # reuse
    buf2 = empty_strided_cuda((2, 2), (2, 1), torch.float32)
    buf2.copy_(buf1)
    del buf1
    return (buf2, )
import torch
"""


def test_wrapper_without_kernels() -> None:
    """A view keeps its buffer alive; fills and copies become separate events."""
    with fake_device.fake_device(H200):
        lowered, _ = record_calls((), WRAPPER, [torch.empty(1)], [(INPUT, "0")], lambda source: pytest.fail("no kernel"))
    assert lowered.events == (
        Allocate(buffer=1),
        Fill(target=Pointer(buffer=1, offset=0), value=0, element=1, count=32),
        Allocate(buffer=2),
        Copy(source=Pointer(buffer=1, offset=16), target=Pointer(buffer=2, offset=0), nbytes=16),
        Release(buffer=1),
    )
    assert lowered.outputs[0].pointer == Pointer(buffer=2, offset=0)


# --- decompositions to operators that have a kernel in Inductor ------------------------------------------------

CONVOLUTIONS = {
    # x, weight, stride, padding, dilation, transposed, output_padding, groups
    "1d": ((2, 4, 9), (6, 4, 3), [2], [1], [1], False, [0], 1),
    "depthwise": ((2, 4, 9), (8, 1, 3), [1], [2], [1], False, [0], 4),
    "depthwise dilated": ((2, 4, 9, 8), (4, 1, 3, 2), [2, 1], [2, 0], [2, 3], False, [0, 0], 4),
    "depthwise long": ((2, 4, 60), (4, 1, 19), [2], [9], [2], False, [0], 4),
    "dilated": ((2, 4, 9, 8), (6, 4, 3, 2), [2, 1], [1, 2], [2, 3], False, [0, 0], 1),
    "dilated groups": ((2, 4, 9, 8), (6, 2, 3, 2), [1, 2], [1, 2], [2, 1], False, [0, 0], 2),
    "transposed": ((2, 4, 5), (4, 6, 3), [2], [1], [1], True, [1], 1),
    "transposed groups": ((2, 4, 5, 6), (4, 3, 3, 2), [3, 2], [1, 0], [1, 2], True, [2, 1], 2),
    "transposed, more padding than kernel": ((2, 4, 8), (4, 6, 2), [1], [2], [1], True, [0], 1),
    "three axes": ((1, 2, 5, 6, 7), (2, 2, 2, 3, 2), [1, 2, 1], [0, 1, 1], [2, 1, 1], False, [0, 0, 0], 1),
}


@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(case: tuple) -> None:
    x, weight, *settings = case
    torch.manual_seed(0)
    operands = torch.randn(x), torch.randn(weight), torch.randn(weight[1] * settings[5] if settings[3] else weight[0])
    actual, expected = convolutions.convolution(*operands, *settings), torch.convolution(*operands, *settings)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_depthwise_convolution_is_one_kernel() -> None:
    """This includes results with many positions, and consumers of another shape, such as tokens with a class token before them."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            around = self.convolution(x[:, 1:].transpose(1, 2).unflatten(2, (8, 8)))
            return self.norm(torch.cat([x[:, :1], around.flatten(2).transpose(1, 2)], 1))

    traced = lowered(Positions().eval(), floats(65, 16), 2)
    assert len(launches(traced)) == 2


def test_convolutions_with_a_template_are_left() -> None:
    arguments = torch.randn(2, 16, 9, 9), torch.randn(6, 16, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    assert convolutions.convolution(*arguments) is NotImplemented


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "stride", "padding"),
    [(3, 8, 7, 2, 3), (8, 5, 3, 1, 0), (256, 32, 3, 1, 1), (2048, 24, 1, 1, 0)],
    ids=["picture", "few channels", "few blocks", "one position"],
)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
def test_convolutions_as_one_product(
    channels: int, out: int, kernel: int, stride: int, padding: int, form: torch.memory_format
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, channels, 12, 13).to(memory_format=form)
    weight, bias = torch.randn(out, channels, kernel, kernel).to(memory_format=form), torch.randn(out)
    actual = convolutions.convolution(x, weight, bias, [stride], [padding], [1], False, [0], 1)
    torch.testing.assert_close(actual, F.conv2d(x, weight, bias, stride, padding), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 7), (5, 1, 7), (3, 4, 0)], ids=str)
def test_products_as_sums(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = (torch.randn(m, k) * 9).to(dtype), (torch.randn(k, n) * 9).to(dtype)
    added = torch.ones(n, dtype=dtype)
    torch.testing.assert_close(shared.product(a, b), a @ b)
    torch.testing.assert_close(shared.product(a.expand(2, m, k), b.expand(2, k, n)), (a @ b).expand(2, m, n))
    torch.testing.assert_close(shared.added_product(added, a, b, beta=2, alpha=3), torch.addmm(added, a, b, beta=2, alpha=3))


def test_the_vector_of_a_product_is_computed_once() -> None:
    """The activation of the vector is not recomputed for every element of the result."""
    traced = lowered(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)), floats(32), batch=1)
    first, second = [traced.variants[launch.variant].source for launch in launches(traced)]
    assert "erf(" in first and "erf(" not in second and "tl.sum(" in second


def test_programs_of_a_product_of_one_row_are_few_enough_to_begin_at_once() -> None:
    """This holds even if each program of the kernel computes the norm before the product. Inductor would start 4096 programs."""
    model = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512))
    traced = lowered(model, floats(512), batch=1)
    first, second = launches(traced)
    assert first.grid == (2048, 1, 1) and second.grid == (512, 1, 1)
    assert [traced.variants[launch.variant].warps for launch in (first, second)] == [1, 8]
    assert not any("r0_offset in" in traced.variants[launch.variant].source for launch in (first, second))


@pytest.mark.parametrize(("causal", "mask"), [(False, ""), (True, ""), (False, "bool"), (False, "float")])
def test_attentions(causal: bool, mask: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    masks = {"": None, "bool": torch.rand(5, 7) > 0.4, "float": torch.randn(2, 1, 5, 7)}
    if mask == "bool":
        masks["bool"][1] = False  # a fully masked row gives zeros
    options = {"attn_mask": masks[mask], "is_causal": causal, "scale": 0.3, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(decompositions.attention(query, key, value, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags(mode: str, last: bool, dtype: torch.dtype) -> None:
    weight, indices = torch.randn(20, 4, dtype=dtype), torch.randint(0, 20, (9,))
    offsets = torch.tensor([0, 3, 3, 7, 9] if last else [0, 3, 3, 7])
    number = ("sum", "mean", "max").index(mode)
    expected = F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=last, padding_idx=2)
    actual = decompositions.embedding_bag(weight, indices, offsets, mode=number, include_last_offset=last, padding_idx=2)[0]
    torch.testing.assert_close(actual, expected)


HARD = torch.tensor([[math.inf, 1.0, 1.0, math.nan, -math.inf, 0.0], [2.0, -math.inf, -math.inf, -math.inf, 3.0, -0.0]])


@pytest.mark.parametrize("descending", [False, True])
def test_sort_counts(descending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sort, "SORTED", 4)
    for x in (HARD, torch.randint(-3, 3, (5, 40)), torch.randn(3, 7, 5)):
        actual = sort.sort(x, dim=1, descending=descending, stable=True)
        torch.testing.assert_close(actual, tuple(torch.sort(x, dim=1, descending=descending, stable=True)), equal_nan=True)
    assert sort.sort(torch.randn(4), dim=0) is NotImplemented


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_topk_looks(k: int, largest: bool) -> None:
    for x in (HARD[:, : max(k, 6)] if k <= 6 else torch.randn(2, 30), torch.randint(-3, 3, (5, 40))):
        values, where = sort.topk(x, k, 1, largest)
        torch.testing.assert_close(values, torch.topk(x, k, 1, largest)[0], equal_nan=True)
        torch.testing.assert_close(x.gather(1, where), values, equal_nan=True)
        assert all(len(set(row)) == k for row in where.tolist())


EXTREMES = torch.iinfo(torch.int64)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("k", [17, 40])
def test_topk_of_a_vocabulary_is_that_of_its_pieces(k: int, largest: bool) -> None:
    """Of equal elements the first one comes first, and NaN is the largest. Padding of the pieces is never selected."""
    words = torch.randn(2, 30001)
    numbers = torch.randint(-9, 9, (2, 30001))
    numbers[:, ::7], numbers[:, ::11] = EXTREMES.max, EXTREMES.min
    holes = words.clone()
    holes[0, 5:], holes[1, ::2] = math.nan, -math.inf
    for x in (words, words.round(), numbers, holes, torch.full_like(words, math.nan), torch.full_like(words, math.inf)):
        values, where = sort.topk(x, k, 1, largest)
        expected, places = torch.sort(x, dim=1, descending=largest, stable=True)
        torch.testing.assert_close(values, expected[:, :k], equal_nan=True)
        assert torch.equal(where, places[:, :k])
    values, where = sort.topk(words.T, k, 0, largest)
    assert torch.equal(values, torch.topk(words.T, k, 0, largest).values)


def test_distances_and_trilinear() -> None:
    a, b = torch.randn(2, 5, 3), torch.randn(2, 4, 3)
    for p in (1.0, 2.0, math.inf):
        torch.testing.assert_close(decompositions.distances(a, b, p, None), torch.cdist(a, b, p))
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    weight = torch.randn(6, 3, 4)
    torch.testing.assert_close(decompositions.trilinear(x, weight, y, [1, 3], [0], [1, 2], [2, 3]), F.bilinear(x, y, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histograms(dtype: torch.dtype) -> None:
    """Elements lie outside the range, at its ends, and inside."""
    x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.9, 3.0, 3.1, 1.0], dtype=dtype)
    for bins in (1, 3, 4, 7):
        torch.testing.assert_close(decompositions.histogram(x, bins, 0, 3), torch.histc(x, bins, 0, 3))
    assert decompositions.histogram(x, 4) is NotImplemented
