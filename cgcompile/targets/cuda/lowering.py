"""Lowering for a GPU: turns an exported program's module into a callable that launches the kernels to capture.

Levels: `eager` (PyTorch's own kernels), `inductor` (its default options), `max-autotune` (Inductor with benchmarked matrix products
and convolutions).  With `specialize="size"`, Inductor lowers once per int_key with constant sizes.  With `specialize="shared"`, the
declared dimensions are symbols, so that later int_keys get the kernels of the first int_key from the cache.  CUDA graphs of
Inductor are off, because the recorder creates the graphs.
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
"""Inductor's options at every level.  Two recordings must get the same kernels from the cache.  In torch 2.11 two features tune
again in every process: the static launcher (by coordinate descent), and reductions for which Inductor adds configurations at run
time ("dynamic_scale_rblock")."""


IMPORTED_LATE = (
    "torch._inductor.compile_fx", "torch._inductor.choices", "torch._inductor.kernel_template_choice",
    "torch._inductor.codegen.triton", "torch._inductor.codegen.cuda_combined_scheduling", "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.fx_passes.post_grad", "torch._inductor.fx_passes.joint_graph", "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.kernel.mm", "torch._inductor.kernel.bmm", "torch._inductor.kernel.conv", "torch._dynamo.backends.inductor",
    "torch._functorch._aot_autograd.subclass_codegen", "triton.compiler", "triton.backends.nvidia.compiler",
    "triton.backends.nvidia.driver", "setuptools", "cgcompile.transforms.few_rows.fewer_kernels",
    "cgcompile.transforms.few_rows.row_blocks", "cgcompile.transforms.inductor_passes",
)  # fmt: skip
"""Modules that the first lowering imports (torch 2.11, 2.13)."""

HASHES = (
    ("torch._inductor.codecache", "torch_key"), ("torch._inductor.runtime.triton_compat", "triton_key"),
)  # fmt: skip
"""Private functions of torch (2.11, 2.13) that hash the sources of torch and of Triton, and cache the result."""


def lower(module: torch.fx.GraphModule, level: str, specialize: str) -> Callable[..., Any]:
    """Returns a callable with the arguments of `module`.  At level `eager` it is the module.  At other levels it returns a flat
    tuple.  Its first call compiles the module for the weights' present addresses, and raises the errors of `compile_graph`."""
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
    """Imports the modules that a first kernel needs, and hashes the sources of torch and Triton.  Does not initialize CUDA."""
    for name in IMPORTED_LATE:
        with suppress(ImportError):  # other versions of torch have other modules
            import_module(name)
    for name, function in HASHES:
        with suppress(ImportError, AttributeError):
            getattr(import_module(name), function)()


def start_compilers(processes: int) -> None:
    """Forks `processes` processes that compile kernels, before lowering begins.  TORCHINDUCTOR_COMPILE_THREADS takes precedence."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # Inductor itself reads the variable
        torch._inductor.config.compile_threads = processes
    if processes > 1:
        torch._inductor.async_compile.AsyncCompile.warm_pool()


def choose_without_timing() -> None:
    """Makes Inductor select kernel configurations by rules in this process.  Kernels that differ in the number of rows of state
    share no cache entry, so two processes would select them by separate timings."""
    torch._inductor.config.deterministic = True
    torch._inductor.config.triton.autotune_pointwise = False


def repair(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Changes `module` in place so that Inductor lowers it correctly, and returns it.  Its results in eager mode do not change.
    torch before 2.13 decomposes `aten.lstm.input` on CUDA to hidden states with an extra axis (pytorch issue 151200).  `repair`
    views these states with the shapes of the initial states."""
    for node in [n for n in module.graph.nodes if n.target is torch.ops.aten._assert_tensor_metadata.default]:
        module.graph.erase_node(node)  # a true assertion that fails on fake tensors: "cuda" is not "cuda:0" (torch 2.11)
    for node in [n for n in module.graph.nodes if n.target is torch.ops.aten.lstm.input]:
        for state in [u for u in node.users if u.target is operator.getitem and u.args[1] in (1, 2)]:
            with module.graph.inserting_after(state):
                viewed = module.graph.call_function(torch.ops.aten.view_as.default, (state, node.args[1][state.args[1] - 1]))
            state.replace_all_uses_with(viewed, delete_user_cb=lambda user, viewed=viewed: user is not viewed)
    module.recompile()
    return module


SHORT = 32
"""The largest number of steps of a recurrent operator that Inductor may unroll, counted over all its layers and directions."""

RECURRENT = {
    getattr(torch.ops.aten, name).input: name for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}  # fmt: skip
"""Operators for recurrent layers over a whole sequence, and the `kind` of each for `cgcompile::recurrent`."""

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
    """Makes PyTorch's own kernels (cuDNN's) run recurrent layers of more than `SHORT` steps.  Changes `module` in place.

    AOTAutograd would unroll them (torch/_decomp/decompositions.py, 2.11 and 2.13).  The number of kernels, and the compile time of
    minutes, would grow with the length of the sequence.
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
