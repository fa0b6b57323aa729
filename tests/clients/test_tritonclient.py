"""tritonclient 2.51.0, every method of its HTTP and gRPC clients that this server supports: unchanged, as users call it."""
import asyncio
import queue

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from tritonclient.utils import InferenceServerException

from models import DATATYPES

FIRST = np.arange(32, dtype=np.int32).reshape(2, 16)
SECOND = np.full((2, 16), 3, np.int32)
HTTP_FORMS = [(True, True), (True, False), (False, True), (False, False)]


def simple_inputs(module, binary=None):
    inputs = []
    for name, value in [("INPUT0", FIRST), ("INPUT1", SECOND)]:
        tensor = module.InferInput(name, list(value.shape), "INT32")
        if binary is None:
            tensor.set_data_from_numpy(value)
        else:
            tensor.set_data_from_numpy(value, binary_data=binary)
        inputs.append(tensor)
    return inputs


def check_simple(result):
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + SECOND)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)


@pytest.fixture
def http(made):
    with httpclient.InferenceServerClient(made.http, concurrency=8) as client:
        yield client


@pytest.fixture
def grpc(made):
    with grpcclient.InferenceServerClient(made.grpc) as client:
        yield client


# -- health and metadata


def test_http_health_and_metadata(http):
    assert http.is_server_live() and http.is_server_ready()
    assert http.is_model_ready("simple") and http.is_model_ready("simple", "1")
    assert not http.is_model_ready("nothing") and not http.is_model_ready("simple", "9")
    server = http.get_server_metadata()
    assert server["name"] and server["version"]
    assert {"classification", "model_configuration", "model_repository", "statistics", "system_shared_memory",
            "binary_tensor_data"} <= set(server["extensions"])
    model = http.get_model_metadata("simple")
    assert model["name"] == "simple" and model["versions"] == ["1"]
    assert model["inputs"] == [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in range(2)]
    assert model["outputs"] == [{"name": f"OUTPUT{i}", "datatype": "INT32", "shape": [-1, 16]} for i in range(2)]
    config = http.get_model_config("simple", "1")
    assert config["name"] == "simple" and config["input"][0]["data_type"] == "TYPE_INT32"


def test_grpc_health_and_metadata(grpc):
    assert grpc.is_server_live() and grpc.is_server_ready()
    assert grpc.is_model_ready("simple") and grpc.is_model_ready("simple", "1")
    assert not grpc.is_model_ready("nothing")
    server = grpc.get_server_metadata(as_json=True)
    assert server["name"] and server["version"] and "classification" in server["extensions"]
    model = grpc.get_model_metadata("simple", as_json=True)
    assert model["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": ["-1", "16"]}
    assert grpc.get_model_config("simple").config.max_batch_size > 1


@pytest.mark.parametrize("call", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_an_unknown_model_is_named_in_the_error(http, grpc, call):
    for client, status in [(http, "404"), (grpc, "StatusCode.NOT_FOUND")]:
        with pytest.raises(InferenceServerException) as error:
            getattr(client, call)("nothing")
        assert "nothing" in error.value.message() and error.value.status() == status


# -- inference


@pytest.mark.parametrize("binary_in, binary_out", HTTP_FORMS)
def test_http_infer_json_and_binary(http, binary_in, binary_out):
    outputs = [httpclient.InferRequestedOutput(f"OUTPUT{i}", binary_data=binary_out) for i in range(2)]
    result = http.infer("simple", simple_inputs(httpclient, binary_in), outputs=outputs, request_id="seven", model_version="1")
    check_simple(result)
    response = result.get_response()
    assert response["id"] == "seven" and response["model_name"] == "simple" and response["model_version"] == "1"
    assert ("data" in response["outputs"][0]) != binary_out


def test_http_infer_without_requested_outputs_gives_all(http):
    check_simple(http.infer("simple", simple_inputs(httpclient)))


def test_only_the_requested_output_is_given(http, grpc):
    for module, client in [(httpclient, http), (grpcclient, grpc)]:
        result = client.infer("simple", simple_inputs(module), outputs=[module.InferRequestedOutput("OUTPUT1")])
        assert result.as_numpy("OUTPUT0") is None
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)


