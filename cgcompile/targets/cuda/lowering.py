"""Lowering for a cuda target: an exported program's module -> a callable that launches the kernels to be captured.

Levels: `eager` (PyTorch's own kernels), `inductor` (torch.compile's default), `max-autotune` (Inductor with benchmarked
matrix products and convolutions).  Inductor lowers once per int_key with every size a constant (`specialize="size"`), or
once for all (`specialize="shared"`).  CUDA graphs of torch.compile are off: the recorder makes its own.

Public torch interfaces but for `torch._dynamo.reset`, `torch._dynamo.exc.TorchDynamoException` and
`torch._inductor.exc.InductorError` (present in torch 2.11 and 2.13).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

OPTIONS = {"triton.cudagraphs": False, "use_static_cuda_launcher": False, "dynamic_scale_rblock": False}
"""Inductor's options at every level.  Two recordings must get the same kernels from the cache.  In torch 2.11 two things tune anew
in every process: the static launcher (by coordinate descent), and reductions whose best configuration Inductor added while it ran
("dynamic_scale_rblock")."""


def lower(module: torch.nn.Module, level: str, specialize: str) -> Callable[..., Any]:
    """A callable with the module's signature.  Compilation happens at its first call; see `lowering_errors`."""
    if level == "eager":
        return module
    if specialize == "size":
        torch._dynamo.reset()  # each key is a compilation of its own, and the limit of recompilations is never met
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") if level == "max-autotune" else {}
    compiled: Callable[..., Any] = torch.compile(
        module, fullgraph=True, dynamic=specialize == "shared", options={**options, **OPTIONS}
    )
    return compiled


def prepare_compiler() -> None:
    """Imports the compiler and starts the processes that it compiles kernels in, before there is anything to lower."""
    import torch._inductor.async_compile
    import torch._inductor.compile_fx

    # a process for every thread, from torch 2.8 on; without it they start when the first kernel is compiled
    getattr(torch._inductor.async_compile, "maybe_warm_pool", lambda: None)()


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


def lowering_errors() -> tuple[type[Exception], ...]:
    """What the first call of a lowered program raises when the compiler fails."""
    import torch._dynamo.exc
    import torch._inductor.exc

    return torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError


def cache_environment(folder: Path) -> dict[str, str]:
    """Environment variables that keep every compiler cache inside `folder`, which processes share, and ask no remote cache."""
    folder = folder.absolute()
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder / "inductor"),
        "TRITON_CACHE_DIR": os.fspath(folder / "triton"),
        "CUDA_CACHE_PATH": os.fspath(folder / "driver"),
        "TRITON_DISABLE_LINE_INFO": "1",  # images hold no paths of the build, and are smaller
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE": "0",
    }
