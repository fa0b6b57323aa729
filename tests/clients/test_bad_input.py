"""Wrong requests: each answer says what was wrong, and the next good request is answered well."""
import gzip
import json
import socket
import struct

import grpc
import numpy as np
import pytest
import requests
from tritonclient.grpc import service_pb2, service_pb2_grpc

GOOD = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}


def with_input(**changes):
    tensor = dict(GOOD["inputs"][0], **changes)
    return {"inputs": [{key: value for key, value in tensor.items() if value is not None}]}


@pytest.fixture
def post(made):
    """Posts to identity_fp32 (or another); afterwards a good request has to be answered."""
    def send(data=None, model="identity_fp32", **options):
        if not isinstance(data, (bytes, type(None))):
            data = json.dumps(data).encode()
        return requests.post(f"{made.url}/v2/models/{model}/infer", data=data, timeout=60, **options)

    yield send
    reply = send(GOOD)
    assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [1.0, 2.0]


def error_of(reply, status=400):
    assert reply.status_code == status, f"{reply.status_code}: {reply.text[:500]}"
    assert reply.headers["Content-Type"].startswith("application/json")
    message = reply.json()["error"]
    assert message
    return message


@pytest.mark.parametrize("request_body, words", [
    pytest.param(with_input(name="INPUT9"), ["INPUT9"], id="unknown input"),
    pytest.param(with_input(name=None), ["name"], id="input without a name"),
    pytest.param(with_input(datatype="FP64"), ["FP64", "FP32"], id="wrong datatype"),
    pytest.param(with_input(datatype="FLOAT"), ["FLOAT"], id="no such datatype"),
    pytest.param(with_input(datatype=None), ["datatype"], id="no datatype"),
    pytest.param(with_input(shape=[2]), ["shape"], id="too few dimensions"),
    pytest.param(with_input(shape=[1, 1, 2]), ["shape"], id="too many dimensions"),
    pytest.param(with_input(shape=[1, -2]), ["-2"], id="negative size"),
    pytest.param(with_input(shape=None), ["shape"], id="no shape"),
    pytest.param(with_input(shape="1,2"), ["1,2"], id="shape not a list"),
    pytest.param(with_input(shape=[1, 9223372036854775807]), ["INPUT0"], id="huge shape"),
    pytest.param(with_input(shape=[1 << 62, 1 << 62]), ["INPUT0"], id="overflowing shape"),
    pytest.param(with_input(shape=[1, 3]), ["3", "2"], id="too few elements"),
    pytest.param(with_input(shape=[1, 1]), ["1", "2"], id="too many elements"),
    pytest.param(with_input(data=["a", "b"]), ["INPUT0"], id="elements of another type"),
    pytest.param(with_input(data=[[1.0], [2.0, 3.0]]), ["INPUT0"], id="ragged data"),
    pytest.param(with_input(data=None), ["INPUT0"], id="no data"),
    pytest.param({"inputs": []}, ["INPUT0"], id="no inputs"),
    pytest.param({}, ["inputs"], id="empty object"),
    pytest.param([], [], id="not an object"),
    pytest.param({"inputs": GOOD["inputs"] * 2}, ["INPUT0"], id="input twice"),
    pytest.param(dict(GOOD, outputs=[{"name": "OUTPUT9"}]), ["OUTPUT9"], id="unknown output"),
    pytest.param(dict(GOOD, outputs=[{}]), ["name"], id="output without a name"),
    pytest.param(with_input(data=None, parameters={"binary_data_size": 8}), [], id="binary size without binary data"),
])
def test_wrong_requests(post, request_body, words):
    message = error_of(post(request_body))
    for word in words:
        assert word in message, message


