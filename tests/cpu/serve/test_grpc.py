"""The Open Inference Protocol over gRPC: messages, answers, gRPC error statuses, keys, and Triton's client."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

grpc = pytest.importorskip("grpc", reason="pip install '.[grpc]'")
pytest.importorskip("google.protobuf", reason="pip install '.[grpc]'")
for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="pip install '.[serve]'")

from cgserve.tensors.grpc_messages import CLASSES, MESSAGES, SERVICE, read_infer  # noqa: E402
from cgserve.tensors.inference_protocol import Port, ProtocolError  # noqa: E402
from tests.cpu.serve.test_inference_server import ROW, Folder, Server, serving  # noqa: E402

INPUTS = [Port("input", "FP32", (-1, 2)), Port("on", "BOOL", (-1,))]
OUTPUTS = [Port("output", "FP32", (-1, 3)), Port("other", "BF16", (-1,))]


def infer_request(**more: Any) -> Any:
    request = CLASSES["ModelInferRequest"](model_name="tiny", id="7", **more)
    row = request.inputs.add(name="input", datatype="FP32", shape=[1, 2])
    row.contents.fp32_contents.extend([1.0, 2.0])
    request.inputs.add(name="on", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return request


def test_numbers_and_types_are_those_of_tritons_client() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2", reason="pip install '.[dev]'")
    for name in MESSAGES:
        outer, _, inner = name.partition(".")
        other = getattr(theirs, outer).DESCRIPTOR
        other = other.nested_types_by_name[inner] if inner else other
        fields = CLASSES[name].DESCRIPTOR.fields_by_name
        assert name.startswith("Repository") or set(fields) == set(other.fields_by_name)
        for field in fields.values():
            known = other.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (known.number, known.type, known.is_repeated), field.full_name


def test_numbers_are_those_of_the_protocol() -> None:
    """The bytes follow the protocol's .proto file: field 1 is 0a, 3 is 1a, 5 is 2a, 7 is 3a."""
    message = CLASSES["ModelInferRequest"](model_name="m", id="i", raw_input_contents=[b"r"])
    row = message.inputs.add(name="x", datatype="FP32", shape=[3])
    row.parameters["p"].int64_param = 5
    row.contents.fp32_contents.append(0.0)
    inside = "0a01781204" + b"FP32".hex() + "1a010322070a0170120210052a06320400000000"
    assert message.SerializeToString(deterministic=True).hex() == f"0a016d1a01692a{len(inside) // 2:02x}{inside}3a0172"


def test_tensors_come_as_elements_or_as_bytes() -> None:
    message = infer_request()
    read = read_infer(CLASSES["ModelInferRequest"].FromString(message.SerializeToString()), INPUTS, OUTPUTS)
    assert [bytes(tensor.data).hex() for tensor in read.tensors] == ["0000803f00000040", "01"]
    assert (read.id, [output.name for output in read.requested], read.timeout) == ("7", ["output", "other"], 0)
    for row in message.inputs:
        row.ClearField("contents")
    message.raw_input_contents.extend([bytes(8), b"\1"])
    message.outputs.add(name="other")
    message.parameters["timeout"].int64_param = 5
    read = read_infer(message, INPUTS, OUTPUTS)
    assert ([tensor.data for tensor in read.tensors], read.timeout) == ([bytes(8), b"\1"], 5)
    assert [output.name for output in read.requested] == ["other"]


