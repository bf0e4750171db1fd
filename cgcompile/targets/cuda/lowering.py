"""Lowering for a cuda target: an exported program's module -> a callable that launches the kernels to be captured.

Levels: `eager` (PyTorch's own kernels), `inductor` (its default options), `max-autotune` (Inductor with benchmarked matrix
products and convolutions).  Inductor lowers once per int_key with every size a constant (`specialize="size"`), or with symbols for
the declared dimensions (`specialize="shared"`), so that the kernels of the first key come out of the cache for the others.  CUDA
graphs of Inductor are off: the recorder makes its own.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch._inductor.async_compile
from torch.utils._pytree import tree_leaves

from .inductor import Compiled, compile_graph

OPTIONS = {"triton.cudagraphs": False, "use_static_cuda_launcher": False, "dynamic_scale_rblock": False}
"""Inductor's options at every level.  Two recordings must get the same kernels from the cache.  In torch 2.11 two things tune anew
in every process: the static launcher (by coordinate descent), and reductions whose best configuration Inductor added while it ran
("dynamic_scale_rblock")."""


IMPORTED_LATE = (
    "torch._inductor.compile_fx", "torch._inductor.choices", "torch._inductor.kernel_template_choice",
    "torch._inductor.codegen.triton", "torch._inductor.codegen.cuda_combined_scheduling", "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.fx_passes.post_grad", "torch._inductor.fx_passes.joint_graph", "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.kernel.mm", "torch._inductor.kernel.bmm", "torch._inductor.kernel.conv", "torch._dynamo.backends.inductor",
    "torch._functorch._aot_autograd.subclass_codegen", "triton.compiler", "triton.backends.nvidia.compiler",
    "triton.backends.nvidia.driver", "setuptools", "cgcompile.transforms.few_rows.fewer_kernels",
    "cgcompile.transforms.few_rows.row_blocks", "cgcompile.transforms.inductor_passes",
)  # fmt: skip
"""What a first lowering imports (torch 2.11, 2.13)."""

HASHES = (
    ("torch._inductor.codecache", "torch_key"), ("torch._inductor.runtime.triton_compat", "triton_key"),
)  # fmt: skip
"""Private functions of torch (2.11, 2.13) that hash the sources of torch and of Triton, and keep the result."""


def lower(module: torch.fx.GraphModule, level: str, specialize: str) -> Callable[..., Any]:
    """A callable that takes what `module` takes.  At level `eager` it is the module; else it is compiled at its first call, gives
    the outputs as a flat tuple, and keeps the weights where they lie then.  Its first call raises what `compile_graph` does."""
    if level == "eager":
        return module
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") if level == "max-autotune" else {}
    compiled: list[Compiled] = []

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        leaves = tree_leaves((args, kwargs))
        if not compiled:
            compiled.append(compile_graph(keep_long_recurrences(module), leaves, {**options, **OPTIONS}, specialize == "shared"))
        return compiled[0](*leaves)

    return call


def import_compiler() -> None:
    """Imports what Inductor and Triton would import for the first kernel, and hashes their sources.  CUDA is not started."""
    for name in IMPORTED_LATE:
        with suppress(ImportError):  # another version of torch has other modules
            import_module(name)
    for name, function in HASHES:
        with suppress(ImportError, AttributeError):
            getattr(import_module(name), function)()


def start_compilers(processes: int) -> None:
    """Starts so many processes that compile kernels, unless the user says how many, before there is anything to lower.  They are
    forked from this one."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # which Inductor has read
        torch._inductor.config.compile_threads = processes
    if processes > 1:
        torch._inductor.async_compile.AsyncCompile.warm_pool()


def choose_without_timing() -> None:
    """For this process: Inductor takes the configuration of a kernel by rules.  Two processes whose kernels differ in the number of
    rows of state have no common entry in the cache, and would time, and choose, each for itself."""
    torch._inductor.config.deterministic = True
    torch._inductor.config.triton.autotune_pointwise = False


def repair(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`module`, changed in place so that Inductor lowers it rightly.  What it computes in eager mode stays the same.  torch before
    2.13 decomposes `aten.lstm.input` on CUDA to hidden states with an extra axis (pytorch issue 151200).  They are viewed with the
    shapes of the initial states."""
    for node in [n for n in module.graph.nodes if n.target is torch.ops.aten._assert_tensor_metadata.default]:
        module.graph.erase_node(node)  # what export saw holds by the signature; on fake tensors "cuda" is not "cuda:0" (torch 2.11)
    for node in [n for n in module.graph.nodes if n.target is torch.ops.aten.lstm.input]:
        for state in [u for u in node.users if u.target is operator.getitem and u.args[1] in (1, 2)]:
            with module.graph.inserting_after(state):
                viewed = module.graph.call_function(torch.ops.aten.view_as.default, (state, node.args[1][state.args[1] - 1]))
            state.replace_all_uses_with(viewed, delete_user_cb=lambda user, viewed=viewed: user is not viewed)
    module.recompile()
    return module


SHORT = 32
"""Steps of a recurrent layer that Inductor may write out, one after the other, in all its layers and directions together."""

RECURRENT = {
    getattr(torch.ops.aten, name).input: name for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}  # fmt: skip
"""Recurrent layers over a whole sequence, with the arguments of `cgcompile::recurrent`."""

_LIBRARY = torch.library.Library("cgcompile", "FRAGMENT")
_LIBRARY.define(
    "recurrent(str kind, Tensor x, Tensor[] states, Tensor[] weights, bool has_biases, int layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first) -> Tensor[]"
)


def _recurrent(kind: str, x: torch.Tensor, states: list[torch.Tensor], *more: Any) -> list[torch.Tensor]:
    outputs = getattr(torch, kind)(x, states if kind == "lstm" else states[0], *more)
    return [output.clone(memory_format=torch.contiguous_format) for output in outputs]


def _recurrent_shapes(
    kind: str, x: torch.Tensor, states: list[torch.Tensor], weights: Any, has_biases: bool, layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> list[torch.Tensor]:  # fmt: skip
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty(*x.shape[:-1], width), *[state.new_empty(state.shape) for state in states]]


_LIBRARY.impl("recurrent", _recurrent, "CompositeExplicitAutograd")
torch.library.register_fake("cgcompile::recurrent", _recurrent_shapes, lib=_LIBRARY)


def keep_long_recurrences(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """`module`, changed in place so that PyTorch's own kernels (cuDNN's) run recurrent layers of more than `SHORT` steps.

    AOTAutograd writes them out step by step (torch/_decomp/decompositions.py, 2.11 and 2.13): kernels, and minutes of compiling,
    grow with the sequence.
    """
    for node in [node for node in module.graph.nodes if node.target in RECURRENT]:
        x, states, _, _, layers, _, _, bidirectional, batch_first = node.args
        steps = x.meta["val"].shape[1 if batch_first else 0]
        if isinstance(steps, int) and steps * layers * (2 if bidirectional else 1) <= SHORT:
            continue
        kind = RECURRENT[node.target]
        node.target = torch.ops.cgcompile.recurrent.default
        node.args = (kind, x, states if kind == "lstm" else [states], *node.args[2:])
    module.recompile()
    return module
