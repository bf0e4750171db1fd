"""Converts between bytes of the Open Inference Protocol (KServe's v2) and tensors.  Pure functions, without a server and NumPy.

A request is JSON.  With the binary tensor extension, the header Inference-Header-Content-Length has the JSON's length, and the
tensors' bytes follow.  Sources: kserve/open-inference-protocol, specification/protocol/inference_rest.md, and Triton's
docs/protocol/extension_binary_data.md.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from cgbundle.tensors.numbers import decode

Row = TypeVar("Row")

DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8", "int16": "INT16",
    "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
"""The protocol's names for the runtime's dtypes."""

WIDTHS = {"BOOL": 1, "BF16": 2} | {f"{kind}{bits}": bits // 8 for kind in ("INT", "UINT", "FP") for bits in (8, 16, 32, 64)}
"""Bytes of an element."""

CODES = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
"""Format characters of `struct`.  BF16 has none: as in Triton, it is only sent as bytes, never as JSON."""

AXES, ELEMENTS = 32, 1 << 40
"""Maximum axes and elements of a tensor; larger numbers are errors."""


JSON_BYTES = 4 << 20
"""Maximum bytes of JSON in a request: the parser blocks the process and needs ten times as much memory."""


REQUEST_PARAMETERS = {"timeout", "binary_data_output", "priority"}
"""Parameters of a request.  `priority` has no effect."""

INPUT_PARAMETERS, OUTPUT_PARAMETERS = {"binary_data_size"}, {"binary_data"}
"""Parameters of an input and of a requested output."""

REFUSED_PARAMETERS = {
    "sequence": "this server has no sequences", "classification": "this server has no such extension",
    "shared_memory": "this server has no shared memory: send the tensor's bytes",
}  # fmt: skip
"""Reasons for refused parameters, by prefix."""


class ProtocolError(Exception):
    """A request does not fit the protocol or the model; the text is the response's `error`."""


class TooLarge(ProtocolError):
    """A request has too much JSON."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model: its name, datatype, and shape, with -1 for sizes that vary.  `axes`: if a size varies, every
    size as a number or an expression of dimensions such as `2*seq+1`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    axes: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor as bytes, row-major and little-endian, with the datatype of its port."""

    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output, as bytes or as JSON."""

    name: str
    binary: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request: its id, the tensors in the order of the model's inputs, the requested outputs, and its timeout in
    microseconds, 0 for none."""

    id: str
    tensors: tuple[TensorData, ...]
    requested: tuple[RequestedOutput, ...]
    timeout: int


def read_request(body: bytes, header: str | None, inputs: Sequence[Port], outputs: Sequence[Port]) -> Request:
    """Parses a request's body; `header` is Inference-Header-Content-Length, or None.  Raises ProtocolError."""
    text, binary = _split(body, header)
    if len(text) > JSON_BYTES:
        raise TooLarge(f"the request has {len(text)} bytes of JSON, more than {JSON_BYTES}: send the tensors as binary data")
    try:
        request = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        _refuse(f"the request is not JSON: {error}")
    if type(request) is not dict:
        _refuse("the request is not a JSON object")
    name = request.get("id", "")
    if type(name) is not str:
        _refuse("id: expected a string")
    parameters = _parameters(request, "the request")
    timeout = check_request(parameters)
    tensors = _tensors(request.get("inputs"), binary, inputs)
    return Request(name, tensors, _requested_outputs(request.get("outputs"), parameters, outputs), timeout)


def write_response(
    model: str, version: str, request: Request, outputs: Sequence[Port], tensors: Sequence[TensorData]
) -> tuple[bytes, int | None]:
    """Returns a response's body, and its Inference-Header-Content-Length, None if all of it is JSON.  `tensors` are those of
    `outputs`.  Raises ProtocolError for an output that JSON cannot express: NaN, infinity, BF16."""
    pairs = {port.name: (port, tensor) for port, tensor in zip(outputs, tensors, strict=True)}
    rows, binary = [], []
    for output in request.requested:
        port, tensor = pairs[output.name]
        row: dict[str, Any] = {"name": port.name, "datatype": port.datatype, "shape": list(tensor.shape)}
        if output.binary:
            row["parameters"] = {"binary_data_size": len(tensor.data)}
            binary.append(tensor.data)
        else:
            row["data"] = _numbers(port, tensor.data)
        rows.append(row)
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": rows}
    if request.id:
        answer["id"] = request.id
    text = json.dumps(answer, separators=(",", ":")).encode()
    return b"".join([text, *binary]), len(text) if any(output.binary for output in request.requested) else None


