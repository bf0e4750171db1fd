"""Writes the bundle's exported program for baselines: as a Python file, which starts without torch.export, or as ONNX.

    python -m cgcompile.tools.bench.export_program JOB python|onnx

`python` writes `job["program"]`: a class `Program` of PyTorch operations, without weights, and the tables `WEIGHTS` and `ZEROS`.  A
row of `WEIGHTS` is a parameter or buffer: its name, the tensor in weights.safetensors, the order of its axes in memory, whether it
is a parameter.  `ZEROS` maps names to dtype and shape of tensors that weights.safetensors does not contain, because they are zeros.
`onnx` writes `job["onnx"]`, weights included; it needs the packages onnx and onnxscript.

Private torch interfaces, in 2.11 and 2.13: `Graph.python_code` and its `globals`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.export.passes import move_to_device_pass

from cgbundle.format import archive, file_names
from cgbundle.format.file_names import entry_named
from cgbundle.format.schema import Weight
from cgbundle.format.shapes import memory_order

from ...errors import BuildError
from ...model.flat_module import PREFIX
from ...targets.cuda.lowering import repair
from ...transforms.prepared import without_markers
from .protocol import fail, say

FORWARD = "def forward(self"
"""The text with which torch begins the code of a graph."""

KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def load(path: str, target: str) -> ExportedProgram:
    """Loads the program at `path` for the device `target`, without cgcompile's marker operators.  Raises baseline-unwritable."""
    from ...model.devices import tracking  # noqa: F401 (registers the marker operators, which a program may contain)

    try:
        program = without_markers(torch.export.load(path))
    except Exception as error:  # mostly an operator of the user that is not registered in this process
        lines = str(error).strip().splitlines() or [""]
        raise BuildError(
            "baseline-unwritable", f"program.pt2: torch.export.load failed: {type(error).__name__}: {lines[0]}"
        ) from error
    if target != "cpu":
        program = move_to_device_pass(program, target)
    repair(program.graph_module)
    return program


def with_weights(program: ExportedProgram, weights: Mapping[str, Weight], path: str) -> ExportedProgram:
    """Loads the weights of `program` in place from the file at `path`.  `weights`: the manifest's rows by name."""
    from safetensors.torch import load_file

    tensors = load_file(path)

    def weight(name: str) -> torch.Tensor:
        row = weights[name.removeprefix(PREFIX)]
        if row.zeros:
            return torch.empty_strided(row.shape, row.strides, dtype=getattr(torch, row.dtype)).zero_()
        order = memory_order(row.shape, row.strides)
        return tensors[row.tensor].permute(sorted(range(len(order)), key=order.__getitem__))

    for name, placeholder in program.state_dict.items():
        weight_tensor = weight(name)
        program.state_dict[name] = (
            torch.nn.Parameter(weight_tensor, placeholder.requires_grad)
            if isinstance(placeholder, torch.nn.Parameter)
            else weight_tensor
        )
    for name, placeholder in program.constants.items():
        if isinstance(placeholder, torch.Tensor):
            program.constants[name] = weight(name)
    return program


def python_source(program: ExportedProgram, weights: Mapping[str, Weight]) -> str:
    """Returns the text of the Python file.  `weights`: the manifest's rows by name.  Raises baseline-unwritable."""
    inputs: list[str] = []
    rows: list[tuple[str, str, tuple[int, ...], bool]] = []
    used: list[Weight] = []
    for spec in program.graph_signature.input_specs:
        name = str(spec.arg.name)
        if spec.kind in KINDS and spec.target is not None:
            row = weights.get(str(spec.target).removeprefix(PREFIX))
            if row is None:
                raise BuildError("baseline-unwritable", f"program.pt2: {spec.target!r} is not among the bundle's weights")
            used.append(row)
            rows.append((name, row.tensor, memory_order(row.shape, row.strides), spec.kind is InputKind.PARAMETER))
            inputs.append(f"self.{name}")
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
        else:
            raise BuildError(
                "baseline-unwritable", f"program.pt2: input {name!r} is a {spec.kind.name}, which a Python file cannot hold"
            )
    shapes = {row.tensor: [row.shape[axis] for axis in memory_order(row.shape, row.strides)] for row in used if row.zeros}
    zeros = {row.tensor: (row.dtype, shapes[row.tensor]) for row in used if row.zeros}
    returned = f"return self.graph({', '.join(inputs)})"
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        returned = _written_back(program, returned)
    globals_of_code: dict[str, Any] = {}
    body = "\n".join(_class("Graph", program.graph_module, globals_of_code))
    parameters = ", ".join(name for name in inputs if not name.startswith("self."))
    definitions = "\n".join(_definition(name, value) for name, value in sorted(globals_of_code.items()))
    return f"""{definitions}

WEIGHTS = {rows!r}
ZEROS = {zeros!r}

{body}

class Program(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.graph = Graph()

    def forward(self, {parameters}):
        {returned}
"""


