"""A language model written by hand, where `cgcompile build FOLDER` is not enough: weights of eight bits, other sizes of the cache.

    CAUSAL_LM=~/models/Qwen3-0.6B cgcompile build examples/causal_lm.py --sizes prefill:batch=1 --sizes prefill:seq=128 \\
        --sizes decode:batch=1,8 --sizes choose:batch=1,8 --sizes generate:batch=1,8 --sizes blocks=64

`prefill`, `decode`, `choose` and `generate` are explained in cgcompile/language_models/causal_lm.py; `cgcompile serve` calls them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cgcompile.language_models.causal_lm import CausalLM
from cgcompile.language_models.example_inputs import ExampleInputs
from cgcompile.language_models.kernels.int8 import int8_weights
from cgcompile.language_models.networks import folder_configuration, folder_network

FOLDER = os.path.expanduser(os.environ.get("CAUSAL_LM", "~/models/Qwen3-0.6B"))
PAGES, SLOTS, TURNS = 1025, 9, 32


def model() -> torch.nn.Module:
    """The model with a cache of PAGES pages of 16 tokens, of which page 0 is nobody's, and slots for SLOTS - 1 texts."""
    return CausalLM(int8_weights(folder_network(FOLDER, torch.bfloat16)), PAGES, SLOTS, TURNS).eval()


def entries() -> dict[str, Callable[..., tuple[object, ...]]]:
    """The methods that are called, and what makes their inputs."""
    return ExampleInputs(config=folder_configuration(FOLDER), pages=PAGES, slots=SLOTS, turns=TURNS).entries()