def metadata(
    model: str,
    versions: Sequence[str],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    sizes: Sequence[tuple[str, Sequence[int]]] = (),
) -> dict[str, Any]:
    """Returns the response of /v2/models/M.  `sizes`: the recorded sizes of each dimension; the largest is a limit if calls cannot
    be chunked.  Sizes and axes are parameters, because the protocol has no field for them."""
    ports = [[{"name": p.name, "datatype": p.datatype, "shape": list(p.shape)} for p in side] for side in (inputs, outputs)]
    answer = {"name": model, "versions": list(versions), "platform": "cgbundle", "inputs": ports[0], "outputs": ports[1]}
    if not sizes:
        return answer
    axes = {port.name: list(port.axes) for port in inputs if port.axes}
    return answer | {"parameters": {"sizes": {name: list(dimension_sizes) for name, dimension_sizes in sizes}, "axes": axes}}


def check_parameters(parameters: Mapping[str, Any], known: Set[str], where: str) -> None:
    """Raises ProtocolError for a parameter that is not in `known`.  `where`: the owner of the parameters, such as "input 'x'"."""
    for name in sorted(parameters.keys() - known):
        others = f"this server knows {', '.join(sorted(known))}"
        why = next((text for begin, text in REFUSED_PARAMETERS.items() if name.startswith(begin)), others)
        _refuse(f"{where}: parameters: {name}: {why}")


def check_request(parameters: Mapping[str, Any]) -> int:
    """Returns the timeout of a request in microseconds, 0 for none.  Raises ProtocolError."""
    check_parameters(parameters, REQUEST_PARAMETERS, "the request")
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        _refuse("the request: parameters: timeout: expected microseconds, a whole number")
    return timeout


def by_name(rows: Sequence[tuple[str, Row]], where: str) -> Sequence[tuple[str, Row]]:
    """Returns the rows; their names must differ.  Raises ProtocolError."""
    if len(dict(rows)) < len(rows):
        _refuse(f"{where}: a name occurs twice")
    return rows


def port_named(name: str, ports: Sequence[Port], kind: str) -> Port:
    """Returns the port of that name; `kind`: "input" or "output".  Raises ProtocolError."""
    port = next((port for port in ports if port.name == name), None)
    if port is None:
        _refuse(f"{kind} {name!r}: the model has no such {kind}; it has {', '.join([port.name for port in ports])}")
    return port


def in_order(tensors: Mapping[str, TensorData], inputs: Sequence[Port]) -> tuple[TensorData, ...]:
    """Returns the tensors of a request in the order of the model's inputs.  Raises ProtocolError for a missing one."""
    for port in inputs:
        if port.name not in tensors:
            _refuse(f"input {port.name!r} is missing")
    return tuple([tensors[port.name] for port in inputs])


def check_shape(port: Port, datatype: object, shape: object) -> tuple[int, ...]:
    """Returns the shape of an input in the request.  Raises ProtocolError if it does not fit the port."""
    where = f"input {port.name!r}"
    if datatype != port.datatype:
        _refuse(f"{where}: datatype {datatype!r}, expected {port.datatype}")
    if type(shape) is not list or len(shape) > AXES or not all(type(size) is int and size >= 0 for size in shape):
        _refuse(f"{where}: shape: expected a list of sizes")
    fits = len(shape) == len(port.shape) and all(expected in (-1, size) for size, expected in zip(shape, port.shape, strict=True))
    if not fits:
        _refuse(f"{where}: shape {shape}, expected {list(port.shape)}, where -1 is any size")
    if math.prod(shape) > ELEMENTS:
        _refuse(f"{where}: shape {shape} has too many elements")
    return tuple(shape)


# --- private functions ------------------------------------------------------------------------------------------------


def _refuse(text: str) -> NoReturn:
    raise ProtocolError(text)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON: send the tensor as binary data")


def _split(body: bytes, header: str | None) -> tuple[bytes, memoryview]:
    if header is None:
        return body, memoryview(b"")
    if not (header.isascii() and header.isdigit()) or len(header) > 12 or int(header) > len(body):
        _refuse(f"Inference-Header-Content-Length: expected a number of at most {len(body)}, the bytes of the body")
    return body[: int(header)], memoryview(body)[int(header) :]


