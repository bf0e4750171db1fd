"""Runs a recording of `conditional_rows` over an arena on a GPU or in `fake_driver`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cgbundle.cuda import driver
from cgbundle.cuda.driver import Context, check
from cgbundle.cuda.graph_executor import GraphExecutor
from cgbundle.cuda.memory import Memories
from cgbundle.cuda.modules import Modules
from cgbundle.cuda.stream_executor import StreamExecutor
from cgbundle.tables.table import Table
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Recording
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.conditional_rows import OUTPUT, RESULT, ROW, arena, recording
from tests.helpers.bundles.cuda_bundles import write

BYTES = 256
CASES: tuple[tuple[tuple[int, ...], int], ...] = (((), 1), ((1,), 0), ((0, 1, 1, 0, 7), 3), ((1,) * 20, 0))
"""(choices, flag); see `conditional_rows.arena`."""


class Bench:
    """A recording and its arena; `image` holds the kernel that sets conditions."""

    def __init__(self, folder: Path, image: bytes, cleanup: ExitStack, rows: Callable[[str], Recording] = recording) -> None:
        manifest = write(folder, image)
        (file,) = [file for file in manifest.files if file.path.startswith("kernels/")]
        self.table = Table(tables.encode(rows(file.sha256)), "bench")
        self.context = Context(0)
        cleanup.callback(self.context.release)
        cleanup.enter_context(self.context)
        self.memories = Memories({"arena": BYTES}, {}, cleanup, self.context.stream)
        self.modules = Modules(ArchiveOf(folder, manifest), (), self.memories)
        cleanup.callback(self.modules.close)

    def executor(self, mode: str) -> Any:
        bases = self.memories.bases
        if mode == "graph":
            return GraphExecutor(self.context, self.table, self.modules, bases, self.context.stream)
        return StreamExecutor(self.table, self.modules, bases)

    def give(self, choices: tuple[int, ...], flag: int) -> None:
        """Fills the arena for one run."""
        check("cuMemcpyHtoD", driver.cu.cuMemcpyHtoD(self.memories.bases[3], bytes(arena(choices, flag)), BYTES))
        check("cuStreamSynchronize", driver.cu.cuStreamSynchronize(0))  # the copy is asynchronous; other streams do not wait for it

    def read_back(self) -> tuple[bytes, int]:
        """Returns the output row and the result byte."""
        data, cu, stream = (ctypes.c_uint8 * BYTES)(), driver.cu, self.context.stream
        check("copy", cu.cuMemcpyDtoHAsync(ctypes.addressof(data), self.memories.bases[3], BYTES, stream))
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
        return bytes(data[OUTPUT : OUTPUT + ROW]), data[RESULT]
