"""A bundle of (input_ids, attention_mask[, token_type_ids]) with a tokenizer beside it, as a model of texts.

What its output is says what it does: a number for each row is a score, as of a reranker; as many as its config.json has classes are
those of a classifier; all others are embeddings.  Texts of one request are sorted by the recorded length that they need, and go
into the queue of the entry, where they go together with those of others."""

from __future__ import annotations

import asyncio
import math
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

from cgbundle.tensors.numbers import decode

from ..language.completions import Refusal
from ..language.text import Language
from ..tensors.entry import Ports
from ..tensors.inference_protocol import DATATYPES, Given

Task = Literal["embed", "rerank", "classify"]

FIELDS = ("input_ids", "attention_mask", "token_type_ids")
"""The inputs in their order, where a bundle calls them otherwise."""

FLOATS = ("FP32", "FP16", "BF16", "FP64")

TEXTS = 2048
"""Texts of one request: as many as OpenAI allows."""


Answer = Callable[[Sequence[Given], float], Awaitable[list[Given]]]
"""Tensors and seconds -> outputs."""


class Encoded(NamedTuple):
    """The tokens of a text or a pair, and of which of the two each is."""

    ids: Sequence[int]
    kinds: Sequence[int]


def takes_texts(ports: Ports) -> bool:
    """Whether an entry's inputs are tokens and their mask, whole numbers (batch, length), and its output has a row for each."""
    names = {port.name for port in ports.inputs}
    whole = all(port.datatype in ("INT64", "INT32") and len(port.shape) == 2 for port in ports.inputs)
    alike = len({(port.shape, port.axes) for port in ports.inputs}) == 1
    if not whole or not alike or len(names) not in (2, 3) or names & set(FIELDS) not in (set(), names) or len(ports.outputs) != 1:
        return False
    output = ports.outputs[0]
    return output.datatype in FLOATS and (len(output.shape) == 1 or (len(output.shape) == 2 and output.shape[1] > 0))


class TextModel:
    """`task` says what it does, `labels` the classes of a classifier.  `context`: tokens of the longest text."""

    def __init__(self, name: str, language: Language, ports: Ports, answer: Answer, seconds: float) -> None:
        """`answer`: what answers a call of the entry; `seconds`: those that a request may wait for its answer."""
        self.name, self.language, self._answer, self._seconds = name, language, answer, seconds
        sizes = dict(ports.sizes)
        length = ports.inputs[0].axes[1] if ports.inputs[0].axes else ports.inputs[0].shape[1]
        self._lengths = sizes[length] if isinstance(length, str) else (length,)
        self._rows = (ports.batches or (1,))[-1]
        names = [port.name for port in ports.inputs]
        self._fields = names if set(names) <= set(FIELDS) else FIELDS[: len(names)]
        self._codes = ["q" if port.datatype == "INT64" else "i" for port in ports.inputs]
        self._dtype = next(dtype for dtype, datatype in DATATYPES.items() if datatype == ports.outputs[0].datatype)
        self.context = self._lengths[-1]
        shape = ports.outputs[0].shape
        self.width = 1 if len(shape) == 1 else shape[1]
        self.labels = language.labels if self.width > 1 and len(language.labels) == self.width else ()
        self.task: Task = "rerank" if self.width == 1 else "classify" if self.labels else "embed"

    def encoded(self, texts: Sequence[str] | Sequence[tuple[str, str]], *, field: str, truncate: bool) -> list[Encoded]:
        """The tokens of texts or pairs, cut to the longest recorded length with `truncate`.  Raises Refusal for longer ones."""
        longest = self.context * self.language.longest
        for text in texts:
            characters = len(text) if isinstance(text, str) else sum(map(len, text))
            if characters > longest and not truncate:
                raise self._too_long(field, f"{characters} characters")
        if truncate:
            texts = [text[:longest] if isinstance(text, str) else (text[0][:longest], text[1][:longest]) for text in texts]  # type: ignore[assignment]
        return [self.fitting(Encoded(ids, kinds), field=field, truncate=truncate) for ids, kinds in self.language.encoded(texts)]

    def fitting(self, text: Encoded, *, field: str, truncate: bool) -> Encoded:
        """A text that is short enough, and has a token.  Raises Refusal."""
        if not text.ids:
            raise Refusal(400, f"{field}: a text without a token", field)
        if len(text.ids) <= self.context:
            return text
        if not truncate:
            raise self._too_long(field, f"{len(text.ids)} tokens")
        kept = self.context - 1  # the last token says that the text ends
        return Encoded([*text.ids[:kept], text.ids[-1]], [*text.kinds[:kept], text.kinds[-1]])

    def _too_long(self, field: str, size: str) -> Refusal:
        text = f"{field}: {size}, and the model takes {self.context} tokens; `truncate` cuts"
        return Refusal(400, text, field, "context_length_exceeded")

    async def answer(self, texts: Sequence[Encoded]) -> list[list[float]]:
        """The output's row of each text.  Raises as TensorEntry.answer."""
        by_length: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            by_length.setdefault(self._lengths[bisect_left(self._lengths, len(text.ids))], []).append(index)
        calls = [
            (length, indices[at : at + self._rows])
            for length, indices in by_length.items()
            for at in range(0, len(indices), self._rows)
        ]
        found: list[list[float]] = [[] for _ in texts]

        async def call(length: int, indices: Sequence[int]) -> None:
            (made,) = await self._answer(self._tensors([texts[index] for index in indices], length), self._seconds)
            numbers = decode(self._dtype, bytes(made.data))
            for place, index in enumerate(indices):
                found[index] = [float(number) for number in numbers[place * self.width : (place + 1) * self.width]]

        async with asyncio.TaskGroup() as group:
            for each in calls:
                group.create_task(call(*each))
        return found

    def _tensors(self, texts: Sequence[Encoded], length: int) -> list[Given]:
        made = []
        for field, code in zip(self._fields, self._codes, strict=True):
            flat = array(code)
            for text in texts:
                fill = [0] * (length - len(text.ids))
                if field == "input_ids":
                    flat.extend([*text.ids, *[self.language.pad] * len(fill)])
                else:
                    flat.extend([*([1] * len(text.ids) if field == "attention_mask" else text.kinds), *fill])
            made.append(Given((len(texts), length), flat.tobytes()))
        return made


def sigmoid(number: float) -> float:
    """Between 0 and 1."""
    return 1 / (1 + math.exp(-number)) if number > -700 else 0.0


def softmax(numbers: Sequence[float]) -> list[float]:
    """Probabilities."""
    largest = max(numbers)
    weights = [math.exp(number - largest) for number in numbers]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