def changed(what: str) -> Any:
    message = infer_request()
    if what == "raw":
        message.raw_input_contents.append(bytes(8))
    elif what == "both":
        message.raw_input_contents.extend([bytes(8), b"\1"])
    elif what == "short":
        del message.inputs[0].contents.fp32_contents[0]
    elif what == "missing":
        del message.inputs[1]
    elif what == "twice":
        message.inputs.add(name="on")
    elif what == "unknown":
        message.inputs.add(name="x")
    elif what == "output":
        message.outputs.add(name="x")
    elif what == "datatype":
        message.inputs[0].datatype = "FP64"
    elif what == "shape":
        message.inputs[0].shape[1] = -1
    elif what == "shared":
        message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    elif what == "sequence":
        message.parameters["sequence_id"].int64_param = 8
    elif what == "parameter":
        message.outputs.add(name="other").parameters["precision"].string_param = "low"
    return message


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raw", "raw_input_contents: expected 2 elements, one per input, got 1"),
        ("both", "input 'input': has contents and raw_input_contents, expected one of them"),
        ("short", "input 'input': 1 elements in fp32_contents, expected 2"),
        ("missing", "input 'on' is missing"),
        ("twice", "inputs: a name occurs twice"),
        ("unknown", "input 'x': the model has no such input; it has input, on"),
        ("output", "output 'x': the model has no such output; it has output, other"),
        ("datatype", "input 'input': datatype 'FP64', expected FP32"),
        ("shape", "input 'input': shape: expected a list of sizes"),
        ("shared", "input 'input': parameters: shared_memory_byte_size: this server has no shared memory: send the tensor's bytes"),
        ("sequence", "the request: parameters: sequence_id: this server has no sequences"),
        ("parameter", "output 'other': parameters: precision: this server knows binary_data"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(what: str, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_infer(changed(what), INPUTS, OUTPUTS)
    assert str(caught.value) == why


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = Folder(tmp_path_factory.mktemp("grpc"), bundle)
    folder.put(1)
    (folder.path / "keys").write_text("secret\n")
    models = folder.path / "models"
    with serving(models, "--poll", 3600, "--grpc-port", 0, "--largest", 1, "--api-key-file", folder.path / "keys") as grpc_server:
        grpc_server.said(lambda event: event["event"] == "serving")
        yield grpc_server


@pytest.fixture(scope="module")
def address(server: Server) -> str:
    listening = server.said(lambda event: str(event.get("url", "")).startswith("grpc://"))
    return str(listening["url"]).removeprefix("grpc://")


KEY = (("authorization", "Bearer secret"),)


def ask(address: str, name: str, message: Any, metadata: Any = KEY) -> Any:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=CLASSES[f"{name}Response"].FromString if f"{name}Response" in CLASSES else bytes,
        )
        return call(message, metadata=metadata, timeout=60)


def status(address: str, name: str, message: Any, metadata: Any = KEY) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        ask(address, name, message, metadata)
    return caught.value.code().name, caught.value.details()


def tiny(rows: int = 1, **more: Any) -> Any:
    request = CLASSES["ModelInferRequest"](**{"model_name": "tiny", **more})
    request.inputs.add(name="input", datatype="FP32", shape=[rows, 6]).contents.fp32_contents.extend(ROW * rows)
    return request


def test_health_and_metadata(address: str) -> None:
    for name, field in (("ServerLive", "live"), ("ServerReady", "ready")):
        assert getattr(ask(address, name, CLASSES[f"{name}Request"](), None), field)
    assert ask(address, "ModelReady", CLASSES["ModelReadyRequest"](name="tiny", version="1")).ready
    assert list(ask(address, "ServerMetadata", CLASSES["ServerMetadataRequest"]()).extensions) == ["model_repository"]
    metadata = ask(address, "ModelMetadata", CLASSES["ModelMetadataRequest"](name="tiny"))
    assert [(row.name, row.datatype, list(row.shape)) for row in metadata.inputs] == [("input", "FP32", [-1, 6])]
    rows = ask(address, "RepositoryIndex", CLASSES["RepositoryIndexRequest"]()).models
    assert [(row.name, row.version, row.state) for row in rows] == [("tiny", "1", "READY")]
    ask(address, "RepositoryModelLoad", CLASSES["RepositoryModelLoadRequest"](model_name="tiny"))


def test_answers_are_those_of_the_bundle(address: str, bundle: Path) -> None:
    import cgbundle

    numpy = pytest.importorskip("numpy")
    answer = ask(address, "ModelInfer", tiny(3, id="7"))
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "tiny", "1")
    output = numpy.frombuffer(answer.raw_output_contents[0], numpy.float32).reshape(list(answer.outputs[0].shape))
    with cgbundle.load(bundle) as program:
        assert numpy.allclose(output, program(numpy.asarray([ROW] * 3, numpy.float32)) + 1, atol=1e-5)


def test_errors_are_grpcs(address: str) -> None:
    assert status(address, "ModelInfer", tiny(model_name="other")) == ("NOT_FOUND", "no model 'other'; there are tiny")
    assert status(address, "ModelInfer", tiny(model_version="2"))[0] == "NOT_FOUND"
    wrong = tiny()
    wrong.inputs[0].datatype = "INT64"
    assert status(address, "ModelInfer", wrong) == ("INVALID_ARGUMENT", "input 'input': datatype 'INT64', expected FP32")
    assert status(address, "ModelInfer", tiny(50_000))[0] == "RESOURCE_EXHAUSTED"  # 1.2 MB, more than --largest of 1 MiB
    assert status(address, "ModelStreamInfer", tiny())[0] == "UNIMPLEMENTED"
    for key in (None, (("authorization", "Bearer wrong"),)):
        assert status(address, "ModelInfer", tiny(), key)[0] == "UNAUTHENTICATED"


@pytest.fixture(scope="module")
def triton() -> ModuleType:
    return pytest.importorskip("tritonclient.grpc", reason="pip install '.[dev]'")


def test_tritons_client_talks_to_it(address: str, triton: ModuleType) -> None:
    import numpy

    client, headers = triton.InferenceServerClient(address), dict(KEY)
    assert client.is_server_live(headers) and client.is_server_ready(headers) and client.is_model_ready("tiny", headers=headers)
    assert client.get_model_metadata("tiny", headers=headers).inputs[0].name == "input"
    client.load_model("tiny", headers=headers)
    tensor = triton.InferInput("input", [2, 6], "FP32")
    tensor.set_data_from_numpy(numpy.asarray([ROW] * 2, numpy.float32))
    wanted = [triton.InferRequestedOutput("output")]
    answer = client.infer("tiny", [tensor], outputs=wanted, request_id="9", timeout=60_000_000, headers=headers)
    assert answer.as_numpy("output").shape == (2, 3) and answer.get_response().id == "9"
    with pytest.raises(importlib.import_module("tritonclient.utils").InferenceServerException) as caught:
        client.infer("other", [tensor], headers=headers)
    assert "NOT_FOUND" in str(caught.value.status())


def test_a_port_that_is_taken_ends_the_server(server: Server, address: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(AssertionError) as caught, serving(tmp_path / "models", "--grpc-port", address.rpartition(":")[2]) as second:
        second.said(lambda event: event["event"] == "never")
    assert "gRPC cannot listen there: is the port taken?" in str(caught.value)
