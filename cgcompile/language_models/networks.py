"""Creates networks of transformers with attention over pages, from a folder in the Hub's layout or from a configuration."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from ..errors import ModelError
from .architectures.text_half import maker, without_other_parts
from .attention import NAME
from .comparison.probe import takes_paged
from .comparison.refusal import error_text

PLAIN_ROPES = {"default", "mrope", "su"}
"""Rope types that the code of a model computes; transformers has no function for them."""


@contextmanager
def quiet() -> Iterator[None]:
    """Disables transformers' warnings and progress bars in the block; errors in a folder are still raised."""
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def folder_configuration(folder: str | os.PathLike[str]) -> PretrainedConfig:
    """Returns the configuration of a folder.  Raises folder-invalid if the installed transformers does not know it."""
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        problem = "transformers cannot read config.json"
        if "does not recognize this architecture" in str(error):
            problem = "this version of transformers does not know the model_type in config.json"
            raise ModelError("folder-invalid", f"{folder}: {problem}", "pip install -U transformers") from None
        raise ModelError("folder-invalid", f"{folder}: {problem}: {error_text(error)}") from error
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if kind is not None and kind not in ROPE_INIT_FUNCTIONS and kind not in PLAIN_ROPES:
            rope_types = ", ".join(sorted({*ROPE_INIT_FUNCTIONS, "default"}))
            problem = f"rope type {kind!r} in config.json: expected one of {rope_types}"
            raise ModelError("folder-invalid", f"{folder}: {problem}", "a newer transformers may know it")
    return config


def folder_network(folder: str | os.PathLike[str], dtype: torch.dtype) -> PreTrainedModel:
    """Loads a folder in eval mode, with safetensors weights and attention over pages.  Raises folder-invalid."""
    config = folder_configuration(folder)
    options: dict[str, Any] = {"config": config, "dtype": dtype, "local_files_only": True, "use_safetensors": True}
    options |= implementations(config)
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # mismatches are refused below with their names
    try:
        with quiet():
            network, info = (maker(config) or AutoModelForCausalLM).from_pretrained(folder, **options)
    except Exception as error:
        raise ModelError("folder-invalid", f"{folder}: transformers cannot load it: {error_text(error)}") from error
    for name, shape, expected in sorted(info["mismatched_keys"])[:1]:
        problem = f"tensor {name} has the shape {tuple(shape)}, and the configuration says {tuple(expected)}"
        raise ModelError("folder-invalid", f"{folder}: {problem}", "config.json and the weights are of two models")
    if missing := sorted(info["missing_keys"]):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError("folder-invalid", f"{folder}: the weights lack {missing[0]}{others}")
    return without_collection(without_other_parts(network).eval())


def implementations(config: PretrainedConfig) -> dict[str, str]:
    """Returns the options that select the attention and the experts of a model."""
    return {"attn_implementation": NAME if takes_paged(config) else "eager", "experts_implementation": "batched_mm"}


def over_pages(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Creates the model of a configuration, with random weights and attention over pages."""
    network = (maker(config) or AutoModelForCausalLM).from_config(config, dtype=dtype, **implementations(config))
    return without_collection(without_other_parts(network).eval())


def without_collection(network: PreTrainedModel) -> PreTrainedModel:
    """Removes the decorators that collect hidden states, because they write to an object outside the call.

    torch 2.11 refuses a `while_loop` whose body does that.  The decorators (transformers 5.17, 5.23) otherwise only set default
    arguments, which CausalLM passes.
    """
    for module in network.modules():
        forward = type(module).forward
        while hasattr(forward, "__wrapped__") and not forward.__code__.co_filename.endswith("output_capturing.py"):
            forward = forward.__wrapped__
        if hasattr(forward, "__wrapped__"):
            module.forward = MethodType(inspect.unwrap(forward), module)
    return network