def _parameters(owner: Mapping[str, Any], where: str) -> dict[str, Any]:
    parameters = owner.get("parameters", {})
    if type(parameters) is not dict:
        _refuse(f"{where}: parameters: expected an object")
    return parameters


def _rows(listed: object, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the objects of a list by name; names must differ."""
    if type(listed) is not list or not all(type(row) is dict and type(row.get("name")) is str for row in listed):
        _refuse(f"{where}: expected a list of objects with a name")
    return list(by_name([(row["name"], row) for row in listed], where))


def _tensors(listed: object, binary: memoryview, inputs: Sequence[Port]) -> tuple[TensorData, ...]:
    tensors, offset = dict[str, TensorData](), 0
    for name, row in _rows(listed, "inputs"):
        port = port_named(name, inputs, "input")
        shape = check_shape(port, row.get("datatype"), row.get("shape"))
        parameters = _parameters(row, f"input {name!r}")
        check_parameters(parameters, INPUT_PARAMETERS, f"input {name!r}")
        size = parameters.get("binary_data_size")
        nbytes = math.prod(shape) * WIDTHS[port.datatype]
        if size is None:
            data: bytes | memoryview = _packed(port, row.get("data"), math.prod(shape))
        else:
            if type(size) is not int or size != nbytes or "data" in row:
                _refuse(f"input {name!r}: binary_data_size {size!r}: {port.datatype} {list(shape)} has {nbytes} bytes, and no data")
            data, offset = binary[offset : offset + size], offset + size
        tensors[name] = TensorData(shape, data)
    if offset != len(binary):
        _refuse(f"{len(binary)} bytes follow the JSON, but the binary_data_size of the inputs add up to {offset}")
    return in_order(tensors, inputs)


def _packed(port: Port, data: object, elements: int) -> bytes:
    """Returns a tensor's bytes from flat or nested JSON numbers."""
    where = f"input {port.name!r}: data"
    code = CODES.get(port.datatype)
    if code is None:
        _refuse(f"{where}: {port.datatype} is sent only as binary data")
    if type(data) is not list:
        _refuse(f"{where}: expected a list of {elements} elements, or binary data")
    flat: list[Any] = data
    while any(type(element) is list for element in flat):
        if not all(type(element) is list for element in flat):
            _refuse(f"{where}: lists and elements are mixed")
        flat = [element for nested in flat for element in nested]
    if len(flat) != elements:
        _refuse(f"{where}: {len(flat)} elements, expected {elements}")
    kinds: tuple[type, ...] = (bool,) if code == "?" else (int, float) if code in "efd" else (int,)
    if not all(type(element) in kinds for element in flat):
        _refuse(f"{where}: expected elements of {port.datatype}{', true or false' if code == '?' else ''}")
    try:
        return struct.pack(f"<{len(flat)}{code}", *flat)
    except (struct.error, OverflowError):
        _refuse(f"{where}: an element does not fit {port.datatype}")


def _requested_outputs(listed: object, parameters: Mapping[str, Any], outputs: Sequence[Port]) -> tuple[RequestedOutput, ...]:
    default = parameters.get("binary_data_output", False)
    if type(default) is not bool:
        _refuse("parameters: binary_data_output: expected true or false")
    if listed is None or listed == []:
        return tuple([RequestedOutput(port.name, default) for port in outputs])
    requested = []
    for name, row in _rows(listed, "outputs"):
        port_named(name, outputs, "output")
        chosen = _parameters(row, f"output {name!r}")
        check_parameters(chosen, OUTPUT_PARAMETERS, f"output {name!r}")
        binary = chosen.get("binary_data", default)
        if type(binary) is not bool:
            _refuse(f"output {name!r}: binary_data: expected true or false")
        requested.append(RequestedOutput(name, binary))
    return tuple(requested)


def _numbers(port: Port, data: bytes | memoryview) -> list[Any]:
    if port.datatype not in CODES:
        _refuse(f"output {port.name!r}: {port.datatype} is sent only as binary data: ask with binary_data")
    dtype = next(dtype for dtype, name in DATATYPES.items() if name == port.datatype)
    numbers = decode(dtype, bytes(data))
    if port.datatype.startswith("FP") and not all(map(math.isfinite, numbers)):
        _refuse(f"output {port.name!r}: JSON has no NaN and no infinity: ask with binary_data")
    return numbers
