"""Errors for models that a paged cache cannot serve: they name the model type, the feature, and a remedy."""

from __future__ import annotations

import traceback

from transformers import PretrainedConfig

from ...errors import ModelError


def refusal(config: PretrainedConfig, feature: str, remedy: str) -> ModelError:
    """Returns the error for a model with this configuration."""
    return ModelError("language-model-refused", f"model_type {config.model_type}: {feature}", remedy)


def error_text(error: BaseException) -> str:
    """Returns the text of an error and the line of transformers that raised it."""
    if isinstance(error, KeyError):
        return f"it looks for {error}, which is not there{place_of(error)}"
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """Returns ` (modeling_llama.py:12)`, the line of transformers that raised an error, or ""."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/models/" in frame.filename]
    return f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
