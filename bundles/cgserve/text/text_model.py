"""A bundle of (input_ids, attention_mask[, token_type_ids]) with a tokenizer, as a model of texts.

The output determines its task.  One number per row is the score of a reranker; as many numbers as config.json has classes are the
scores of a classifier; other rows are embeddings.  Texts of a request are grouped by the recorded length that they need, and share
calls of the entry's queue with other requests.  Only a few calls of a request wait in the queue at once, so that a request with
thousands of texts blocks neither other requests nor the event loop."""

from __future__ import annotations

import asyncio
import math
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, cast

from cgbundle.tensors.numbers import decode

from ..batching.request_queue import Busy, Late
from ..language.completions import Refusal
from ..language.tokenizer import Language
from ..tensors.entry import Ports
from ..tensors.inference_protocol import DATATYPES, TensorData

Task = Literal["embed", "rerank", "classify"]

FIELDS = ("input_ids", "attention_mask", "token_type_ids")
"""The order of the inputs, if a bundle has other names for them."""

FLOATS = ("FP32", "FP16", "BF16", "FP64")

TEXTS = 2048
"""Maximum texts of one request, as in OpenAI's API."""

AT_ONCE = 16
"""Maximum calls of one request in the entry's queue, waiting or running."""

T = TypeVar("T")

Answer = Callable[[Sequence[TensorData], float], Awaitable[list[TensorData]]]
"""Tensors and seconds -> outputs."""


class Encoded(NamedTuple):
    """The tokens of a text or a pair, and their type ids, as int64 bytes.  Not as lists, which the garbage collector tracks: with
    thousands of texts it stops the interpreter for 0.2 s."""

    ids: bytes
    kinds: bytes

    @property
    def tokens(self) -> int:
        return len(self.ids) // WIDTH

    @classmethod
    def of(cls, ids: Sequence[int], kinds: Sequence[int] = ()) -> Encoded:
        """`kinds`: () if all tokens belong to the first text."""
        return cls(array("q", ids).tobytes(), array("q", kinds).tobytes() or bytes(WIDTH * len(ids)))


WIDTH = array("q").itemsize


def takes_texts(ports: Ports) -> bool:
    """Returns whether an entry's inputs are tokens and their mask, integers (batch, length), and its output has a row per text."""
    names = {port.name for port in ports.inputs}
    ints = all(port.datatype in ("INT64", "INT32") and len(port.shape) == 2 for port in ports.inputs)
    equal = len({(port.shape, port.axes) for port in ports.inputs}) == 1
    if not ints or not equal or len(names) not in (2, 3) or names & set(FIELDS) not in (set(), names) or len(ports.outputs) != 1:
        return False
    output = ports.outputs[0]
    return output.datatype in FLOATS and (len(output.shape) == 1 or (len(output.shape) == 2 and output.shape[1] > 0))


