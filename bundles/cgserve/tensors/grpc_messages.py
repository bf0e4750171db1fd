"""Messages of the Open Inference Protocol over gRPC, and their conversion to and from tensors.

The message classes are created at import, without protoc.  Sources of names and field numbers: kserve/open-inference-protocol,
specification/protocol/open_inference_grpc.proto, and for messages of the model repository Triton's grpc_service.proto.  The
messages have their own descriptor pool, because a client library in the same process may register the same names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from .inference_protocol import (
    CODES,
    INPUT_PARAMETERS,
    OUTPUT_PARAMETERS,
    WIDTHS,
    Port,
    ProtocolError,
    Request,
    RequestedOutput,
    TensorData,
    by_name,
    check_parameters,
    check_request,
    check_shape,
    in_order,
    port_named,
)  # fmt: skip

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

PARAMETERS = "map InferParameter parameters"

MESSAGES = {
    "ServerLiveRequest": [], "ServerLiveResponse": ["bool live"],
    "ServerReadyRequest": [], "ServerReadyResponse": ["bool ready"],
    "ModelReadyRequest": ["string name", "string version"], "ModelReadyResponse": ["bool ready"],
    "ServerMetadataRequest": [],
    "ServerMetadataResponse": ["string name", "string version", "repeated string extensions"],
    "ModelMetadataRequest": ["string name", "string version"],
    "ModelMetadataResponse": [
        "string name", "repeated string versions", "string platform", "repeated ModelMetadataResponse.TensorMetadata inputs",
        "repeated ModelMetadataResponse.TensorMetadata outputs",
    ],
    "ModelMetadataResponse.TensorMetadata": ["string name", "string datatype", "repeated int64 shape"],
    "InferParameter": [
        "oneof bool bool_param", "oneof int64 int64_param", "oneof string string_param", "oneof double double_param",
        "oneof uint64 uint64_param",
    ],
    "InferTensorContents": [
        "repeated bool bool_contents", "repeated int32 int_contents", "repeated int64 int64_contents",
        "repeated uint32 uint_contents", "repeated uint64 uint64_contents", "repeated float fp32_contents",
        "repeated double fp64_contents", "repeated bytes bytes_contents",
    ],
    "ModelInferRequest": [
        "string model_name", "string model_version", "string id", PARAMETERS, "repeated ModelInferRequest.InferInputTensor inputs",
        "repeated ModelInferRequest.InferRequestedOutputTensor outputs", "repeated bytes raw_input_contents",
    ],
    "ModelInferRequest.InferInputTensor": [
        "string name", "string datatype", "repeated int64 shape", PARAMETERS, "InferTensorContents contents",
    ],
    "ModelInferRequest.InferRequestedOutputTensor": ["string name", PARAMETERS],
    "ModelInferResponse": [
        "string model_name", "string model_version", "string id", PARAMETERS,
        "repeated ModelInferResponse.InferOutputTensor outputs", "repeated bytes raw_output_contents",
    ],
    "ModelInferResponse.InferOutputTensor": [
        "string name", "string datatype", "repeated int64 shape", PARAMETERS, "InferTensorContents contents",
    ],
    "RepositoryIndexRequest": ["string repository_name", "bool ready"],
    "RepositoryIndexResponse": ["repeated RepositoryIndexResponse.ModelIndex models"],
    "RepositoryIndexResponse.ModelIndex": ["string name", "string version", "string state", "string reason"],
    "RepositoryModelLoadRequest": ["string repository_name", "string model_name"],
    "RepositoryModelLoadResponse": [],
}  # fmt: skip
"""Fields of every message in the order of their numbers, from 1.  A name with a dot is a nested message."""

CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip
"""The field for a tensor's elements that are not sent as bytes.  FP16 and BF16 have no such field."""


