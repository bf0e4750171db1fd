"""Embeddings, scores and classes over HTTP: /v1/embeddings as in OpenAI's API, /v1/rerank as in Cohere's and Jina's, /v1/classify
as in vLLM's."""

from __future__ import annotations

import base64
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import cgbundle

from ..batching.request_queue import Busy, Late, Stopping
from ..language.completions import Refusal, object_of, of_kind, whole
from ..language.prompt_reader import PromptReader
from ..log import Tell, one_line
from ..text.text_model import TEXTS, Encoded, Task, TextModel, sigmoid, softmax
from ..transport.unknown_paths import LISTED

PASSED_OVER = {"model", "user", "metadata", "truncate"}
FIELDS: dict[Task, set[str]] = {
    "embed": {"input", "encoding_format"},
    "rerank": {"query", "documents", "top_n", "return_documents", "raw_scores"},
    "classify": {"input"},
}
PATHS: dict[Task, str] = {"embed": "/embeddings", "rerank": "/rerank", "classify": "/classify"}
OUTSIDE = ("/rerank", "/classify")
"""Paths that also exist outside /v1, as in other servers."""

T = TypeVar("T")
Read = tuple[TextModel, dict[str, Any], list[Encoded]]


class Texts:
    """The routes.  `serving`: the serving models of texts, by name; `known`: all models, and whether a version of each serves."""

    def __init__(
        self, serving: Callable[[], Mapping[str, TextModel]], known: Callable[[], Mapping[str, bool]], reader: PromptReader,
        tell: Tell,
    ) -> None:  # fmt: skip
        self._serving, self._known, self._reader, self._tell = serving, known, reader, tell
        self.routes: list[Route] = []
        handlers: dict[Task, Callable[[Request], Awaitable[Response]]] = {
            "embed": self._embeddings, "rerank": self._rerank, "classify": self._classify,
        }  # fmt: skip
        for task, path in PATHS.items():
            paths = (f"/v1{path}", path) if path in OUTSIDE else (f"/v1{path}",)
            self.routes += [Route(url_path, handlers[task], methods=["POST"]) for url_path in paths]

    async def _embeddings(self, request: Request) -> Response:
        model, body, texts = await self._read(request, "embed")
        form = body.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise Refusal(400, "encoding_format: expected float or base64", "encoding_format")
        rows = await self._answer(model, texts, numbers_of if form == "float" else base64_of)
        data = [b'{"object":"embedding","index":%d,"embedding":%b}' % pair for pair in enumerate(rows)]
        head = to_json({"object": "list", "model": model.name, "usage": usage(texts)})
        return Response(b'%b,"data":[%b]}' % (head[:-1], b",".join(data)), media_type="application/json")

    async def _rerank(self, request: Request) -> Response:
        model, body, texts = await self._read(request, "rerank")
        top = whole(body, "top_n", 1, TEXTS, len(texts))
        raw = of_kind(body, "raw_scores", bool, False, "true or false")
        shown = of_kind(body, "return_documents", bool, False, "true or false")
        scores = await self._answer(model, texts, lambda row: row[0] if raw else sigmoid(row[0]))
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top]
        documents = [{"document": {"text": text}} if shown else {} for text in documents_of(body)]
        results = [{"index": index, "relevance_score": scores[index], **documents[index]} for index in order]
        return answered({"id": f"rerank-{uuid.uuid4().hex}", "model": model.name, "results": results, "usage": usage(texts)})

    async def _classify(self, request: Request) -> Response:
        model, _, texts = await self._read(request, "classify")
        data = []
        for index, shares in enumerate(await self._answer(model, texts, softmax)):
            label = model.labels[shares.index(max(shares))]
            data.append({"index": index, "label": label, "probs": shares, "num_classes": len(shares)})
        head = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model.name}
        return answered(head | {"data": data, "labels": list(model.labels), "usage": usage(texts)})

    # --- for all routes ------------------------------------------------------------------------------------------------

    async def _read(self, request: Request, task: Task) -> Read:
        """Returns the model, the body, and the tokens of its texts.  Raises Refusal."""
        text = await request.body()

        def work() -> Read:
            body = object_of(text)
            for name in body.keys() - FIELDS[task] - PASSED_OVER:
                raise Refusal(400, f"{name}: no such field", name, "unknown_parameter")
            model = self._choose(of_kind(body, "model", str, None, "a string"), task)
            truncate = of_kind(body, "truncate", bool, False, "true or false")
            if task == "rerank":
                query = body.get("query")
                if not isinstance(query, str):
                    raise Refusal(400, "query: expected a string", "query")
                pairs = [(query, document) for document in documents_of(body)]
                model.check_room(len(pairs))
                return model, body, model.encoded(pairs, field="documents", truncate=truncate)
            texts = inputs_of(body.get("input"))
            model.check_room(len(texts))
            if isinstance(texts[0], str):
                return model, body, model.encoded(texts, field="input", truncate=truncate)
            if not all(0 <= token < model.language.size for tokens in texts for token in tokens):
                raise Refusal(400, f"input: expected tokens from 0 to {model.language.size - 1}", "input")
            return model, body, [model.fitting(Encoded.of(tokens), field="input", truncate=truncate) for tokens in texts]

        while True:
            try:
                model, body, texts = await self._reader.run(work)
            except Busy as busy:
                raise refusal_of(busy) from None
            if self._choose(body.get("model"), task) is model:  # no await until the texts are queued, so the version cannot change
                return model, body, texts

    def _choose(self, name: str | None, task: Task) -> TextModel:
        """Returns the model that serves a name for the task.  Raises Refusal."""
        serving = self._serving()
        names = ", ".join([served_name for served_name, model in serving.items() if model.task == task]) or "none"
        if name is None:
            fitting = [model for model in serving.values() if model.task == task]
            if len(fitting) == 1:
                return fitting[0]
            if not any(self._known().values()):
                raise Refusal(503, "no model serves", "model", retry_after=1)
            if not fitting:
                raise Refusal(
                    400, f"no model answers at /v1{PATHS[task]}: it needs a tokenizer beside its bundle; {LISTED}", "model"
                )
            raise Refusal(400, f"model: expected one of {names}", "model")
        if name in serving:
            model = serving[name]
            if model.task != task:
                raise Refusal(400, f"model: {name!r} answers at /v1{PATHS[model.task]}", "model")
            return model
        if (serves := self._known().get(name)) is not None:
            if not serves:
                raise Refusal(503, f"no version of {name!r} serves", "model", retry_after=1)
            raise Refusal(400, f"model: {name!r} takes no texts here, or has no tokenizer; there is {names}", "model")
        raise Refusal(404, f"no model {name!r}; there is {names}", "model", "model_not_found")

    async def _answer(self, model: TextModel, texts: Sequence[Encoded], converter: Callable[[list[float]], T]) -> list[T]:
        """Applies `converter` to the output's row of each text as it arrives.  Raises Refusal."""
        try:
            return await model.answer(texts, converter)
        except ExceptionGroup as group:
            error = group.exceptions[0]
        except Busy as busy:
            error = busy
        match error:
            case Busy():
                raise refusal_of(error)
            case Stopping():
                raise Refusal(503, str(error), retry_after=1)
            case Late():
                raise Refusal(503, str(error), code="timeout", retry_after=1)
            case cgbundle.CallError():
                raise Refusal(400, one_line(error))
            case cgbundle.CgbundleError():
                self._tell({"event": "failed", "model": model.name, "why": one_line(error)})
                raise Refusal(500, "the model failed; the server's log says why")
        raise error