class TextModel:
    """`task`: embed, rerank or classify; `labels`: the classes of a classifier; `context`: tokens of the longest text."""

    def __init__(
        self, name: str, language: Language, ports: Ports, answer: Answer, seconds: float, limit: int = 1024,
        pause: Callable[[int], int] = lambda calls: 1,
    ) -> None:  # fmt: skip
        """`answer`: calls the entry; `seconds`: deadline of a request; `limit`: maximum calls that all requests wait for; `pause`:
        estimates the seconds for a number of calls."""
        self.name, self.language, self._answer, self._seconds = name, language, answer, seconds
        self._limit, self._pause = limit, pause
        self._open, self._idle = 0, asyncio.Event()  # calls that requests wait for
        self._idle.set()
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
        """Returns the tokens of texts or pairs.  With `truncate`, cuts them to the longest recorded length; without it, raises
        Refusal if one is longer."""
        longest = self.context * self.language.longest_token
        for text in texts:
            characters = len(text) if isinstance(text, str) else sum(map(len, text))
            if characters > longest and not truncate:
                raise self._too_long(field, f"{characters} characters")
        if truncate:
            texts = [text[:longest] if isinstance(text, str) else (text[0][:longest], text[1][:longest]) for text in texts]  # type: ignore[assignment]
        return [self.fitting(Encoded.of(*encoding), field=field, truncate=truncate) for encoding in self.language.encode(texts)]

    def check_room(self, texts: int) -> None:
        """Raises Busy before any work if there is no room for a request with `texts` texts."""
        self._check_calls(math.ceil(texts / self._rows))

    def _check_calls(self, calls: int) -> None:
        if self._open and self._open + calls > self._limit:
            raise Busy(f"requests wait for {self._open} calls already", self._pause(self._open))

    def fitting(self, text: Encoded, *, field: str, truncate: bool) -> Encoded:
        """Checks or truncates the length of a text, which must have a token.  Raises Refusal."""
        if not text.tokens:
            raise Refusal(400, f"{field}: a text without a token", field)
        if text.tokens <= self.context:
            return text
        if not truncate:
            raise self._too_long(field, f"{text.tokens} tokens")
        length = WIDTH * (self.context - 1)  # keep the last token, which marks the end of the text
        return Encoded(*[tokens[:length] + tokens[-WIDTH:] for tokens in text])

    def _too_long(self, field: str, size: str) -> Refusal:
        text = f"{field}: {size}, and the model takes {self.context} tokens; `truncate` cuts"
        return Refusal(400, text, field, "context_length_exceeded")

    async def answer(self, texts: Sequence[Encoded], converter: Callable[[list[float]], T]) -> list[T]:
        """Applies `converter` to the output's row of each text.  Raises Busy, or the errors of TensorEntry.answer in a group."""
        by_length: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            by_length.setdefault(self._lengths[bisect_left(self._lengths, text.tokens)], []).append(index)
        calls = [
            (length, indices[begin : begin + self._rows])
            for length, indices in by_length.items()
            for begin in range(0, len(indices), self._rows)
        ]
        answers: list[T | None] = [None] * len(texts)
        remaining, until = iter(calls), asyncio.get_running_loop().time() + self._seconds

        async def serve_calls() -> None:
            for length, indices in remaining:
                seconds = until - asyncio.get_running_loop().time()
                try:
                    if seconds <= 0:
                        raise Late
                    (output,) = await self._answer(self._tensors([texts[index] for index in indices], length), seconds)
                except Late:  # report the request's deadline, not the call's
                    raise Late(f"no answer within {self._seconds:g} s") from None
                numbers = decode(self._dtype, bytes(output.data))
                for row, index in enumerate(indices):
                    answers[index] = converter(numbers[row * self.width : (row + 1) * self.width])

        self._check_calls(len(calls))
        self._open += len(calls)
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, len(calls))):
                    group.create_task(serve_calls())
        finally:
            self._open -= len(calls)
            if not self._open:
                self._idle.set()
        return cast(list[T], answers)

    async def drain(self) -> None:
        """Waits until all requests are answered."""
        await self._idle.wait()

    def _tensors(self, texts: Sequence[Encoded], length: int) -> list[TensorData]:
        one, pad = array("q", [1]).tobytes(), array("q", [self.language.pad]).tobytes()
        tensors = []
        for field, code in zip(self._fields, self._codes, strict=True):
            parts = list[bytes]()
            for text in texts:
                fill = length - text.tokens
                match field:
                    case "input_ids":
                        parts += text.ids, pad * fill
                    case "attention_mask":
                        parts += one * text.tokens, bytes(WIDTH * fill)
                    case _:
                        parts += text.kinds, bytes(WIDTH * fill)
            data = b"".join(parts)
            tensors.append(TensorData((len(texts), length), data if code == "q" else array(code, array("q", data)).tobytes()))
        return tensors


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number)) if number > -700 else 0.0


def softmax(numbers: Sequence[float]) -> list[float]:
    largest = max(numbers)
    weights = [math.exp(number - largest) for number in numbers]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