def _written_back(program: ExportedProgram, return_line: str) -> str:
    """Returns lines that call a program in functional form and copy the new values to its buffers.  Programs without outputs are
    stored in this form."""
    signature = program.graph_signature
    names = {str(spec.target): spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.BUFFER}
    lines = [return_line.replace("return", "made =", 1)]
    for index, spec in enumerate(signature.output_specs):
        if spec.kind is not OutputKind.BUFFER_MUTATION or spec.target not in names:
            raise BuildError("baseline-unwritable", "program.pt2: an output is not an output of the model")
        lines.append(f"self.{names[spec.target]}.copy_(made[{index}])")
    return "\n        ".join([*lines, "return ()"])


def _class(name: str, module: Any, globals_of_code: dict[str, Any]) -> Iterator[str]:
    """Yields a class for a graph, after the classes of the graphs that it calls (branches of a condition)."""
    children = [(child, f"{name}_{child}") for child, _ in module.named_children()]
    for child, class_name in children:
        yield from _class(class_name, getattr(module, child), globals_of_code)
    code = module.graph.python_code("self")
    for word, value in code.globals.items():
        if globals_of_code.setdefault(word, value) is not value and value == value:
            raise BuildError("baseline-unwritable", f"program.pt2: the name {word!r} has two meanings in its graphs")
    head, separator, source = code.src.partition(FORWARD)
    if not separator or head.strip():
        raise BuildError("baseline-unwritable", "program.pt2: torch writes the code of a graph in another way than cgcompile knows")
    yield f"class {name}(torch.nn.Module):"
    yield "    def __init__(self):"
    yield "        super().__init__()"
    yield from (f"        self.{child} = {class_name}()" for child, class_name in children)
    yield from (f"    {line}" for line in (separator + source).splitlines())
    yield ""


def _definition(name: str, value: Any) -> str:
    """Returns the line that defines `name` as `value`.  Raises baseline-unwritable."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f'{name} = float("{value}")'
    if value is type(None):
        return f"{name} = type(None)"
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and attribute and getattr(sys.modules.get(module), attribute, None) is value:
        return f"from {module} import {attribute} as {name}"
    raise BuildError("baseline-unwritable", f"program.pt2: its code uses {value!r}, which cannot be imported by a name")


def main(path: str, form: str) -> None:
    """Writes the file, then an empty answer.  A failure is answered with its reason."""
    sys.excepthook = fail
    with open(path) as file:
        job = json.load(file)
    manifest = archive.read_manifest(job["bundle"])
    weights = {row.name: row for row in manifest.weights}
    if file_names.per_size(manifest, entry_named(manifest, job["entry"])):
        raise BuildError(
            "baseline-unwritable", "programs/: the model was exported per size, and a baseline takes one program for all"
        )
    program = load(f"{job['bundle']}/{file_names.whole_program_file(job['entry'])}", job["target"] if form == "python" else "cpu")
    if form == "python":
        with open(job["program"], "w") as file:
            file.write(python_source(program, weights))
    else:
        warnings.filterwarnings("ignore")
        torch.onnx.export(with_weights(program, weights, job["weights"]), f=job["onnx"], dynamo=True, verbose=False)
    say({})


if __name__ == "__main__":
    main(*sys.argv[1:])