def refusal_of(busy: Busy) -> Refusal:
    return Refusal(429, str(busy), code="too_many_requests", retry_after=busy.seconds)


def numbers_of(row: list[float]) -> bytes:
    """Returns a row as JSON, which has no infinity."""
    return to_json(row, inf_nan_mode="null")


def base64_of(row: list[float]) -> bytes:
    return b'"%b"' % base64.b64encode(array("f", row))


def inputs_of(body_input: Any) -> list[Any]:
    """Returns texts, or lists of tokens.  Raises Refusal."""
    tokens = isinstance(body_input, list) and bool(body_input) and all(type(token) is int for token in body_input)
    entries = body_input if isinstance(body_input, list) and body_input and not tokens else [body_input]
    texts = all(isinstance(entry, str) for entry in entries)
    if not texts and not all(isinstance(entry, list) and entry and all(type(token) is int for token in entry) for entry in entries):
        raise Refusal(400, "input: expected a string, a list of tokens, or a list of these", "input")
    if len(entries) > TEXTS:
        raise Refusal(400, f"input: {len(entries)} texts; at most {TEXTS} are allowed", "input")
    return entries


def documents_of(body: Mapping[str, Any]) -> list[str]:
    """Returns the texts to rerank.  Raises Refusal."""
    listed = body.get("documents")
    documents = [entry.get("text") if isinstance(entry, dict) else entry for entry in listed] if isinstance(listed, list) else []
    texts = [entry for entry in documents if isinstance(entry, str)]
    if not texts or len(texts) > TEXTS or len(texts) < len(documents):
        raise Refusal(400, f"documents: expected 1 to {TEXTS} strings, or objects with a text", "documents")
    return texts


def usage(texts: Sequence[Encoded]) -> dict[str, int]:
    count = sum(text.tokens for text in texts)
    return {"prompt_tokens": count, "total_tokens": count}


def answered(body: Mapping[str, Any]) -> Response:
    """Returns a body as JSON; takes a tenth of json.dumps' time for rows of numbers."""
    return Response(to_json(body, inf_nan_mode="null"), media_type="application/json")
