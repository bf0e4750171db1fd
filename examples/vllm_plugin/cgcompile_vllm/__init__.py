"""A plugin for vLLM: an engine starts with the CUDA graphs that an earlier start captured.

    CGCOMPILE_GRAPHS=FOLDER vllm serve MODEL

The first two starts capture as usual, and save.  Later starts attach.  Without CGCOMPILE_GRAPHS the plugin does nothing.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

FOLDER = "CGCOMPILE_GRAPHS"
"""The environment variable that names the folder of the graphs."""

GRAPHS = "graphs.cgb"

VERSION = "0.24."
"""Prefix of the versions of vLLM whose attributes the plugin supports."""

WORKER = "cgcompile_vllm.worker.GraphWorker"

logger = logging.getLogger("vllm.cgcompile")


def register() -> None:
    """vLLM calls this function in each of its processes, before it reads its configuration."""
    if not os.environ.get(FOLDER):
        return
    import vllm
    from vllm.platforms import current_platform

    if not vllm.__version__.startswith(VERSION):
        logger.warning("cgcompile: vLLM %s is not known, only %s*: vLLM captures its graphs as usual", vllm.__version__, VERSION)
        return
    if not current_platform.is_cuda():
        return
    # vLLM then stores the compiled model in one file, which loads faster.  This is vLLM's default from torch 2.12 on.
    os.environ.setdefault("VLLM_USE_MEGA_AOT_ARTIFACT", "1")
    if not (Path(os.environ[FOLDER]) / GRAPHS).exists():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of this process cannot be observed
    platform = type(current_platform)
    stock = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        """Selects our worker if the user left the choice to vLLM."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        stock(vllm_config)

    platform.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[method-assign]
