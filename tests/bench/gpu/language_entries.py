"""A model file: a folder's language model without `generate`, so that a build takes little time:

    CAUSAL_LM=FOLDER cgcompile build tests/bench/gpu/language_entries.py --sizes prefill:batch=2,8,32 --sizes prefill:seq=64 \\
        --sizes decode:batch=1,8,32,64,128,256 --sizes choose:batch=256 --sizes blocks=256

A load may request any number of pages and slots, at most those of 256 texts of 4,096 tokens.  CAUSAL_LM_DTYPE: bfloat16 by
default.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cgcompile.language_models.causal_lm import CausalLM
from cgcompile.language_models.example_inputs import ExampleInputs
from cgcompile.language_models.networks import folder_configuration, folder_network

FOLDER, DTYPE = os.environ["CAUSAL_LM"], os.environ.get("CAUSAL_LM_DTYPE", "bfloat16")
LANES, BLOCKS = 256, 256
PAGES, SLOTS = 2 * LANES + 1, LANES + 1


def model() -> torch.nn.Module:
    """Returns the model with the fewest pages that a load may request."""
    return CausalLM(folder_network(FOLDER, getattr(torch, DTYPE)), PAGES, SLOTS, 0).eval()


def entries() -> dict[str, Callable[..., tuple[object, ...]]]:
    """Returns the methods that are called, and functions that make their inputs."""
    return ExampleInputs(config=folder_configuration(FOLDER), pages=PAGES, slots=SLOTS, turns=0).entries()


def state() -> dict[str, tuple[str, int]]:
    """Returns the buffers whose number of rows is chosen at load time."""
    return {name: ("pages", LANES * BLOCKS + 1) for name in ("keys_*", "values_*")} | {
        name: ("slots", SLOTS) for name in ("seen", "deferred", "biases")
    }
