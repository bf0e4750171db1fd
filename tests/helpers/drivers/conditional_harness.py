"""Replays one recording of `conditional_rows` over an arena, with the driver of a GPU or with `fake_driver`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cgbundle.cuda import driver
from cgbundle.cuda.driver import Context, check
from cgbundle.cuda.graph_executor import GraphExecutor
from cgbundle.cuda.kernels import Modules
from cgbundle.cuda.memory import Memories
from cgbundle.cuda.stream_executor import StreamExecutor
from cgbundle.format.table import Table
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Recording
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.conditional_rows import ARENA, OUTPUT, RESULT, ROW, arena, recording
from tests.helpers.bundles.cuda_bundles import write

ARENA_BYTES = 256
CASES: tuple[tuple[tuple[int, ...], int], ...] = (((), 1), ((1,), 0), ((0, 1, 1, 0, 7), 3), ((1,) * 20, 0))
"""Arguments of `conditional_rows.arena`: (choices, flag)."""


class RecordingHarness:
    """A recording and its arena.  `image` has the kernel that sets conditions.  `rows` makes the recording from its hash."""

    def __init__(self, folder: Path, image: bytes, cleanup: ExitStack, rows: Callable[[str], Recording] = recording) -> None:
        manifest = write(folder, image)
        (file,) = [file for file in manifest.files if file.path.startswith("kernels/")]
        self.table = Table(tables.encode(rows(file.sha256)), "recording")
        self.context = Context(0)
        cleanup.callback(self.context.release)
        cleanup.enter_context(self.context)
        self.memories = Memories({"arena": ARENA_BYTES}, {}, cleanup, self.context.stream)
        self.modules = Modules(ArchiveOf(folder, manifest), (), self.memories)
        cleanup.callback(self.modules.close)

    def executor(self, mode: str) -> Any:
        """Returns a graph executor or a stream executor over the recording."""
        bases = self.memories.bases
        if mode == "graph":
            return GraphExecutor(self.context, self.table, self.modules, bases, self.context.stream)
        return StreamExecutor(self.table, self.modules, bases)

    def fill_arena(self, choices: tuple[int, ...], flag: int) -> None:
        """Writes the initial contents of the arena for one replay."""
        check("cuMemcpyHtoD", driver.cu.cuMemcpyHtoD(self.memories.bases[ARENA], bytes(arena(choices, flag)), ARENA_BYTES))
        check("cuStreamSynchronize", driver.cu.cuStreamSynchronize(0))  # the copy is asynchronous; other streams do not wait for it

    def read_back(self) -> tuple[bytes, int]:
        """Returns the output row and the result byte: the bytes of the arena at OUTPUT and RESULT."""
        data, cu, stream = (ctypes.c_uint8 * ARENA_BYTES)(), driver.cu, self.context.stream
        check("copy", cu.cuMemcpyDtoHAsync(ctypes.addressof(data), self.memories.bases[ARENA], ARENA_BYTES, stream))
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
        return bytes(data[OUTPUT : OUTPUT + ROW]), data[RESULT]