def test_unknown_models_versions_and_regions(post, made):
    tensor = with_input(data=None, parameters={"shared_memory_region": "nowhere", "shared_memory_byte_size": 8})
    assert "nowhere" in error_of(post(tensor), 404)
    assert "nothing" in error_of(post(GOOD, model="nothing"), 404)
    reply = requests.post(f"{made.url}/v2/models/identity_fp32/versions/9/infer", json=GOOD)
    assert "9" in error_of(reply, 404)
    reply = requests.post(f"{made.url}/v2/models/identity_fp32/versions/newest/infer", json=GOOD)
    assert reply.status_code in (400, 404) and "newest" in reply.json()["error"]


@pytest.mark.parametrize("text", [
    pytest.param(b"", id="nothing"),
    pytest.param(b"{", id="open brace"),
    pytest.param(b"\x00\xff\xfe" * 1000, id="bytes"),
    pytest.param(json.dumps(GOOD).encode()[:-5], id="truncated"),
    pytest.param(json.dumps(GOOD).encode() + b"}", id="something after it"),
    pytest.param(b'{"inputs": ' + b"[" * 100_000, id="open brackets, 100,000 deep"),
    pytest.param(b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="brackets, 100,000 deep"),
    pytest.param(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, id="objects, 100,000 deep"),
    pytest.param(json.dumps(with_input(data="@")).replace('"@"', "[" * 100_000 + "]" * 100_000).encode(), id="data 100,000 deep"),
    pytest.param(json.dumps(GOOD).replace("1.0", "1e999").encode(), id="a number beyond FP32"),
])
def test_garbage_json(post, text):
    error_of(post(text))


@pytest.mark.parametrize("header", ["-1", "x", "999999", "18446744073709551616", "3"])
def test_wrong_length_of_the_json_part(post, header):
    error_of(post(GOOD, headers={"Inference-Header-Content-Length": header}))


@pytest.mark.parametrize("size", [0, 4, 7, 12, 1 << 40, -8])
def test_wrong_binary_size(post, size):
    text = json.dumps(with_input(data=None, parameters={"binary_data_size": size})).encode()
    message = error_of(post(text + struct.pack("<ff", 1, 2), headers={"Inference-Header-Content-Length": str(len(text))}))
    assert "INPUT0" in message or "binary" in message, message


@pytest.mark.parametrize("data", [
    pytest.param(struct.pack("<I", 100) + b"short", id="length beyond the end"),
    pytest.param(struct.pack("<I", 0xFFFFFFFF), id="largest length"),
    pytest.param(b"\x01", id="not even a length"),
    pytest.param(struct.pack("<I", 1) + b"a" + struct.pack("<I", 1) + b"b", id="one element too many"),
])
def test_wrong_bytes_tensor(post, data):
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor]}).encode()
    error_of(post(text + data, model="identity_bytes", headers={"Inference-Header-Content-Length": str(len(text))}))


def test_wrong_compression(post):
    text = json.dumps(GOOD).encode()
    error_of(post(text, headers={"Content-Encoding": "gzip"}))
    error_of(post(gzip.compress(text)[:-10], headers={"Content-Encoding": "gzip"}))
    reply = post(text, headers={"Content-Encoding": "br"})
    assert reply.status_code in (400, 415) and reply.json()["error"]


def test_a_small_body_that_unpacks_to_gigabytes(post, made):
    bomb = gzip.compress(b" " * (256 << 20))
    reply = post(bomb, headers={"Content-Encoding": "gzip"})
    assert reply.status_code in (400, 413), reply.text


@pytest.mark.parametrize("method, path", [("GET", "/v2/models/identity_fp32/infer"), ("POST", "/v2/health/live"),
                                          ("GET", "/v2/nowhere"), ("DELETE", "/v2/models/identity_fp32"), ("GET", "/%ff%fe"),
                                          ("GET", "/v2/models/" + "a" * 5000)])
def test_wrong_paths_and_methods(post, made, method, path):
    reply = requests.request(method, made.url + path)
    assert reply.status_code in (400, 404, 405, 414), reply.status_code


