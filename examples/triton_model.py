"""A bundle in Triton's Python backend: copy this file as `model.py` beside `model.cgb`.

    models/classifier/1/model.cgb      the bundle
    models/classifier/1/model.py       this file
    models/classifier/config.pbtxt     backend: "python"

Triton reads inputs, outputs and batching from the bundle, so config.pbtxt needs only that line.  `cgcompile serve` can serve the
same folder.  The backend's Python needs cgbundle and NumPy.  Interface: python_backend's triton_python_backend_utils.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import triton_python_backend_utils as backend

import cgbundle
from cgbundle.validate.bundle import checked_manifest

BUNDLE = Path(__file__).parent / "model.cgb"

TYPES = {
    "bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Triton's names for dtypes.  Its NumPy tensors have no bfloat16."""


def batches(entry: Any) -> tuple[int, ...]:
    """Returns the recorded sizes of the first axis of all tensors if its rows are independent, else ()."""
    shapes = [spec.shape for spec in (*entry.inputs, *entry.outputs)]
    for dimension in entry.dimensions:
        first = all(shape and shape[0] == dimension.name for shape in shapes)
        if first and dimension.chunk and not any(dimension.name in str(shape[1:]) for shape in shapes):
            return tuple(dimension.sizes)
    return ()


class TritonPythonModel:
    """The class that Triton loads."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Returns the model's configuration, from the bundle.  Raises KeyError for a dtype that the backend does not support."""
        entry = checked_manifest(str(BUNDLE)).entries[0]
        sizes = batches(entry)
        config.set_max_batch_size(sizes[-1] if sizes else 0)
        if sizes:
            config.set_dynamic_batching()
        free = {(row.output, row.axis) for row in entry.data_sizes}  # axes whose sizes depend on data
        for specs, add in ((entry.inputs, config.add_input), (entry.outputs, config.add_output)):
            for place, spec in enumerate(specs):
                dims = [size if type(size) is int else -1 for size in spec.shape[1 if sizes else 0 :]]
                if specs is entry.outputs:
                    dims = [-1 if (place, axis) in free else size for axis, size in enumerate(dims)]
                add({"name": spec.name, "data_type": f"TYPE_{TYPES[spec.dtype]}", "dims": dims})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the bundle, on the instance's GPU if it has one.  Raises CgbundleError, which Triton reports."""
        device = int(args["model_instance_device_id"]) if args.get("model_instance_kind") == "GPU" else 0
        self.program = cgbundle.load(BUNDLE, device=device)
        self.program.warmup()
        self.together = bool(batches(self.program.manifest.entries[0]))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns a response for each request; requests of one shape share a replay."""
        groups: dict[Any, list[tuple[int, list[Any]]]] = {}
        for place, request in enumerate(requests):
            arrays = [backend.get_input_tensor_by_name(request, spec.name).as_numpy() for spec in self.program.inputs]
            rows = len({array.shape[0] for array in arrays}) == 1 if self.together else False
            groups.setdefault(tuple([array.shape[1:] for array in arrays]) if rows else place, []).append((place, arrays))
        responses: list[Any] = [None] * len(requests)
        for group in groups.values():
            for (place, _), answer in zip(group, self._answers([inputs for _, inputs in group]), strict=True):
                responses[place] = answer
        return responses

    def finalize(self) -> None:
        self.program.close()

    def _answers(self, requests: list[list[Any]]) -> list[Any]:
        columns = zip(*requests, strict=True)
        try:
            tensors = self.program.replay([numpy.concatenate(column) if len(column) > 1 else column[0] for column in columns])
        except cgbundle.CallError as error:
            if len(requests) > 1:  # an invalid request must not fail others
                return [answer for request in requests for answer in self._answers([request])]
            return [backend.InferenceResponse([], backend.TritonError(" ".join(str(error).split())))]
        ends = numpy.cumsum([request[0].shape[0] for request in requests])[:-1] if len(requests) > 1 else []
        parts = [numpy.split(output, ends) if len(requests) > 1 else [output] for output in tensors]
        names = [spec.name for spec in self.program.outputs]
        return [
            backend.InferenceResponse([backend.Tensor(name, part) for name, part in zip(names, row, strict=True)])
            for row in zip(*parts, strict=True)
        ]
