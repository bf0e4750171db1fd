"""bundles/cgserve/tensors/inference_protocol.py: requests and answers of the Open Inference Protocol, between bytes and tensors."""

from __future__ import annotations

import importlib
import json
import math
import struct
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgbundle.tensors.numbers import decode

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@pytest.fixture(scope="module")
def protocol() -> ModuleType:
    """Imports the module if its requirements are installed."""
    return importlib.import_module("cgserve.tensors.inference_protocol")


def ports(protocol: ModuleType) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns two inputs and two outputs."""
    inputs = (protocol.Port("ids", "INT64", (-1, 2)), protocol.Port("mask", "BOOL", (-1,)))
    return inputs, (protocol.Port("scores", "FP32", (-1, 3)), protocol.Port("kept", "BF16", (-1,)))


def request(**changes: Any) -> dict[str, Any]:
    """Returns a valid request."""
    inputs = [
        {"name": "mask", "datatype": "BOOL", "shape": [1], "data": [True]},
        {"name": "ids", "datatype": "INT64", "shape": [1, 2], "data": [[3, -4]]},
    ]
    return {"inputs": inputs, **changes}


def read(protocol: ModuleType, text: Any, behind: bytes = b"", header: str | None = None) -> Any:
    body = text if isinstance(text, bytes) else json.dumps(text).encode()
    if behind and header is None:
        header = str(len(body))
    return protocol.read_request(body + behind, header, *ports(protocol))


def test_a_request_of_json(protocol: ModuleType) -> None:
    parsed = read(protocol, request(id="a", parameters={"timeout": 5000}))
    assert parsed.id == "a" and parsed.timeout == 5000
    assert [(tensor.shape, tensor.data) for tensor in parsed.tensors] == [((1, 2), struct.pack("<2q", 3, -4)), ((1,), b"\x01")]
    assert parsed.requested == (protocol.RequestedOutput("scores", False), protocol.RequestedOutput("kept", False))


def test_a_request_of_bytes_and_json_beside_each_other(protocol: ModuleType) -> None:
    """Bytes are in the order of the request's inputs, whatever the model's order is."""
    mask = {"name": "mask", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}}
    ids = {"name": "ids", "datatype": "INT64", "shape": [2, 2], "parameters": {"binary_data_size": 32}}
    data = struct.pack("<4q", 1, 2, 3, 4)
    asked = [{"name": "kept", "parameters": {"binary_data": True}}, {"name": "scores"}]
    parsed = read(protocol, {"inputs": [mask, ids], "outputs": asked}, b"\x01\x00" + data)
    assert [tensor.data for tensor in parsed.tensors] == [data, b"\x01\x00"]
    assert parsed.requested == (protocol.RequestedOutput("kept", True), protocol.RequestedOutput("scores", False))
    flat = {"name": "ids", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3, 4]}
    parsed = read(protocol, {"inputs": [flat, mask], "parameters": {"binary_data_output": True}}, b"\x01\x00")
    assert [tensor.data for tensor in parsed.tensors] == [data, b"\x01\x00"] and all(tensor.binary for tensor in parsed.requested)


def changed(which: str, **fields: Any) -> dict[str, Any]:
    body = request()
    body["inputs"] = [{**row, **fields} if row["name"] == which else row for row in body["inputs"]]
    return body


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "the request is not JSON: "),
        (b"\xff", "the request is not JSON: "),
        (b'{"inputs": [NaN]}', "NaN is not a number of JSON"),
        ([], "the request is not a JSON object"),
        ({}, "inputs: expected a list of objects with a name"),
        ({"inputs": [{"name": 1}]}, "inputs: expected a list of objects with a name"),
        (request(id=5), "id: expected a string"),
        (request(parameters=[]), "the request: parameters: expected an object"),
        (request(parameters={"timeout": "soon"}), "parameters: timeout: expected microseconds"),
        (request(parameters={"sequence_id": 3}), "parameters: sequence_id: this server has no sequences"),
        (request(parameters={"binary_data_output": 1}), "binary_data_output: expected true or false"),
        (request(inputs=request()["inputs"][:1]), "input 'ids' is missing"),
        (request(inputs=request()["inputs"] * 2), "inputs: a name occurs twice"),
        (changed("ids", name="tokens"), "input 'tokens': the model has no such input; it has ids, mask"),
        (changed("ids", datatype="INT32"), "input 'ids': datatype 'INT32', expected INT64"),
        (changed("ids", shape=[1, 3]), r"input 'ids': shape \[1, 3\], expected \[-1, 2\]"),
        (changed("ids", shape=[2]), r"input 'ids': shape \[2\], expected \[-1, 2\]"),
        (changed("ids", shape=[-1, 2]), "input 'ids': shape: expected a list of sizes"),
        (changed("ids", shape=[True, 2]), "input 'ids': shape: expected a list of sizes"),
        (changed("ids", shape=[10**15, 2]), "has too many elements"),
        (changed("ids", data=[1]), "input 'ids': data: 1 elements, expected 2"),
        (changed("ids", data=[[1], 2]), "input 'ids': data: lists and elements are mixed"),
        (changed("ids", data=[1.5, 2]), "input 'ids': data: expected elements of INT64"),
        (changed("ids", data=[True, 2]), "input 'ids': data: expected elements of INT64"),
        (changed("ids", data=[2**63, 2]), "input 'ids': data: an element does not fit INT64"),
        (changed("mask", data=[1]), "input 'mask': data: expected elements of BOOL, true or false"),
        (changed("mask", data=None), "input 'mask': data: expected a list of 1 elements, or binary data"),
        (changed("mask", parameters={"binary_data_size": 1}), "input 'mask': binary_data_size 1: BOOL .1. has 1 bytes"),
        (request(outputs=[{"name": "loss"}]), "output 'loss': the model has no such output; it has scores, kept"),
        (request(outputs=[{"name": "kept", "parameters": {"binary_data": 1}}]), "output 'kept': binary_data: expected true or"),
        (request(outputs=[{"name": "kept", "parameters": {"classification": 1}}]), "this server has no such extension"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(protocol: ModuleType, text: Any, message: str) -> None:
    with pytest.raises(protocol.ProtocolError, match=message):
        read(protocol, text)


def test_bytes_that_are_not_what_the_json_says(protocol: ModuleType) -> None:
    for header in ("x", "-1", "9999", "٣", ""):
        with pytest.raises(protocol.ProtocolError, match="Inference-Header-Content-Length: expected a number of at most"):
            read(protocol, request(), header=header)
    with pytest.raises(protocol.ProtocolError, match="3 bytes follow the JSON, but the binary_data_size of the inputs add up to 0"):
        read(protocol, request(), b"abc")
    mask = {"name": "mask", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}}
    with pytest.raises(protocol.ProtocolError, match="1 bytes follow the JSON, but the binary_data_size of the inputs add up to 2"):
        read(protocol, {"inputs": [mask, request()["inputs"][1]]}, b"a")


def test_answers_that_json_cannot_hold_are_refused_and_go_as_bytes(protocol: ModuleType) -> None:
    outputs = ports(protocol)[1]
    tensors = [protocol.TensorData((1, 3), struct.pack("<3f", 1, math.nan, 3)), protocol.TensorData((1,), b"\x80\x3f")]
    for name, message in (("scores", "JSON has no NaN"), ("kept", "BF16 is sent only as binary data")):
        with pytest.raises(protocol.ProtocolError, match=message):
            protocol.write_response(
                "m", "1", protocol.Request("", (), (protocol.RequestedOutput(name, False),), 0), outputs, tensors
            )
    asked = (protocol.RequestedOutput("kept", True), protocol.RequestedOutput("scores", True))
    body, length = protocol.write_response("m", "1", protocol.Request("x", (), asked, 0), outputs, tensors)
    message = json.loads(body[:length])
    assert (message["model_name"], message["model_version"], message["id"]) == ("m", "1", "x")
    assert body[length:] == tensors[1].data + tensors[0].data
    assert [row["parameters"]["binary_data_size"] for row in message["outputs"]] == [2, 12]


def test_metadata_says_what_a_client_has_to_send(protocol: ModuleType) -> None:
    model_metadata = protocol.metadata("m", ["3"], *ports(protocol))
    assert (model_metadata["name"], model_metadata["versions"], model_metadata["platform"]) == ("m", ["3"], "cgbundle")
    assert model_metadata["inputs"][0] == {"name": "ids", "datatype": "INT64", "shape": [-1, 2]}
    assert [row["datatype"] for row in model_metadata["outputs"]] == ["FP32", "BF16"] and "parameters" not in model_metadata
    model_metadata = protocol.metadata("m", ["3"], *ports(protocol), [("batch", (1, 8))])
    assert model_metadata["parameters"]["sizes"] == {"batch": [1, 8]}, "-1 alone would tell no client how long is too long"
    assert model_metadata["parameters"]["axes"] == {}
    named = protocol.Port("ids", "INT64", (-1, -1), ("batch", "seq"))
    model_metadata = protocol.metadata("m", ["3"], [named], [], [("batch", (1, 8)), ("seq", (16,))])
    assert model_metadata["parameters"]["axes"] == {"ids": ["batch", "seq"]}


DTYPES = ["bool", "float16", "float32", "float64", *[f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_every_tensor_comes_through_both_ways(protocol: ModuleType, data: st.DataObject, dtype: str) -> None:
    """Every tensor survives a round trip as JSON and as bytes."""
    datatype, shape = protocol.DATATYPES[dtype], data.draw(SHAPES)
    raw = data.draw(st.binary(min_size=(size := math.prod(shape) * protocol.WIDTHS[datatype]), max_size=size))
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    numbers = decode(dtype, raw)
    port = protocol.Port("x", datatype, tuple(data.draw(st.sampled_from((-1, size))) for size in shape))
    row = {"name": "x", "datatype": datatype, "shape": list(shape)}
    text = json.dumps({"inputs": [{**row, "parameters": {"binary_data_size": len(raw)}}]}).encode()
    got = protocol.read_request(text + raw, str(len(text)), [port], [port])
    assert got.tensors == (protocol.TensorData(shape, raw),)
    body, length = protocol.write_response(
        "m", "1", protocol.Request("", (), (protocol.RequestedOutput("x", True),), 0), [port], got.tensors
    )
    assert body[length:] == raw
    if all(map(math.isfinite, numbers)):
        body, none = protocol.write_response(
            "m", "1", protocol.Request("", (), (protocol.RequestedOutput("x", False),), 0), [port], got.tensors
        )
        [output] = json.loads(body)["outputs"]
        assert none is None and output == {**row, "data": numbers}
        again = protocol.read_request(json.dumps({"inputs": [output]}).encode(), None, [port], [port])
        assert again.tensors == (protocol.TensorData(shape, raw),)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(("ids", "INT64", "BOOL"))
KEYS = st.sampled_from(("name", "datatype", "shape", "data", "parameters", "inputs", "outputs", "binary_data_size"))
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=12)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(st.binary(max_size=60), st.dictionaries(st.sampled_from(("id", "inputs", "outputs", "parameters")), JSON)), st.data()
)
def test_nothing_that_comes_ends_in_another_error(protocol: ModuleType, text: Any, data: st.DataObject) -> None:
    header = data.draw(st.none() | st.text(max_size=3) | st.integers(0, 100).map(str))
    try:
        read(protocol, text, data.draw(st.binary(max_size=4)), header)
    except protocol.ProtocolError as error:
        assert str(error)


def test_more_json_than_is_read(protocol: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of JSON does not include the binary data after it."""
    monkeypatch.setattr(protocol, "JSON_BYTES", 200)
    port = protocol.Port("x", "FP32", (-1,))
    row = {"name": "x", "datatype": "FP32", "shape": [100], "parameters": {"binary_data_size": 400}}
    text = json.dumps({"inputs": [row]}).encode()
    assert protocol.read_request(text + bytes(400), str(len(text)), [port], [port]).tensors[0].shape == (100,)
    with pytest.raises(protocol.TooLarge, match="more than 200: send the tensors as binary data"):
        protocol.read_request(json.dumps({"inputs": [row | {"data": [0.5] * 100}]}).encode(), None, [port], [port])
