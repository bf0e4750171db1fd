"""Tests which image the recorder names for a captured kernel if several images contain a kernel of the same name.

`python -m tests.gpu.helpers.names FOLDER`

Prints "right" if it is the image of the launched kernel. It runs in its own process, because CUPTI must subscribe before CUDA
starts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

from cgcompile.capture.worker.cupti import ImageLog

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) * {factor})
"""


def main(folder: Path) -> str:
    log = ImageLog()
    import torch

    from cgcompile.capture.take import Range, RawKernel
    from cgcompile.capture.worker.address_map import AddressMap
    from cgcompile.capture.worker.driver import inspect_pointer
    from cgcompile.capture.worker.graph_nodes import walk
    from cgcompile.targets.cuda.elf import read_cubin

    x = torch.ones(64, device="cuda")
    kernels, hashes = [], []
    for factor in (2, 3, 5):
        path = folder / f"scale{factor}.py"
        path.write_text(KERNEL.format(factor=factor))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernels.append(module.scale)
        hashes.append(hashlib.sha256(module.scale[(1,)](x, N=64).asm["cubin"]).hexdigest())
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        kernels[1][(1,)](x, N=64)
    modules, images = log.modules(), log.images
    known = AddressMap([Range(kind="weights", start=x.data_ptr(), size=256)], [], inspect_pointer)
    nodes, _edges, _used = walk(graph.raw_cuda_graph(), (1,), known, modules, lambda image: read_cubin(images[image]).functions)
    log.close()
    (node,) = nodes
    assert isinstance(node, RawKernel) and node.symbol == "scale"
    same_name = sum("scale" in read_cubin(data).functions for data in images.values())
    if node.image not in hashes:  # no loaded image has these bytes
        return f"another image of {same_name}"
    return "right" if node.image == hashes[1] and same_name >= 3 else f"image {hashes.index(node.image)} of {same_name}"


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
