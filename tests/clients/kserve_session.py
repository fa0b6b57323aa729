"""Uses a server through kserve's clients; run as a process of its own, since kserve's and tritonclient's protobuf
descriptors have the same names and do not go into one process. Arguments: HTTP URL, gRPC address, and the name of the
model, which is `simple` if it is left out."""
import asyncio
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, Model
from kserve.inference_client import RESTConfig
from kserve.model import PredictorConfig
from kserve.protocol.infer_type import RequestedOutput

MODEL = sys.argv[3] if len(sys.argv) > 3 else "simple"
FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
SECOND = np.full((1, 16), 3, np.int32)


def inputs(binary):
    made = []
    for name, value in [("INPUT0", FIRST), ("INPUT1", SECOND)]:
        tensor = InferInput(name=name, shape=list(value.shape), datatype="INT32")
        tensor.set_data_from_numpy(value, binary_data=binary)
        made.append(tensor)
    return made


def check(response):
    outputs = {output.name: output.as_numpy() for output in response.outputs}
    np.testing.assert_array_equal(outputs["OUTPUT0"], FIRST + SECOND)
    np.testing.assert_array_equal(outputs["OUTPUT1"], FIRST - SECOND)


async def rest(url):
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    assert await client.is_server_live(url) is True
    assert await client.is_server_ready(url) is True
    assert await client.is_model_ready(url, MODEL)
    assert not await client.is_model_ready(url, "nothing")
    for binary_in in (False, True):
        for binary_out in (False, True):
            outputs = [RequestedOutput(f"OUTPUT{i}", {"binary_data": binary_out}) for i in range(2)]
            request = InferRequest(MODEL, inputs(binary_in), request_id="seven", request_outputs=outputs)
            response = await client.infer(url, request, model_name=MODEL)
            assert response.id == "seven" and response.model_name == MODEL
            check(response)
    request = InferRequest(MODEL, inputs(True), parameters={"binary_data_output": True})
    check(await client.infer(url, request, model_name=MODEL))
    try:
        await client.infer(url, InferRequest("nothing", inputs(False)), model_name="nothing")
        raise AssertionError("an unknown model answered")
    except httpx.HTTPStatusError as error:
        assert "nothing" in str(error) and error.response.status_code == 404, error
    await client.close()


async def over_grpc(address):
    async with InferenceGRPCClient(address, retries=0) as client:
        assert await client.is_server_live() is True
        assert await client.is_server_ready() is True
        assert await client.is_model_ready(MODEL) is True
        for binary in (False, True):
            check(await client.infer(InferRequest(MODEL, inputs(binary), request_id="seven")))
        try:
            await client.infer(InferRequest("nothing", inputs(True), request_id="seven"))
            raise AssertionError("an unknown model answered")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND, error


async def transformer(host, protocol):
    """A transformer's own model, which hands each request to the predictor at this host."""
    model = Model(MODEL, PredictorConfig(predictor_host=host, predictor_protocol=protocol))
    check(await model.predict(InferRequest(MODEL, inputs(False), request_id="eight"), headers={}))


asyncio.run(rest(sys.argv[1]))
asyncio.run(over_grpc(sys.argv[2]))
asyncio.run(transformer(sys.argv[1].removeprefix("http://"), "v2"))
asyncio.run(transformer(sys.argv[2], "grpc-v2"))
