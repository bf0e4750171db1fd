"""A folder of bundles in Ray Serve: replicas that scale from zero as fast as a bundle loads, without torch.

It serves the Open Inference Protocol at /v2, and Ray's handles: `handle.infer.remote(name, tensors)`.  Each replica loads requested
models within `memory` bytes, and evicts the least recently used.  Requests that name their model to Ray (header
serve_multiplexed_model_id, `options(multiplexed_model_id=...)`) go to a replica that has it.  batching/request_queue.py makes the
batches, because serve.batch does not distinguish models and shapes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .log import json_log
from .models.bundle_cache import BundleCache
from .models.options import Options, Refused
from .routes.inference import Refusal, Serving, infer, refused
from .tensors.inference_protocol import TensorData, metadata

MEMORY = 4 << 30
"""Default maximum bytes of loaded bundles in a replica."""

LARGEST = 64 << 20
"""Maximum bytes of a body, and of all bodies in a replica."""

SCALING = {
    "min_replicas": 0, "max_replicas": 2, "initial_replicas": 0, "target_ongoing_requests": 32, "upscale_delay_s": 0.0,
    "downscale_delay_s": 60.0, "downscale_to_zero_delay_s": 300.0, "look_back_period_s": 2.0,
}  # fmt: skip
"""From no replica to two; with more than 32 waiting or running requests per replica, another one starts."""


@serve.deployment(max_ongoing_requests=256, autoscaling_config=SCALING, graceful_shutdown_timeout_s=30)
class Bundles:
    """A replica.  `folder`: <model>/<version>/model.cgb; `memory`: maximum bytes of loaded bundles."""

    def __init__(self, folder: str, memory: int = MEMORY, wait: float = 2.0) -> None:
        self._cache = BundleCache(folder, memory, Options(wait=wait), poll=5.0)
        self._began, self._held = time.time(), 0  # `_held`: bytes of all bodies in memory

    @serve.multiplexed(max_num_models_per_replica=-1)
    async def _version(self, name: str) -> str:
        """Tells Ray that this replica has the model.  The cache evicts models by bytes, not by number."""
        await self._cache.version(name)
        return name

    async def infer(self, name: str, tensors: Sequence[TensorData]) -> list[TensorData]:
        """Returns a model's outputs for `tensors`, in the order of its inputs.  For Ray's handles.  Raises KeyError, Refused, and
        errors of a call."""
        if serve.get_multiplexed_model_id():
            await self._version(name)
        version = await self._cache.version(name)
        return await version.answer(tensors, 0)

    async def check_health(self) -> None:
        """Ray calls this every few seconds, and replaces a replica that raises an error."""
        if self._cache.failure is not None:
            raise self._cache.failure

    async def about(self) -> dict[str, Any]:
        """Describes this replica: its process, whether torch is imported, and the loaded models."""
        return {"process": os.getpid(), "torch": "torch" in sys.modules, "loaded": self._cache.loaded, "began": self._began}

    async def __call__(self, request: Request) -> Response:
        held = 0
        try:
            parts = []
            async for part in request.stream():
                held += len(part)
                self._held += len(part)
                if held > LARGEST:
                    raise Refusal(413, f"body: more than {LARGEST} bytes")
                if self._held > LARGEST:
                    raise Refusal(503, "body: all requests together exceed the limit of bytes; retry later", 1)
                parts.append(part)
            return await self._answer(request, b"".join(parts))
        except Refusal as refusal:
            return await refused(request, refusal)
        finally:
            self._held -= held

    async def _answer(self, request: Request, body: bytes) -> Response:
        match request.url.path.strip("/").split("/"):
            case ["v2"]:
                return JSONResponse({"name": "cgbundle", "version": "2", "extensions": ["binary_tensor_data"]})
            case ["v2", "health", "live" | "ready"]:
                return JSONResponse(await self.about())
            case ["v2", "models", name]:
                version, entry = await self._serving(name)
                ports = version.entries[entry].ports
                return JSONResponse(metadata(name, [str(version.number)], ports.inputs, ports.outputs, ports.sizes))
            case ["v2", "models", name, "ready"]:
                await self._serving(name)
                return JSONResponse({"ready": True})
            case ["v2", "models", name, "infer"] if request.method == "POST":
                return await infer(partial(self._serving, name), request, body, json_log)
        raise Refusal(404, "Not Found")

    async def _serving(self, name: str) -> Serving:
        """Returns the version and the entry of a model.  Raises Refusal."""
        try:
            if serve.get_multiplexed_model_id():
                await self._version(name)
            version = await self._cache.version(name)
        except KeyError:
            raise Refusal(404, f"no model {name!r}") from None
        except Refused as error:
            raise Refusal(503, str(error), 5) from None
        if name not in version.entries:
            raise Refusal(400, f"{name!r} has several entries, or is a language model: a replica serves neither")
        return version, name

    async def __del__(self) -> None:
        """Ray calls this when the replica ends."""
        await self._cache.close()


def app(arguments: dict[str, str]) -> serve.Application:
    """For `serve run cgserve.ray_replicas:app folder=models [memory=BYTES] [gpus=0.5] [replicas=8]`; `gpus`: of each replica."""
    scaling = SCALING | {"max_replicas": int(arguments.get("replicas", 2))}
    resources = {"num_cpus": float(arguments.get("cpus", 1)), "num_gpus": float(arguments.get("gpus", 0))}
    deployment: Any = Bundles.options(autoscaling_config=scaling, ray_actor_options=resources)  # type: ignore[attr-defined]
    return deployment.bind(str(Path(arguments["folder"]).absolute()), int(arguments.get("memory", MEMORY)))
