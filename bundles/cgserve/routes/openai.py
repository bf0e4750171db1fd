"""OpenAI's protocol over HTTP, for all language models of a server.

POST /v1/completions, /v1/chat/completions (both with `stream`), /tokenize, /detokenize; GET /v1/models.  If allowed, also
/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM.  Requests join and leave the model's calls at every token
(scheduling/scheduler.py).  If a client disconnects, its part of the cache is freed.  Errors are OpenAI's: 400 invalid or
unsupported, 404 unknown model, 413 too large, 429 with Retry-After if too many requests are open, 503 if the model has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cgbundle.errors import CgbundleError

from ..language.adapters import AdapterError
from ..language.completion_response import PATHS, Completion
from ..language.completions import Refusal, object_of, of_kind
from ..language.engine import ModelFailed
from ..language.prompt_reader import PromptReader
from ..language.served_model import ServedModel
from ..log import one_line
from ..text.text_model import TextModel
from ..transport.unknown_paths import LISTED, text_of

BYTES, TOGETHER = 4 << 20, 64 << 20
"""Maximum bytes of a body, and of all open bodies together."""


OUTSIDE = ("/tokenize", "/detokenize")
"""Paths that also exist outside /v1, as in other servers."""


class OpenAI:
    """The routes below /v1.  `serving` and `texts`: the serving language models and models of texts, by name; `known`: the names of
    all models; `adapter_root`: the folder of adapters that clients may load, None if they may load none."""

    def __init__(
        self, serving: Callable[[], Mapping[str, ServedModel]], texts: Callable[[], Mapping[str, TextModel]],
        known: Callable[[], Iterable[str]], count_refused: Callable[[str, int], None], adapter_root: Path | None = None,
    ) -> None:  # fmt: skip
        self._serving, self._text_models, self._known = serving, texts, known
        self._created = int(time.time())
        self.reader = PromptReader(self._choose, count_refused)
        self.routes = [Route(path, self._complete, methods=["POST"]) for path in PATHS]
        for prefix in ("", "/v1"):
            self.routes += [Route(f"{prefix}/tokenize", self._tokenize, methods=["POST"])]
            self.routes += [Route(f"{prefix}/detokenize", self._detokenize, methods=["POST"])]
        self.routes += [Route("/v1/models", self._models), Route("/v1/models/{model:path}", self._model)]
        if adapter_root is not None:
            self._adapter_root = adapter_root.resolve()
            self.routes += [Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"])]
            self.routes += [Route("/v1/unload_lora_adapter", self._unload_adapter, methods=["POST"])]

    def _choose(self, name: str | None) -> ServedModel:
        """Returns the model that serves a name.  Raises Refusal."""
        serving = self._serving()
        if name is not None and name in serving:
            return serving[name]
        adapted = {adapter: served for served in serving.values() for adapter in served.adapters}
        if name in adapted:
            return adapted[name]
        if name is None:
            if len(serving) == 1:
                return next(iter(serving.values()))
            if not serving:
                raise Refusal(503, f"no language model serves; {LISTED}", "model")
            raise Refusal(400, f"model: expected one of {', '.join(serving)}", "model")
        if name in self._known():
            raise Refusal(503, f"no version of {name!r} serves as a language model; {LISTED}", "model", retry_after=1)
        names = ", ".join([*serving, *adapted])
        raise Refusal(404, f"no model {name!r}; " + (f"there is {names}" if names else LISTED), "model", "model_not_found")

    async def _complete(self, request: Request) -> Response:
        return Completion(self.reader, request.url.path, await request.body())

    async def _tokenize(self, request: Request) -> Response:
        """Returns the tokens of a prompt or a conversation, in vLLM's format."""
        body = await request.body()

        def work() -> dict[str, Any]:
            asked = object_of(body)
            served = self._choose(of_kind(asked, "model", str, None, "a string"))
            tokens = served.tokens_of(asked)
            return {"count": len(tokens), "max_model_len": served.context, "tokens": list(tokens)}

        return JSONResponse(await self.reader.run(work))

    async def _detokenize(self, request: Request) -> Response:
        body = await request.body()

        def work() -> dict[str, Any]:
            asked = object_of(body)
            served = self._choose(of_kind(asked, "model", str, None, "a string"))
            tokens = asked.get("tokens")
            if not isinstance(tokens, list) or not all(type(item) is int and 0 <= item < served.language.size for item in tokens):
                raise Refusal(400, f"tokens: expected tokens from 0 to {served.language.size - 1}", "tokens")
            return {"prompt": served.language.text(tokens)}

        return JSONResponse(await self.reader.run(work))

    async def _load_adapter(self, request: Request) -> Response:
        """Serves another adapter from the root folder."""
        name, path = texts_of(await request.body(), "lora_name", "lora_path")
        folder = (self._adapter_root / path).resolve()
        if not folder.is_relative_to(self._adapter_root):
            raise Refusal(400, f"lora_path: {path!r} does not lie in the folder of --adapter-root", "lora_path")
        try:
            await self._choose(None).load_adapter(name, folder)
        except AdapterError as error:
            raise Refusal(400, str(error), "lora_path") from None
        except ModelFailed as error:
            raise Refusal(503, str(error)) from None
        except CgbundleError as error:
            raise Refusal(500, one_line(error)) from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: Request) -> Response:
        (name,) = texts_of(await request.body(), "lora_name")
        if not self._choose(None).unload_adapter(name):
            raise Refusal(404, f"no adapter {name!r}", "lora_name", "model_not_found")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _models(self, _: Request) -> Response:
        models = [served.about(name) for served in self._serving().values() for name in (served.name, *served.adapters)]
        created = {"object": "model", "created": self._created, "owned_by": "cgbundle"}
        models += [{"id": name, **created, "max_model_len": text.context} for name, text in self._text_models().items()]
        return JSONResponse({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return JSONResponse(self._choose(name).about(name))


def texts_of(body: bytes, *names: str) -> list[str]:
    """Returns the fields of a body, which must have exactly these, each a string.  Raises Refusal."""
    fields = object_of(body)
    for name in fields.keys() - set(names):
        raise Refusal(400, f"{name}: no such field", name, "unknown_parameter")
    for name in names:
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise Refusal(400, f"{name}: expected a string", name)
    return [fields[name] for name in names]


def body_of(error: str) -> dict[str, Any]:
    """Returns the error for a body that is too large, in OpenAI's format."""
    return Refusal(413, error).body()


async def refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Refusal(error.status_code, text_of(request, error))
    assert isinstance(error, Refusal)
    return JSONResponse(error.body(), error.status, {"Retry-After": str(error.retry_after)} if error.retry_after else None)