def test_broken_off_requests(post, made):
    text = json.dumps(GOOD).encode()
    head = b"POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(text)
    whole = head + text
    for end in (3, 20, len(head) - 1, len(head), len(head) + 10, len(whole) - 1):
        with socket.create_connection(("127.0.0.1", made.http_port)) as s:
            s.sendall(whole[:end])
    with socket.create_connection(("127.0.0.1", made.http_port)) as s:
        s.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500)
        s.settimeout(30)
        s.recv(4096)
    with socket.create_connection(("127.0.0.1", made.grpc_port)) as s:
        s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500)
        s.settimeout(30)
        s.recv(4096)


# -- gRPC


@pytest.fixture
def stub(made):
    with grpc.insecure_channel(made.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(grpc_request())
        assert response.raw_output_contents[0] == struct.pack("<ff", 1, 2)


def grpc_request(model="identity_fp32", name="INPUT0", datatype="FP32", shape=(1, 2), raw=(struct.pack("<ff", 1, 2),)):
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=raw)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


def status_of(call, request):
    with pytest.raises(grpc.RpcError) as error:
        call(request)
    assert error.value.details()
    return error.value.code().name, error.value.details()


@pytest.mark.parametrize("request_, words", [
    pytest.param(grpc_request(name="INPUT9"), ["INPUT9"], id="unknown input"),
    pytest.param(grpc_request(datatype="INT32"), ["INT32", "FP32"], id="wrong datatype"),
    pytest.param(grpc_request(datatype=""), [], id="no datatype"),
    pytest.param(grpc_request(shape=(2,)), ["shape"], id="too few dimensions"),
    pytest.param(grpc_request(shape=(1, -2)), ["-2"], id="negative size"),
    pytest.param(grpc_request(shape=(1 << 62, 1 << 62)), ["INPUT0"], id="overflowing shape"),
    pytest.param(grpc_request(shape=(1, 3)), ["12", "8"], id="too few bytes"),
    pytest.param(grpc_request(raw=()), ["INPUT0"], id="no data"),
    pytest.param(grpc_request(raw=(b"12345678", b"12345678")), [], id="data of one input too many"),
])
def test_wrong_grpc_requests(stub, request_, words):
    code, details = status_of(stub.ModelInfer, request_)
    assert code == "INVALID_ARGUMENT", details
    for word in words:
        assert word in details, details


def test_unknown_model_and_version_over_grpc(stub):
    code, details = status_of(stub.ModelInfer, grpc_request(model="nothing"))
    assert code == "NOT_FOUND" and "nothing" in details
    request = grpc_request()
    request.model_version = "9"
    code, details = status_of(stub.ModelInfer, request)
    assert code == "NOT_FOUND" and "9" in details


def test_both_raw_and_typed_contents(stub):
    request = grpc_request()
    request.inputs[0].contents.fp32_contents.extend([1, 2])
    assert status_of(stub.ModelInfer, request)[0] == "INVALID_ARGUMENT"


def test_garbage_instead_of_a_message(made, stub):
    with grpc.insecure_channel(made.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", lambda data: data, lambda data: data)
        for garbage in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", np.random.default_rng(0).bytes(1000)):
            with pytest.raises(grpc.RpcError) as error:
                call(garbage)
            assert error.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
        unknown = channel.unary_unary("/inference.GRPCInferenceService/Nothing", lambda data: data, lambda data: data)
        with pytest.raises(grpc.RpcError) as error:
            unknown(b"")
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_stream_that_breaks_off(made, stub):
    def requests_then_nothing():
        yield grpc_request()
        raise RuntimeError("the client fails")

    responses = stub.ModelStreamInfer(requests_then_nothing())
    with pytest.raises(grpc.RpcError):
        for _ in responses:
            pass
    cancelled = stub.ModelStreamInfer(iter([grpc_request()]))
    next(cancelled)
    cancelled.cancel()
