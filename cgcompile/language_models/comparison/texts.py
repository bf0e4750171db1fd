"""Compares the text of a model over pages with transformers' `generate`, for a small copy of its configuration.

Prompts of different lengths share every call.  Their texts exceed every window, chunk and original context of the small copy. The
reference is `generate` for each prompt alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..architectures.text_half import maker
from ..attention import NAME
from ..networks import over_pages
from ..sampling import GREEDY, Sampling
from .independence import check_independence
from .probe import check_kind
from .refusal import error_text, place_of, refusal
from .small_copy import small_copy

PROMPTS = (3, 17, 30)
"""Tokens of the prompts: within all limits; beyond windows and chunks; also beyond the original context."""

NEXT = 20
"""Tokens of the prompt that gets pages and slot of the first text after its end."""

STEPS, TURNS = 5, 8
"""Tokens by single steps, then by the loop; the rest again by steps.  The second text exceeds the original context in the loop."""

TOKENS, AFTER = 18, 6
"""Tokens that a build compares after each prompt, and after the prompt that reuses pages."""

BLOCKS, READ = 12, 13
"""Pages of each text; prompt tokens of a call."""

PAGES, SLOTS = len(PROMPTS) * BLOCKS + 1, len(PROMPTS) + 1
"""Pages and slots of the model."""

TOLERANCE = 0.02
"""Maximum difference of log-probabilities from transformers, in float32."""

TIE = 0.005
"""If the log-probabilities of two tokens differ by less, rounding decides which is chosen, and the texts differ afterwards."""

WEIGHTS_PROMPTS = (5, 18)
"""Tokens of the prompts for the real weights."""

NEAR = {torch.float32: 0.002, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Logits are a tie, decided by rounding, if they are closer to the largest than this fraction of (largest - mean)."""

SPREAD = 0.2
"""Standard deviation of noise that is added to the small copy's weights, so that different texts get different continuations."""


class Written(NamedTuple):
    """A token of a text and its log-probability.  Tokens of transformers also have the `second` likeliest token, and by how much
    its log-probability is lower (`lead`)."""

    token: int
    logprob: float
    second: int = -1
    lead: float = float("inf")


