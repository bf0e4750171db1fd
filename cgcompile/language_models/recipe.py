"""Makes the `Recipe` of a folder in the Hub's layout, whose model is compared with transformers before a build."""

from __future__ import annotations

import torch

from ..model.quantization.stored_weights import Quantization
from ..model.source import Recipe
from ..targets.choice import Options
from .architectures.adapters import AdaptedLM, Alike, adapter_inputs
from .causal_lm import CausalLM
from .comparison.probe import takes_paged
from .comparison.texts import PAGES, SLOTS, TURNS, compare_small, compare_weights
from .example_inputs import ExampleInputs
from .folder import read_folder
from .kernels.int8_network import int8_network, quantized
from .networks import folder_configuration, folder_network
from .settings import Settings, settings_for


def language_model(folder: str, options: Options, gpu: int | None) -> tuple[Recipe, Settings]:
    """Returns the recipe and the settings of a folder.

    For `gpu` and errors see `settings_for`.  Creating the model raises folder-invalid, language-model-refused.
    """
    model_folder = read_folder(folder)
    config = folder_configuration(folder)
    settings = settings_for(model_folder, options, gpu, pieces=takes_paged(config))
    model = ComparedModel(folder, settings, options.weights)
    entries = ExampleInputs(
        config=config, pages=settings.pages, slots=settings.slots, turns=settings.turns, adapters=settings.adapters
    ).entries()
    code = CausalLM.__module__
    if settings.adapters:
        code, entries = AdaptedLM.__module__, entries | {"load_adapter": model.adapter_inputs}
    recipe = Recipe(name=model_folder.name, label=folder, code=code, model=model, entries=entries, state=settings.state)
    return recipe, settings


class ComparedModel:
    """Makes the model of a folder.  Only the first call compares it with transformers; forked processes skip the comparison."""

    def __init__(self, folder: str, settings: Settings, weights: str | None) -> None:
        self._folder, self._settings, self._weights, self._compared = folder, settings, weights, False
        self._quantization: Quantization | None = None
        self._alike: list[Alike] = []

    def __call__(self) -> CausalLM:
        """Raises language-model-refused if the model's text differs from transformers', folder-invalid as `folder_network`."""
        settings = self._settings
        if not self._compared:
            compare_small(folder_configuration(self._folder), small)
        network = folder_network(self._folder, getattr(torch, settings.dtype))
        if not self._compared:
            compare_weights(network, small)
        self._compared = True
        if self._weights == "int8":
            if self._quantization is None:
                network, self._quantization = quantized(network)
            else:
                network = int8_network(network)
        sizes = settings.pages, settings.slots, settings.turns
        model: CausalLM
        if settings.adapters:
            model = AdaptedLM(network, *sizes, settings.adapters, settings.rank)
            self._alike = model.alike
        else:
            model = CausalLM(network, *sizes)
        model.quantization = self._quantization
        return model.eval()

    def adapter_inputs(self) -> tuple[object, ...]:
        """Returns example inputs of `load_adapter`.  Needs a model, from an earlier call of this object."""
        return adapter_inputs(self._alike, self._settings.adapters, self._settings.rank)


def small(network: torch.nn.Module) -> CausalLM:
    """Returns a model with a small cache for a comparison."""
    return CausalLM(network, PAGES, SLOTS, TURNS)