@pytest.mark.parametrize("request_algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_algorithm", [None, "gzip", "deflate"])
def test_http_compression(http, request_algorithm, response_algorithm):
    check_simple(http.infer("simple", simple_inputs(httpclient), request_compression_algorithm=request_algorithm,
                            response_compression_algorithm=response_algorithm))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_grpc_compression(grpc, algorithm):
    check_simple(grpc.infer("simple", simple_inputs(grpcclient), compression_algorithm=algorithm))


def test_http_async_infer(http):
    pending = [http.async_infer("simple", simple_inputs(httpclient)) for _ in range(20)]
    for request in pending:
        check_simple(request.get_result())


def test_http_generate_and_parse_body(made):
    """What users do who bring their own HTTP library."""
    import requests

    body, json_size = httpclient.InferenceServerClient.generate_request_body(simple_inputs(httpclient))
    headers = {"Inference-Header-Content-Length": str(json_size), "Content-Type": "application/octet-stream"}
    response = requests.post(f"{made.url}/v2/models/simple/infer", data=body, headers=headers)
    assert response.status_code == 200, response.text
    header_length = response.headers["Inference-Header-Content-Length"]
    check_simple(httpclient.InferenceServerClient.parse_response_body(response.content, header_length=int(header_length)))


def test_grpc_infer(grpc):
    result = grpc.infer("simple", simple_inputs(grpcclient), request_id="seven", model_version="1",
                        outputs=[grpcclient.InferRequestedOutput(f"OUTPUT{i}") for i in range(2)])
    check_simple(result)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("seven", "simple", "1")


def test_grpc_async_infer(grpc):
    results = queue.Queue()
    for _ in range(20):
        grpc.async_infer("simple", simple_inputs(grpcclient), callback=lambda result, error: results.put((result, error)))
    for _ in range(20):
        result, error = results.get(timeout=60)
        assert error is None
        check_simple(result)


def test_grpc_stream(grpc):
    results = queue.Queue()
    grpc.start_stream(lambda result, error: results.put((result, error)))
    for i in range(20):
        grpc.async_stream_infer("simple", simple_inputs(grpcclient), request_id=str(i))
    ids = []
    for _ in range(20):
        result, error = results.get(timeout=60)
        assert error is None
        check_simple(result)
        ids.append(result.get_response().id)
    grpc.stop_stream()
    assert sorted(ids, key=int) == [str(i) for i in range(20)]


def test_an_error_in_a_stream_leaves_the_stream_open(grpc):
    results = queue.Queue()
    grpc.start_stream(lambda result, error: results.put((result, error)))
    grpc.async_stream_infer("nothing", simple_inputs(grpcclient))
    result, error = results.get(timeout=60)
    assert result is None and "nothing" in error.message()
    grpc.async_stream_infer("simple", simple_inputs(grpcclient))
    result, error = results.get(timeout=60)
    assert error is None
    check_simple(result)
    grpc.stop_stream()


def test_http_aio(made):
    async def run():
        async with httpaio.InferenceServerClient(made.http) as client:
            assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("simple")
            assert (await client.get_model_metadata("simple"))["name"] == "simple"
            assert (await client.get_model_config("simple"))["name"] == "simple"
            assert len(await client.get_model_repository_index()) >= 3
            for result in await asyncio.gather(*[client.infer("simple", simple_inputs(httpclient)) for _ in range(20)]):
                check_simple(result)
            with pytest.raises(InferenceServerException, match="nothing"):
                await client.infer("nothing", simple_inputs(httpclient))

    asyncio.run(run())


def test_grpc_aio(made):
    async def run():
        async with grpcaio.InferenceServerClient(made.grpc) as client:
            assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("simple")
            for result in await asyncio.gather(*[client.infer("simple", simple_inputs(grpcclient)) for _ in range(20)]):
                check_simple(result)

            async def requests():
                for i in range(5):
                    yield {"model_name": "simple", "inputs": simple_inputs(grpcclient), "request_id": str(i)}

            ids = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                check_simple(result)
                ids.append(result.get_response().id)
                if len(ids) == 5:
                    break
            assert sorted(ids) == [str(i) for i in range(5)]

    asyncio.run(run())


