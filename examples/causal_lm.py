"""A language model with settings that `cgcompile build FOLDER` does not have: 8-bit weights for a GPU, other sizes of the cache.

    CAUSAL_LM=~/models/Qwen3-0.6B cgcompile build examples/causal_lm.py --sizes prefill:batch=1 --sizes prefill:seq=128 \\
        --sizes decode:batch=1,8 --sizes choose:batch=1,8 --sizes generate:batch=1,8 --sizes blocks=64

cgcompile/language_models/causal_lm.py explains `prefill`, `decode`, `choose` and `generate`; `cgcompile serve` calls them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cgcompile.language_models.causal_lm import CausalLM
from cgcompile.language_models.example_inputs import ExampleInputs
from cgcompile.language_models.kernels.int8 import quantize_linear_layers
from cgcompile.language_models.networks import folder_configuration, folder_network

FOLDER = os.path.expanduser(os.environ.get("CAUSAL_LM", "~/models/Qwen3-0.6B"))
PAGES, SLOTS, TURNS = 1025, 9, 32


def model() -> torch.nn.Module:
    """Returns the model with a cache of PAGES pages of 16 tokens (page 0 is never used), and slots for SLOTS - 1 texts."""
    return CausalLM(quantize_linear_layers(folder_network(FOLDER, torch.bfloat16)), PAGES, SLOTS, TURNS).eval()


def entries() -> dict[str, Callable[..., tuple[object, ...]]]:
    """Returns the methods to call, and the functions that make their inputs."""
    return ExampleInputs(config=folder_configuration(FOLDER), pages=PAGES, slots=SLOTS, turns=TURNS).entries()
