"""Infinity and NaN over JSON, with the clients that write and read them: three values go in, and the same three come out."""
import json
import shutil
import subprocess

import numpy as np
import orjson
import pytest
import requests
import tritonclient.http as httpclient

DATATYPES = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
VALUES = [float("inf"), float("-inf"), float("nan")]


def infer(server, datatype, body):
    reply = requests.post(f"{server.url}/v2/models/identity_{datatype.lower()}/infer", data=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def body(datatype, data):
    return {"inputs": [{"name": "INPUT0", "datatype": datatype, "shape": [1, 3], "data": data}]}


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("binary_in", [False, True])
def test_tritonclient(made, datatype, binary_in):
    sent = np.array([VALUES], DATATYPES[datatype])
    with httpclient.InferenceServerClient(made.http) as client:
        tensor = httpclient.InferInput("INPUT0", [1, 3], datatype)
        tensor.set_data_from_numpy(sent, binary_data=binary_in)
        wanted = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=False)]
        answer = client.infer(f"identity_{datatype.lower()}", [tensor], outputs=wanted).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, sent)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_pythons_json(made, datatype):
    answer = infer(made, datatype, json.dumps(body(datatype, VALUES)))
    assert '"data":[Infinity,-Infinity,NaN]' in answer.text
    data = answer.json()["outputs"][0]["data"]
    np.testing.assert_array_equal(data, VALUES)
    again = infer(made, datatype, json.dumps(body(datatype, data)))
    assert again.text == answer.text


def test_orjson_writes_null_for_each_of_them(made):
    answer = infer(made, "FP32", orjson.dumps(body("FP32", VALUES)))
    np.testing.assert_array_equal(answer.json()["outputs"][0]["data"], [float("nan")] * 3)


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl on the path")
def test_curl(made):
    text = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,3],"data":[Infinity,-Infinity,NaN]}]}'
    url = f"{made.url}/v2/models/identity_fp32/infer/"
    said = subprocess.run(["curl", "-sS", "-d", text, url], capture_output=True, text=True, check=True).stdout
    assert '"data":[Infinity,-Infinity,NaN]' in said, said


@pytest.mark.parametrize("datatype, word", [("INT32", "NaN"), ("INT64", "null"), ("UINT8", "Infinity"), ("BYTES", "NaN")])
def test_where_no_float_may_stand(made, datatype, word):
    text = json.dumps(body(datatype, [word] * 3)).replace(f'"{word}"', word)
    reply = requests.post(f"{made.url}/v2/models/identity_{datatype.lower()}/infer", data=text, timeout=60)
    assert reply.status_code == 400, reply.text
    assert "input 'INPUT0'" in reply.json()["error"] and f"invalid type: {word}, expected a list of" in reply.json()["error"]
