"""A worker for vLLM that saves its CUDA graphs in the first two starts and attaches them in later ones.

Replaced at run time:

- `parallel_config.worker_cls`, if it is "auto" (`register`): selects this class.
- `model_runner.capture_model` of this worker's runner: saves graphs after the capture, or attaches graphs instead.
- `torch.cuda.CUDAGraph`, while `capture_model` runs in a start that saves: vLLM does not ask torch to keep a graph's nodes.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import vllm
import vllm.envs
from vllm.v1.worker.gpu_worker import Worker

import cgbundle
import cgcompile

from . import FOLDER, GRAPHS, engine, logger
from .record import Record, read_record, write_record

REFUSED = "refused.txt"
"""The file with the reason why graphs cannot be saved; later starts then do not try."""

AGAIN = ("engine-differs", "recordings-differ", "addresses-equal")
"""Codes of errors that may not occur in the next start."""

SLACK = 256 << 20
"""Less GPU memory may be free than when the record was saved, by at most this many bytes."""


class GraphWorker(Worker):
    """A worker of one GPU.  If the graphs cannot be saved or attached, it logs one line, and vLLM starts as usual."""

    def init_device(self) -> None:
        """Decides whether this start saves or attaches, before CUDA is used."""
        self._folder = Path(os.environ[FOLDER])
        self._config = self._configuration()
        self._record: Record | None = None
        self._role = self._choose_role()
        super().init_device()
        if self._role:
            self._capture = self.model_runner.capture_model
            self.model_runner.capture_model = self._capture_or_attach  # type: ignore[method-assign]

    def _choose_role(self) -> str:
        """Returns "save", "attach", or "" for neither."""
        config = self.vllm_config
        if config.parallel_config.world_size_across_dp > 1:
            return self._capture_as_usual("graphs of one GPU alone are saved")
        if config.lora_config is not None or config.speculative_config is not None or not self.use_v2_model_runner:
            return self._capture_as_usual("adapters, drafts and the first model runner are not known here")
        self._folder.mkdir(parents=True, exist_ok=True)
        if (self._folder / REFUSED).exists():
            return self._capture_as_usual(f"{self._folder / REFUSED} says why an earlier start was not saved")
        self._record = read_record(self._folder)
        if (self._folder / GRAPHS).exists():
            if self._record is None or self._record.config != self._config:
                return self._capture_as_usual(f"{self._folder} was saved with another configuration")
            return "attach"
        if self._record is not None and self._record.config != self._config:
            self._record = None
            (self._folder / f"{GRAPHS}.recording").unlink(missing_ok=True)
        try:
            cgcompile.observe()
        except cgbundle.CgbundleError as error:
            return self._capture_as_usual(str(error))
        return "save"

    def _configuration(self) -> str:
        """Returns the settings that must equal those of the start that saved the graphs."""
        model, scheduler, cache = self.model_config, self.vllm_config.scheduler_config, self.cache_config
        compilation = self.vllm_config.compilation_config
        parts = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "model": (model.model, str(model.dtype), model.quantization, model.max_model_len),
            "lanes": (scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
            "cache": (cache.block_size, cache.cache_dtype, cache.gpu_memory_utilization),
            "graphs": (compilation.cudagraph_mode.name, compilation.cudagraph_capture_sizes),
        }
        return json.dumps(parts)

    def _compiled(self) -> str:
        """Returns the name of the compiled model in vLLM's cache: a hash of everything that affects its kernels."""
        return os.path.relpath(self.vllm_config.compilation_config.local_cache_dir or ".", vllm.envs.VLLM_CACHE_ROOT)

    def _capture_as_usual(self, reason: str) -> str:
        logger.warning("cgcompile: %s: vLLM captures its graphs as usual", reason)
        return ""

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Returns the bytes for the KV cache: those of the first start, if enough memory is free (SLACK)."""
        free = torch.cuda.mem_get_info()[0]
        record = self._record
        if record is None or not self._role or free < record.free - SLACK:
            cache = super().determine_available_memory()
            if self._role == "attach":
                self._role = self._capture_as_usual("less memory is free than when the graphs were saved")
            self._record = Record(config=self._config, compiled=self._compiled(), cache=cache, free=free, hidden=None, pieces=())
            return cache
        began = time.perf_counter()
        if self._role == "save":
            super().determine_available_memory()
        else:
            self.model_runner._dummy_run(64, skip_attn=True, is_profile=True)  # loads the compiled model
            logger.info("cgcompile: no profiling run, the compiled model in %.2f s", time.perf_counter() - began)
        self.available_kv_cache_memory_bytes = record.cache
        return record.cache

    @torch.inference_mode()
    def _capture_or_attach(self) -> int:
        """Replaces `capture_model`; returns the bytes of the graphs."""
        if self._role == "attach":
            try:
                return self._attached()
            except Exception as error:  # noqa: BLE001  the plugin must not end the engine
                self._role = self._capture_as_usual(f"{type(error).__name__}: {error}")
        if self._role != "save":
            return int(self._capture())
        tensors = engine.engine_tensors(self.model_runner)  # before the capture, as when later starts attach
        with mock.patch.object(torch.cuda, "CUDAGraph", engine.KeptGraph):
            size = int(self._capture())
        try:
            self._save(tensors)
        except Exception as error:
            logger.warning("cgcompile: the graphs were not saved: %s", error)
            code = getattr(error, "code", "")
            if code not in AGAIN:
                (self._folder / REFUSED).write_text(f"{error}\n")
            if code == "proof-failed":
                raise  # the verifying process may have written to this engine's memory
        return size

    def _save(self, tensors: dict[str, torch.Tensor]) -> None:
        began = time.perf_counter()
        runner, manager = self.model_runner, self.model_runner.cudagraph_manager
        pieces, graphs, returned = engine.captured_pieces(engine.wrappers())
        graphs |= {engine.full_key(descriptor): graph for descriptor, graph in manager.graphs.items()}
        tensors = tensors | returned
        hidden = manager.hidden_states
        if hidden is not None:
            tensors["hidden"] = hidden
        returns = {key: [] if hidden is None else ["hidden"] for key in graphs} | {piece.key: piece.names for piece in pieces}
        write_inputs = partial(engine.write_inputs, runner)
        saved = cgcompile.save_graphs(graphs, tensors, self._folder / GRAPHS, prepare=write_inputs, returns=returns)
        assert self._record is not None
        shape = None if hidden is None else (tuple(hidden.shape), str(hidden.dtype).removeprefix("torch."))
        write_record(self._folder, replace(self._record, compiled=self._compiled(), hidden=shape, pieces=tuple(pieces)))
        logger.info("cgcompile: %d graphs, a %s in %.2f s", len(graphs), saved.kind, time.perf_counter() - began)

    def _attached(self) -> int:
        began = time.perf_counter()
        runner, manager, record = self.model_runner, self.model_runner.cudagraph_manager, self._record
        assert record is not None
        if record.compiled != self._compiled():
            raise ValueError("the compiled model differs from that of the saved graphs")
        tensors = engine.engine_tensors(runner)
        if record.hidden is not None:
            shape, dtype = record.hidden
            tensors["hidden"] = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
        named = time.perf_counter()
        graphs = cgbundle.attach(self._folder / GRAPHS, tensors)
        attached = time.perf_counter()
        with ExitStack() as undo:
            undo.callback(graphs.close)
            full_graphs = {
                descriptor: graphs[engine.full_key(descriptor)]
                for mode, descriptors in manager._capture_descs.items()
                for descriptor in descriptors
                if mode.name == "FULL"
            }
            engine.give_pieces(record.pieces, engine.wrappers(), graphs, graphs.tensors)  # the last call that may fail
            undo.pop_all()
        manager.graphs, manager.hidden_states = full_graphs, tensors.get("hidden")
        manager._graphs_captured = True
        self._graphs = graphs
        size = sum(graphs.memory.values())
        logger.info(
            "cgcompile: %d graphs attached, nothing captured: tensors %.2f s, graphs %.2f s, the engine %.2f s; %.2f GiB",
            len(graphs), named - began, attached - named, time.perf_counter() - attached, size / 2**30,
        )  # fmt: skip
        return size
