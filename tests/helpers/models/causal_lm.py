"""Language models compared with transformers: an engine that drives their entries, and checks that every family must pass."""

from __future__ import annotations

import random
from typing import Any

import torch

from cgcompile.language_models.causal_lm import STOPS, CausalLM
from cgcompile.language_models.sampling import Sampling
from cgcompile.language_models.settings import PAGE
from tests.helpers.models.language_models import network

FAMILIES = (
    "llama", "qwen2", "qwen2-sliding", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "phi", "opt", "mixtral", "qwen3-moe",
    "gpt-oss",
)  # fmt: skip


PAGES, SLOTS, TURNS = 65, 9, 32
"""Pages and slots of the models here, including the unused page 0 and slot 0; tokens that a loop generates."""


def causal_model(name: str, turns: int = TURNS) -> CausalLM:
    """Returns the model of a named configuration or of a folder."""
    return CausalLM(network(name, torch.float32), PAGES, SLOTS, turns)


def reference(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Returns the tokens that transformers' `generate` appends to a prompt, with its own attention and cache."""
    network = model.network
    network.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt])
        output_ids = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    finally:
        network.set_attn_implementation("paged")
    return output_ids[0, len(prompt) :].tolist()


class Engine:
    """Runs requests over the entries of a model or a bundle, `lanes` of them per call. It assigns pages and slots to requests and
    frees them. With `adapters`, every lane passes an adapter index."""

    def __init__(self, entries: Any, lanes: int = 4, blocks: int = 12, chunk: int = 16, *, adapters: bool = False) -> None:
        self.entries, self.lanes, self.blocks, self.chunk, self.adapters = entries, lanes, blocks, chunk, adapters
        self.free = list(range(1, PAGES))
        self.slots = list(range(1, SLOTS))
        self.texts: dict[Any, dict[str, Any]] = {}

    def add(self, name: Any, prompt: list[int], room: int, adapter: int = 0, **sampling: float) -> None:
        pages = [self.free.pop(random.randrange(len(self.free))) for _ in range(-(-(len(prompt) + room) // PAGE))]
        self.texts[name] = {"read": 0, "tokens": list(prompt), "pages": pages, "slot": self.slots.pop(), "sampling": sampling}
        self.texts[name]["adapter"] = adapter

    def remove(self, name: Any) -> list[int]:
        text = self.texts.pop(name)
        self.free += text["pages"]
        self.slots.append(text["slot"])
        return text["tokens"]

    def _lanes(self, names: list[Any]) -> tuple[Any, ...]:
        """Returns (start, pages, slot, sampling), with the adapter after the slot if adapters are on. Unused lanes have slot 0 and
        page 0."""
        texts = [self.texts[name] for name in names]
        off = self.lanes - len(texts)
        pages = [text["pages"] + [0] * (self.blocks - len(text["pages"])) for text in texts] + [[0] * self.blocks] * off
        plain = dict.fromkeys(Sampling._fields, 0) | {"temperature": 0.0, "top_p": 1.0, "penalty": 1.0, "min_p": 0.0}
        lanes = [{**plain, **text["sampling"]} for text in texts] + [plain] * off
        sampling = Sampling(*[torch.tensor([lane[field] for lane in lanes]) for field in Sampling._fields])
        start, slot, adapter = [torch.tensor([text[field] for text in texts] + [0] * off) for field in ("read", "slot", "adapter")]
        return start, torch.tensor(pages), slot, *([adapter] if self.adapters else []), sampling

    def prefill(self, names: list[Any]) -> dict[str, Any]:
        """Runs one chunk of each text. Appends the next token to a text whose prompt is finished."""
        chunks = [self.texts[name]["tokens"][self.texts[name]["read"] :][: self.chunk] for name in names]
        ids = [tokens + [9] * (self.chunk - len(tokens)) for tokens in chunks] + [[9] * self.chunk] * (self.lanes - len(names))
        count = torch.tensor([len(chunk) for chunk in chunks] + [0] * (self.lanes - len(names)))
        with torch.no_grad():
            outputs = self.entries.prefill(torch.tensor(ids), count, *self._lanes(names))
        for name, chunk, token in zip(names, chunks, outputs["token"].tolist(), strict=False):
            self.texts[name]["read"] += len(chunk)
            if self.texts[name]["read"] == len(self.texts[name]["tokens"]):
                self.texts[name]["tokens"].append(token)
        return outputs

    def decode(self, names: list[Any]) -> dict[str, Any]:
        ids = [self.texts[name]["tokens"][-1:] for name in names] + [[9]] * (self.lanes - len(names))
        count = torch.tensor([1] * len(names) + [0] * (self.lanes - len(names)))
        with torch.no_grad():
            outputs = self.entries.decode(torch.tensor(ids), count, *self._lanes(names))
        for name, token in zip(names, outputs["token"].tolist(), strict=False):
            self.texts[name]["read"] += 1
            self.texts[name]["tokens"].append(token)
        return outputs

    def generate(self, names: list[Any], limit: list[int], stop: tuple[int, ...] = ()) -> dict[str, Any]:
        ids = [self.texts[name]["tokens"][-1:] for name in names] + [[9]] * (self.lanes - len(names))
        stops = torch.tensor([[*stop, *[-1] * (STOPS - len(stop))]] * self.lanes)
        limits = torch.tensor(limit + [0] * (self.lanes - len(names)))
        with torch.no_grad():
            outputs = self.entries.generate(torch.tensor(ids), *self._lanes(names), stops, limits)
        for name, count, row in zip(names, outputs["count"].tolist(), outputs["tokens"].tolist(), strict=False):
            self.texts[name]["read"] += count
            self.texts[name]["tokens"] += row[:count]
        return outputs

    def run(self, name: Any, count: int) -> None:
        """Runs the prompt and generates `count` tokens, with no other text in the batch."""
        begun = len(self.texts[name]["tokens"])
        while len(self.texts[name]["tokens"]) == begun:
            self.prefill([name])
        while len(self.texts[name]["tokens"]) < begun + count:
            self.decode([name])


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(3, 128), k=length)


def nobodys_page_is_zero(model: Any) -> bool:
    names = ("keys", "values", "seen", "deferred", "biases")
    return not any(buffer[0].any() for name, buffer in model.named_buffers() if name.startswith(names))


def check_family(family: str) -> None:
    """Checks the tokens against transformers' `generate`: three prompts in one batch, run by chunks, single steps and the loop."""
    model = causal_model(family)
    prompts = {length: prompt(length) for length in (5, 21, 37)}
    engine = Engine(model)
    for name, prompt_ids in prompts.items():
        engine.add(name, prompt_ids, 60)
    while waiting := [name for name, text in engine.texts.items() if text["read"] < len(prompts[name])]:
        engine.prefill(waiting)
    for _ in range(30):
        engine.decode(list(prompts))
    engine.generate(list(prompts), [17, 9, 17])
    for name, prompt_ids in prompts.items():
        tokens = engine.remove(name)[name:]
        assert len(tokens) == (40 if name == 21 else 48)
        assert tokens == reference(model, prompt_ids, len(tokens)), f"{family}, prompt of {name} tokens"
    assert nobodys_page_is_zero(model)


def check_requests(engine: Engine, model: Any) -> None:
    """Checks 50 requests that start and end in random order and reuse pages. The tokens must equal those of `generate`."""
    order = random.Random(0)
    waiting, expected, seen = list(range(50)), {}, 0
    prompts = {name: prompt(order.randrange(1, 60), name) for name in waiting}
    counts = {name: order.randrange(1, 24) for name in waiting}
    while waiting or engine.texts:
        while waiting and len(engine.texts) < engine.lanes:
            name = waiting.pop()
            engine.add(name, prompts[name], counts[name])
        reading = [name for name, text in engine.texts.items() if text["read"] < len(prompts[name])]
        going = [name for name in engine.texts if name not in reading]
        if reading and (not going or order.random() < 0.5):
            engine.prefill(order.sample(reading, order.randrange(1, len(reading) + 1)))
        elif going:
            engine.decode(order.sample(going, order.randrange(1, len(going) + 1)))
        for name in list(engine.texts):
            if len(engine.texts[name]["tokens"]) == len(prompts[name]) + counts[name]:
                expected[name] = engine.remove(name)[len(prompts[name]) :]
                seen += 1
    assert seen == 50 and sorted(engine.free) == list(range(1, PAGES))
    for name in order.sample(sorted(expected), 12):
        assert expected[name] == reference(model, prompts[name], counts[name])
