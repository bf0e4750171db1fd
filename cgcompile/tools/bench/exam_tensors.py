"""The exam's tensors for PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from cgbundle.format import archive
from cgbundle.format.safetensors import Mapped


def stored(job: dict[str, Any], key: int, kind: str) -> list[torch.Tensor]:
    """The tensors of one kind (input, output, written) at number `key` of the job's int_keys, on the CPU; inputs lie in memory as
    the signature says."""
    count = {"input": range(len(job["orders"])), "output": range(job["outputs"]), "written": job["written"]}[kind]
    exam = Mapped(f"{job['bundle']}/{archive.EXAM}", archive.EXAM)
    try:
        found = []
        for index in count:
            name = archive.exam_entry(job["keys"][key], kind, index)
            row, data = exam.entries[name], bytearray(exam.data(name))
            dtype = getattr(torch, row.dtype)
            value = torch.frombuffer(data, dtype=dtype).reshape(row.shape) if data else torch.empty(row.shape, dtype=dtype)
            if kind == "input":
                order = job["orders"][index]
                value = value.permute(order).contiguous().permute(sorted(range(len(order)), key=order.__getitem__))
            found.append(value)
        return found
    finally:
        exam.close()