# -- datatypes


def values_of(datatype):
    """Values at the ends of a datatype's range, [2, 3]."""
    numpy_type = DATATYPES[datatype][1]
    if datatype == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    if datatype == "BYTES":
        return np.array([[b"", b"plain", "na\u00efve \u2713".encode()], [b"a" * 300, b"\x00\x01\xff", b"last"]], np.object_)
    if datatype == "BF16":
        # Values that BF16 holds exactly.
        return np.array([[0.0, -1.5, 3.0], [1e38, -2.0**-126, 256.0]], np.float32).view(np.uint32).__and__(
            np.uint32(0xFFFF0000)).view(np.float32)
    if np.issubdtype(numpy_type, np.floating):
        info = np.finfo(numpy_type)
        return np.array([[0, -1.5, 0.1], [info.max, info.min, info.tiny]], numpy_type)
    info = np.iinfo(numpy_type)
    return np.array([[0, 1, 2], [info.max, info.min, info.max - 1]], numpy_type)


def same(got, expected):
    assert got.shape == expected.shape
    if expected.dtype == np.object_:
        assert got.ravel().tolist() == expected.ravel().tolist()
    else:
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("binary_in, binary_out", HTTP_FORMS)
def test_http_datatypes(http, datatype, binary_in, binary_out):
    if datatype in ("FP16", "BF16") and not (binary_in and binary_out):
        pytest.skip("tritonclient sends and reads these in binary form only")
    values = values_of(datatype)
    if datatype == "BYTES" and not (binary_in and binary_out):
        values = np.array([[b"", b"plain", "na\u00efve \u2713".encode()], [b"a" * 300, b'"\\\n', b"last"]], np.object_)
    tensor = httpclient.InferInput("INPUT0", list(values.shape), datatype)
    tensor.set_data_from_numpy(values, binary_data=binary_in)
    output = httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary_out)
    got = http.infer(f"identity_{datatype.lower()}", [tensor], outputs=[output]).as_numpy("OUTPUT0")
    if datatype == "BYTES" and not binary_out:
        got = np.array([v.encode() if isinstance(v, str) else v for v in got.ravel()], np.object_).reshape(got.shape)
    same(got, values)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_grpc_datatypes(grpc, datatype):
    values = values_of(datatype)
    tensor = grpcclient.InferInput("INPUT0", list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    same(grpc.infer(f"identity_{datatype.lower()}", [tensor]).as_numpy("OUTPUT0"), values)


CONTENTS = {"BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
            "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
            "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents"}


@pytest.mark.parametrize("datatype", CONTENTS)
def test_grpc_typed_contents(made, datatype):
    """Tensors in the typed fields of the message, as other clients send them."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    values = values_of(datatype)
    request = service_pb2.ModelInferRequest(model_name=f"identity_{datatype.lower()}")
    tensor = request.inputs.add(name="INPUT0", datatype=datatype, shape=values.shape)
    getattr(tensor.contents, CONTENTS[datatype]).extend(values.ravel().tolist())
    with grpc.insecure_channel(made.grpc) as channel:
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert len(response.raw_output_contents) == 1
    same(grpcclient.InferResult(response).as_numpy("OUTPUT0"), values)


def test_an_empty_dimension(http, grpc):
    values = np.zeros((2, 0), np.float32)
    for module, client in [(httpclient, http), (grpcclient, grpc)]:
        tensor = module.InferInput("INPUT0", [2, 0], "FP32")
        tensor.set_data_from_numpy(values)
        assert client.infer("identity_fp32", [tensor]).as_numpy("OUTPUT0").shape == (2, 0)


# -- parts that this server has not


def test_cuda_shared_memory_is_refused_by_name(grpc, http):
    for client in (http, grpc):
        with pytest.raises(InferenceServerException) as error:
            client.register_cuda_shared_memory("gpu", b"0" * 64, 0, 64)
        assert "cuda" in error.value.message().lower()
        assert client.is_server_live()
