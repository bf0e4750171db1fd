"""A version of a bundle that serves: it is loaded, tested and warmed up by its self-test, and closed after its last answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

import cgbundle
from cgbundle.format.archive import read_manifest
from cgbundle.format.schema import IntKey, Manifest
from cgbundle.self_test import replay_self_test

from ..batching.request_queue import Batch
from ..language.bundle_model import BundleModel, cache_of, is_language_model
from ..language.engine import ModelFailed
from ..language.metrics import LanguageFamilies, LanguageMetrics
from ..language.served_model import ServedModel
from ..language.tokenizer import Language
from ..log import one_line
from ..tensors.entry import NotServable, Ports, TensorEntry, describe
from ..tensors.inference_protocol import TensorData
from ..text.text_model import TextModel, takes_texts
from .options import Options, Refused, tokenizer_beside

Loaded = cgbundle.Program | cgbundle.Replicas

Identity = tuple[tuple[int, int, int], ...]
"""Distinguishes a bundle from a later one at the same path: inode, size and time of each of its files."""

GPU_FAILED = "driver-failed"
"""The code of the error after which the CUDA context is lost, so that no call of this process can use the GPU."""

OWN_SERVER = "load the bundle in a server of your own, with a session for each client: program.session()"
"""The hint for a bundle none of whose entries the protocol can serve."""


class Watch:
    """Gets events of models; this class ignores them."""

    def batch(self, model: str, version: int, ports: Ports, batch: Batch) -> None:
        """Gets each answered batch of a model."""

    def language(self, model: str) -> LanguageMetrics:
        """Returns the metrics of a language model."""
        return LanguageFamilies(CollectorRegistry()).of(model)


class Version:
    """A version that serves from `open` until `close`, which first answers accepted requests.  Calls run in its own threads, one
    for each copy.

    `entries`: those that the Open Inference Protocol serves, by name; `not_served`: the reasons for other entries; `language`: the
    language model, or None; `text`: the embedding model, reranker or classifier, or None; `words`: the tokenizer, or None.
    """

    def __init__(self, model: str, number: int, identity: Identity) -> None:
        self.model, self.number, self.identity = model, number, identity
        self.entries: dict[str, TensorEntry] = {}
        self.not_served: dict[str, str] = {}
        self.language: ServedModel | None = None
        self.text: TextModel | None = None
        self.words: Language | None = None
        self.memory: Mapping[str, int] = {}
        self.seconds: dict[str, float] = {}
        self._failure: cgbundle.CgbundleError | None = None
        self._cleanup = AsyncExitStack()

    async def open(self, path: Path, options: Options, watch: Watch, before: Version | None) -> None:
        """Loads the bundle, replays its self-test, and accepts requests.  `before`: the version that serves, None if this is the
        first.  The first version starts with a short self-test (see `first_keys`), or without one for a language model, because
        nothing serves yet.  Raises Refused."""
        self._options, self._first = options, before is None
        self._adapters = dict(options.adapters)
        if before is not None and before.language is not None:  # clients may have loaded adapters since the start
            self._adapters = {name: adapter.folder for name, adapter in before.language.adapters.items()}
        self._words = before.words if before is not None else None
        copies = max(1, len(options.devices))
        self._thread = ThreadPoolExecutor(copies, f"version-{self.number}")
        try:
            program, ports, language = await asyncio.get_running_loop().run_in_executor(self._thread, self._load, path)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._program, self.memory = program, program.memory
        try:
            await self._begin(program, ports, language, watch)
        except (ValueError, ModelFailed, cgbundle.CgbundleError) as error:
            await self.close()
            raise Refused(one_line(error)) from None

    async def _begin(self, program: Loaded, ports: Mapping[str, Ports], language: Language | None, watch: Watch) -> None:
        """Accepts requests.  Raises ValueError for a language model that this server cannot call."""
        options, copies = self._options, max(1, len(self._options.devices))
        if language is not None and is_language_model(program.manifest):
            replicas = program.programs if isinstance(program, cgbundle.Replicas) else [program]
            models = [BundleModel(replica, options.turns) for replica in replicas]
            self.language = ServedModel(models, language, self.model, options.limit, watch.language(self.model), options.seconds)
            await self._cleanup.enter_async_context(self.language.engine)
            for name, folder in self._adapters.items():
                await self.language.load_adapter(name, folder)
        elif self._adapters:
            raise ValueError("--adapter: the bundle is not one of a language model")
        for name, entry_ports in ports.items():
            shown = self.model if len(program.entries) == 1 else f"{self.model}.{name}"

            def watch_batch(batch: Batch, shown: str = shown, ports: Ports = entry_ports) -> None:
                watch.batch(shown, self.number, ports, batch)

            entry = TensorEntry(program[name], entry_ports, self._thread, copies, options.wait / 1000, options.limit, watch_batch)
            self.entries[shown] = await self._cleanup.enter_async_context(entry)
        if language is not None and self.language is None:
            entry = self.entries[self.model]
            limits = (options.seconds, options.limit, entry.pause)
            self.text = TextModel(self.model, language, entry.ports, self.answer, *limits)

    async def answer(self, tensors: Sequence[TensorData], seconds: float, entry: str = "") -> list[TensorData]:
        """Returns the outputs of an entry, by default the only one, for a request's tensors, within `seconds` (0:
        `Options.seconds`).  Raises as TensorEntry.answer."""
        allowed = min(seconds or self._options.seconds, self._options.seconds)
        try:
            return await self.entries[entry or self.model].answer(tensors, allowed)
        except cgbundle.MachineError as error:
            if error.code == GPU_FAILED:
                self._failure = self._failure or error
            raise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.entries) or (self.model,)

    @property
    def failure(self) -> cgbundle.CgbundleError | None:
        """The error after which this process cannot use its GPU, or None."""
        calls = self.language.engine.last_error if self.language is not None else None
        return self._failure or (calls if calls is not None and calls.code == GPU_FAILED else None)

    async def close(self) -> None:
        """Answers accepted requests, then frees the memory."""
        if self.language is not None:
            await self.language.engine.drain()
        if self.text is not None:
            await self.text.drain()
        await self._cleanup.aclose()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._program.close)
        except cgbundle.MachineError as error:
            if error.code != GPU_FAILED:  # after it, there is nothing to free
                raise
        self._thread.shutdown()
        self._options.memory.give_back(self._size)

    # --- in the version's thread ---------------------------------------------------------------------------------------

    def _load(self, path: Path) -> tuple[Loaded, dict[str, Ports], Language | None]:
        """Returns the program, its served entries, and its tokenizer, or None.  Raises Refused."""
        began, devices = time.perf_counter(), self._options.devices
        try:
            manifest = read_manifest(str(path))
            self.words = language = self._language(path, manifest, self._words)
            self._words = None  # do not keep the previous version's tokenizer alive
            self._size = sum(dict(manifest.memories).values()) * max(1, len(devices))
            self._options.memory.take(self._size)
        except cgbundle.CgbundleError as error:
            raise Refused(one_line(error), error.hint) from None
        try:
            arguments: dict[str, Any] = {"devices": devices, "replicas": True} if devices else {}
            if self._options.threads is not None:
                arguments["threads"] = self._options.threads
            program: Loaded = cgbundle.load(path, **arguments)
            self.seconds["load"] = time.perf_counter() - began
            try:
                ports = self._examine(program)
                vocabulary = cache_of(manifest).vocabulary if is_language_model(manifest) else None
                if language is not None and vocabulary is not None and language.size > vocabulary:
                    text = f"the tokenizer has {language.size} tokens, the model {vocabulary}"
                    raise Refused(text, "give the model's own --tokenizer")
            except BaseException:
                program.close()
                raise
        except cgbundle.CgbundleError as error:
            self._options.memory.give_back(self._size)
            raise Refused(one_line(error), error.hint, memory=isinstance(error, cgbundle.OutOfMemory)) from None
        except BaseException:
            self._options.memory.give_back(self._size)
            raise
        if not (is_language_model(manifest) and self._first):
            self.seconds["self_test"] = time.perf_counter() - began - self.seconds["load"]
        return program, ports, language

    def _examine(self, program: Loaded) -> dict[str, Ports]:
        """Returns the ports of the served entries, after the self-test of all entries.  Raises Refused, CgbundleError."""
        manifest, ports = program.manifest, dict[str, Ports]()
        language = is_language_model(manifest)
        for entry in () if language else manifest.entries:
            try:
                ports[entry.name] = describe(entry, manifest.random)
            except NotServable as error:
                self.not_served[entry.name] = str(error)
        if not ports and not language:
            raise Refused("; ".join([f"entry {name}: {why}" for name, why in self.not_served.items()]), OWN_SERVER)
        if language and self._first:
            return ports
        compare = {entry.name: entry.self_test.compare for entry in manifest.entries}
        copies = program.programs if isinstance(program, cgbundle.Replicas) else (program,)
        keys = first_keys(manifest) if self._first else None
        for result in chain.from_iterable([replay_self_test(copy, keys) for copy in copies]):
            if not result.passed(compare[result.entry]):
                text = f"the self-test fails at int_key {result.key}: error {result.error:.1e}, allowed {result.tolerance:.1e}"
                raise Refused(text)
        return ports

    def _language(self, path: Path, manifest: Manifest, before: Language | None) -> Language | None:
        """Returns the tokenizer of a language model, or of a model whose inputs are tokens and their mask; None for other models.
        Raises Refused."""
        folder = self._options.tokenizer or tokenizer_beside(path, manifest.name)
        if not is_language_model(manifest):
            with suppress(NotServable):
                single_entry = len(manifest.entries) == 1
                if folder is not None and single_entry and takes_texts(describe(manifest.entries[0], manifest.random)):
                    return read_tokenizer(folder, before)
            if self._options.tokenizer is not None:
                text = "--tokenizer: the bundle is not one of tokens and their mask, int64 (batch, length), and one output"
                raise Refused(text, "leave --tokenizer out: the Open Inference Protocol asks for none")
            return None
        if folder is None:
            remedy = "give --tokenizer FOLDER, the one that the bundle was built from, or put its files beside the bundle"
            raise Refused(f"{path}: a language model, and there is no tokenizer.json beside it", remedy)
        return read_tokenizer(folder, before)


def read_tokenizer(folder: Path, before: Language | None) -> Language:
    """Loads the tokenizer of a folder.  Raises Refused."""
    try:
        return Language(folder, before)
    except Exception as error:  # noqa: BLE001  tokenizers only raises Exception
        raise Refused(f"{folder}: {one_line(error)}") from None


def first_keys(manifest: Manifest) -> list[IntKey]:
    """Returns the smallest and the largest int_key of each group that runs the same files.  On a CPU a hundred int_keys may share a
    file; on a GPU every int_key has its own graph."""
    keys_by_code: dict[tuple[str, ...], list[IntKey]] = {}
    for entry in manifest.entries:
        for program in entry.programs:
            code = tuple([step.file or manifest.regions[step.region].file for step in program.steps if step.kind != "copy"])
            keys_by_code.setdefault((entry.name, *code), []).append(program.key)
    return [key for keys in keys_by_code.values() for key in {min(keys, key=prod), max(keys, key=prod)}]


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds for the log."""
    return {f"{phase}_seconds": round(value, 3) for phase, value in seconds.items()}