def compare_small(
    config: PretrainedConfig, served: Callable[[PreTrainedModel], nn.Module], tokens: int = TOKENS, after: int = AFTER
) -> None:
    """Raises language-model-refused if a small copy of the model gives another text over pages than with `generate`.

    `served` makes the model over pages from a network, with PAGES, SLOTS and TURNS.  `tokens` are compared for every text, and
    `after` for the text whose pages had another text before.
    """
    check_kind(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads are slower for such small models
    try:
        with torch.device("cpu"):
            network, reference = small_networks(config)
            compare_texts(network, reference, served, tokens, after)
    finally:
        torch.set_num_threads(threads)


def compare_texts(
    network: PreTrainedModel, reference: PreTrainedModel, served: Callable[[PreTrainedModel], nn.Module], tokens: int, after: int
) -> None:
    """`compare_small` for two networks with the same weights: one over pages, and one as transformers runs it."""
    model = served(network).eval()
    check_independence(model)
    generator = random.Random(0)
    prompts = [[generator.randrange(4, model.vocabulary) for _ in range(length)] for length in (*PROMPTS, NEXT)]
    for prompt, text in zip(prompts, texts_over_pages(model, prompts, tokens, after), strict=True):
        expected = by_generate(copy.deepcopy(reference), prompt, len(text))  # a rope may keep state from earlier texts
        different = [place for place, pair in enumerate(zip(text, expected, strict=True)) if not same(*pair)]
        if different and not rounding_decides(text[different[0]], expected[different[0]]):
            problem = f"text differs from transformers' generate at token {different[0]} of a prompt of length {len(prompt)}"
            if not counts_from_zero(reference, prompt):
                problem = "it counts positions itself, and not from 0, where generate gives it no position_ids"
            raise refusal(network.config, f"{problem} (small copy; {features(network.config)})", "serve it with transformers")


def counts_from_zero(network: PreTrainedModel, prompt: Sequence[int]) -> bool:
    """Returns whether a model gives the same logits when it counts positions itself."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        default, fixed = (
            network(input_ids=ids).logits,
            network(input_ids=ids, position_ids=torch.arange(len(prompt))[None]).logits,
        )
    return torch.allclose(default, fixed, rtol=1e-3, atol=1e-3)


def compare_weights(network: PreTrainedModel, served: Callable[[PreTrainedModel], nn.Module]) -> None:
    """Raises language-model-refused if the model with its real weights chooses a token over pages that transformers finds much less
    likely.

    Two short texts share the calls.  The network with transformers' own attention then reads them one by one.
    """
    device = next(network.parameters()).device
    with torch.device(device), torch.no_grad():
        model = served(network).eval()
        generator = random.Random(0)
        prompts = [[generator.randrange(4, model.vocabulary) for _ in range(length)] for length in WEIGHTS_PROMPTS]
        desk = Desk(model, prompts)
        desk.take_chunks()
        desk.take_step()
        implementation = network.config._attn_implementation
        network.set_attn_implementation("eager")
        try:
            rows = [network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float() for tokens in desk.tokens]
        finally:
            network.set_attn_implementation(implementation)
    for tokens, logits, prompt in zip(desk.tokens, rows, prompts, strict=True):
        for place in range(len(prompt), len(tokens)):
            row = logits[place - 1]
            if row.max() - row[tokens[place]] > NEAR[network.dtype] * (row.max() - row.mean()):
                problem = f"text differs from transformers at token {place - len(prompt)} of a prompt of length {len(prompt)}"
                raise refusal(network.config, f"{problem} (with its own weights)", "serve it with transformers")


def same(actual: Written, expected: Written) -> bool:
    """Returns whether two tokens and their probabilities are equal up to rounding."""
    return actual.token == expected.token and abs(actual.logprob - expected.logprob) <= TOLERANCE


def rounding_decides(actual: Written, expected: Written) -> bool:
    """Returns whether the token is transformers' second, which is as likely as its first up to rounding."""
    return actual.token == expected.second and expected.lead <= TIE and abs(actual.logprob - expected.logprob) <= TOLERANCE


def small_networks(config: PretrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns the small copy twice, with the same weights in float32: over pages, and as transformers runs it."""
    try:
        reference = small_reference(config, maker(config) or AutoModelForCausalLM)
        network = over_pages(small_copy(config), torch.float32)
        keys = network.load_state_dict(reference.state_dict(), strict=False)  # the reference may also have parts for images
        if keys.missing_keys:
            raise ValueError(f"it has other weights over pages ({keys.missing_keys[0]})")
        return network, reference
    except Exception as error:
        if error.args == (NAME,):
            problem = f"a part of it looks attention up in a table of its own, which has no other{place_of(error)}"
            raise refusal(config, problem, "serve it with transformers") from error
        problem = f"no small copy can be made of its configuration, to compare with transformers: {error_text(error)}"
        raise refusal(config, problem, "serve it with transformers") from error


def small_reference(config: PretrainedConfig, kind: Any) -> PreTrainedModel:
    """Returns the small copy as transformers runs it; `kind` creates it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = kind.from_config(small_copy(config), attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in reference.parameters():
                weight += torch.randn_like(weight) * SPREAD
            reference(torch.tensor([[4, 5, 6]]))
        return reference


class Desk:
    """Generates texts with the entries of a model over pages, each text in its own lane."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.model, lanes = model, len(prompts)
        self.tokens = [list(prompt) for prompt in prompts]
        self.written: list[list[Written]] = [[] for _ in prompts]
        self.read = [0] * lanes
        self.length = [len(prompt) for prompt in prompts]
        permutation = torch.randperm(lanes * BLOCKS, generator=torch.Generator().manual_seed(0))
        self.pages, self.slot = 1 + permutation.view(lanes, BLOCKS), torch.arange(1, lanes + 1)
        self.greedy = Sampling(*[torch.full((lanes,), value) for value in GREEDY])

    def replace(self, lane: int, prompt: Sequence[int]) -> list[Written]:
        """Ends a text, returns it, and reads another one into its pages and slot.  The other lanes wait."""
        ended, self.written[lane] = self.written[lane], []
        self.tokens[lane], self.read[lane], self.length[lane] = list(prompt), 0, len(prompt)
        self.pages[lane] = self.pages[lane].flip(0)
        self._read_again([place == lane for place in range(len(self.tokens))])
        return ended

    def take(self, count: int) -> None:
        """Generates at least `count` tokens for every text: by steps, by the loop, and the rest by steps."""
        targets = [len(tokens) + count for tokens in self.tokens]
        for _ in range(min(STEPS, count)):
            self.take_step()
        if count >= STEPS + TURNS:
            self.take_loop()
        while any(len(tokens) < end for tokens, end in zip(self.tokens, targets, strict=True)):
            self.take_step()

    def take_chunks(self) -> None:
        """Reads all unread tokens of every text by chunks, also single ones."""
        ends = [len(tokens) for tokens in self.tokens]
        while any(read < end for read, end in zip(self.read, ends, strict=True)):
            chunks = [tokens[read : min(end, read + READ)] for read, tokens, end in zip(self.read, self.tokens, ends, strict=True)]
            ids = torch.tensor([chunk + [4] * (READ - len(chunk)) for chunk in chunks])
            count, start = torch.tensor([len(chunk) for chunk in chunks]), torch.tensor(self.read)
            lengths = [torch.tensor(self.length)] if self.model.by_length else []
            outputs = self.model.prefill(ids, count, *self._lanes(count > 0, start), self.greedy, *lengths)
            self._keep(count, outputs)

    def take_step(self) -> None:
        """Generates a token for every text.  If the model requires it, a text is read again instead."""
        again = [self.model.reread_at and read == self.model.reread_at for read in self.read]
        on = ~torch.tensor([bool(begins) for begins in again])
        ids = torch.tensor([tokens[-1:] for tokens in self.tokens])
        outputs = self.model.decode(ids, on.long(), *self._lanes(on, torch.tensor(self.read)), self.greedy)
        self._keep(on.long(), outputs)
        for lane, begins in enumerate(again):
            if begins:
                self.read[lane], self.length[lane] = 0, len(self.tokens[lane])
        self._read_again(again)

    def take_loop(self) -> None:
        """Generates the tokens of one loop."""
        ids, start = torch.tensor([tokens[-1:] for tokens in self.tokens]), torch.tensor(self.read)
        none, limit = torch.full((len(ids), 8), -1), torch.full((len(ids),), TURNS)
        outputs = self.model.generate(ids, start, self.pages, self.slot, self.greedy, none, limit)
        rows = zip(outputs["tokens"].tolist(), outputs["logprobs"].tolist(), outputs["count"].tolist(), strict=True)
        for lane, (tokens, logprobs, count) in enumerate(rows):
            self.read[lane] += count
            self.tokens[lane] += tokens[:count]
            self.written[lane] += map(Written, tokens[:count], logprobs[:count])

    def _read_again(self, again: Sequence[object]) -> None:
        """Reads the texts of some lanes from the start; the others wait."""
        others = list(self.tokens)
        self.tokens = [tokens if begins else tokens[:read] for tokens, begins, read in zip(others, again, self.read, strict=True)]
        self.take_chunks()
        self.tokens = [new if begins else old for new, old, begins in zip(self.tokens, others, again, strict=True)]

    def _lanes(self, on: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return start * on, self.pages * on[:, None], self.slot * on

    def _keep(self, count: Tensor, outputs: dict[str, Tensor]) -> None:
        """Records what was read, and the next token of texts that are completely read."""
        rows = zip(count.tolist(), outputs["token"].tolist(), outputs["logprob"].tolist(), strict=True)
        for lane, (read, token, logprob) in enumerate(rows):
            self.read[lane] += read
            if read and self.read[lane] == len(self.tokens[lane]):
                self.tokens[lane].append(token)
                self.written[lane].append(Written(token, logprob))


def texts_over_pages(model: Any, prompts: Sequence[Sequence[int]], tokens: int, after: int) -> list[list[Written]]:
    """Returns what a model over pages writes after the prompts.  All but the last prompt run together; then the last one replaces
    the first."""
    desk = Desk(model, prompts[:-1])
    try:
        with torch.no_grad():
            desk.take_chunks()
            desk.take(tokens - 1)
            first = desk.replace(0, prompts[-1])
            desk.take(after - 1)
    except Exception as error:
        problem = f"its code does not work with a paged cache: {error_text(error)}"
        raise refusal(model.network.config, problem, "serve it with transformers") from error
    return [first, *[written[: tokens + TURNS] for written in desk.written[1:]], desk.written[0]]


def by_generate(network: PreTrainedModel, prompt: Sequence[int], count: int) -> list[Written]:
    """Returns what transformers writes after a single prompt."""
    network.generation_config = GenerationConfig()
    ids = torch.tensor([prompt])
    try:
        outputs = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    except Exception as error:
        problem = f"transformers' generate of its small copy fails, so that there is nothing to compare with: {error_text(error)}"
        raise refusal(network.config, problem, "serve it with transformers") from error
    tokens = outputs.sequences[0, len(prompt) :].tolist()
    logprobs = [logits[0].float().log_softmax(-1) for logits in outputs.logits]
    seconds = [row.topk(2) for row in logprobs]
    return [
        Written(token, row[token].item(), int(best.indices[1]), float(best.values[0] - best.values[1]))
        for token, row, best in zip(tokens, logprobs, seconds, strict=True)
    ]


def features(config: PretrainedConfig) -> str:
    """Describes the settings of a configuration that can affect the text."""
    values = config.get_text_config().to_dict()
    names = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings", "rope_parameters", "layer_types")
    return ", ".join(f"{name}={values[name]}" for name in names if values.get(name)) or "no window, chunk or scaled rope"