def message_classes() -> dict[str, Any]:
    """Returns the class of every message, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="cgserve/inference.proto", package=PACKAGE, syntax="proto3")
    messages: dict[str, Any] = {}
    for name, fields in MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        messages[name] = messages[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
        for number, field in enumerate(fields, start=1):
            _declare(messages[name], name, number, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


def _declare(message: Any, owner: str, number: int, text: str) -> None:
    """Adds a field, given as "[repeated|oneof|map] TYPE NAME"."""
    kinds = descriptor_pb2.FieldDescriptorProto
    label, kind, name = text.split() if text.count(" ") == 2 else ("", *text.split())
    field = message.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = kinds.LABEL_REPEATED
    if label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if label == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _declare(entry, owner, 1, "string key")
        _declare(entry, owner, 2, f"{kind} value")
        kind = f"{owner}.{entry.name}"
    if kind[0].isupper():
        field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(kinds, f"TYPE_{kind.upper()}")


CLASSES = message_classes()


def read_infer(message: Any, inputs: Sequence[Port], outputs: Sequence[Port]) -> Request:
    """Parses a ModelInferRequest.  Raises ProtocolError."""
    timeout = check_request(parameters(message))
    rows, raw = by_name([(row.name, row) for row in message.inputs], "inputs"), list(message.raw_input_contents)
    if raw and len(raw) != len(rows):
        raise ProtocolError(f"raw_input_contents: expected {len(rows)} elements, one per input, got {len(raw)}")
    tensors = {}
    for number, (name, row) in enumerate(rows):
        port = port_named(name, inputs, "input")
        check_parameters(parameters(row), INPUT_PARAMETERS, f"input {name!r}")
        shape = check_shape(port, row.datatype, list(row.shape))
        tensors[name] = TensorData(shape, _data(port, shape, row, raw[number] if raw else None))
    for name, row in by_name([(row.name, row) for row in message.outputs], "outputs"):
        port_named(name, outputs, "output")
        check_parameters(parameters(row), OUTPUT_PARAMETERS, f"output {name!r}")
    names = [row.name for row in message.outputs] or [port.name for port in outputs]
    return Request(message.id, in_order(tensors, inputs), tuple([RequestedOutput(name, True) for name in names]), timeout)


def write_infer(model: str, version: str, request: Request, outputs: Sequence[Port], tensors: Sequence[TensorData]) -> Any:
    """Returns a ModelInferResponse with the requested outputs, as bytes."""
    by_port = {port.name: (port, tensor) for port, tensor in zip(outputs, tensors, strict=True)}
    answer = CLASSES["ModelInferResponse"](model_name=model, model_version=version, id=request.id)
    for output in request.requested:
        port, tensor = by_port[output.name]
        answer.outputs.add(name=port.name, datatype=port.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(bytes(tensor.data))
    return answer


def write_metadata(metadata: Mapping[str, Any]) -> Any:
    """Returns a ModelMetadataResponse for the result of `inference_protocol.metadata`.  Leaves out `parameters`: the message has no
    such field."""
    answer = CLASSES["ModelMetadataResponse"](name=metadata["name"], versions=metadata["versions"], platform=metadata["platform"])
    for side in ("inputs", "outputs"):
        for row in metadata[side]:
            getattr(answer, side).add(**row)
    return answer


def parameters(message: Any) -> dict[str, Any]:
    """Returns the parameters of a message as Python values."""
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()}
    return {name: getattr(value, choice) if choice else None for name, (value, choice) in chosen.items()}


def _data(port: Port, shape: tuple[int, ...], row: Any, raw: bytes | None) -> bytes:
    """Returns a tensor's bytes, from `raw` or from elements in a list.  Raises ProtocolError."""
    where, elements = f"input {port.name!r}", math.prod(shape)
    if raw is not None:
        if row.HasField("contents"):
            raise ProtocolError(f"{where}: has contents and raw_input_contents, expected one of them")
        if len(raw) != elements * WIDTHS[port.datatype]:
            expected = f"{elements * WIDTHS[port.datatype]} bytes for {port.datatype} {list(shape)}"
            raise ProtocolError(f"{where}: expected {expected}, got {len(raw)}")
        return raw
    field = CONTENTS.get(port.datatype)
    if field is None:
        raise ProtocolError(f"{where}: contents cannot hold {port.datatype}, send it in raw_input_contents")
    numbers = getattr(row.contents, field)
    if len(numbers) != elements:
        raise ProtocolError(f"{where}: {len(numbers)} elements in {field}, expected {elements}")
    try:
        return struct.pack(f"<{elements}{CODES[port.datatype]}", *numbers)
    except struct.error:
        raise ProtocolError(f"{where}: an element does not fit {port.datatype}") from None
