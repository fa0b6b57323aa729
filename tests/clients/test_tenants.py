"""Tenants: shares and quotas of device time on one emulated device. No assertion depends on how fast the machine is."""
import concurrent.futures
import re
import subprocess
import time

import grpc
import pytest
import requests
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest

from serving import START_TIMEOUT_S, Server

MODEL = """
latency_ms = [200.0]
inputs = [{ name = "x", datatype = "FP32", dims = [1] }]
outputs = [{ name = "y", datatype = "FP32", dims = [1] }]
"""
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
# One tenant has all the time, so that keys without a tenant are always beyond.
TENANTS = """
[tenants.search]
share = 1.0

[tenants.tiny]
quota = 0.000001
"""


@pytest.fixture(scope="module")
def server(binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    version = folder / "models" / "slow" / "1"
    version.mkdir(parents=True)
    (version / "model.emulated.toml").write_text(MODEL)
    file = folder / "keys.toml"
    file.write_text(TENANTS)

    def add(name, *flags):
        made = subprocess.run([binary, "key", "add", file, name, *flags], capture_output=True, text=True, check=True)
        return made.stdout.strip()

    keys = {name: add(name, "--tenant", name) for name in ("search", "tiny")}
    keys["none"] = add("none")
    with Server(binary, folder / "models", folder, "--api-keys", file, engine="emulated") as server:
        server.keys, server.key_file, server.binary = keys, file, binary
        yield server


def infer(server, key, timeout_us=None):
    headers = {"Authorization": f"Bearer {server.keys[key]}"}
    body = BODY if timeout_us is None else BODY | {"parameters": {"timeout": timeout_us}}
    return requests.post(f"{server.url}/v2/models/slow/infer", json=body, headers=headers, timeout=120)


def metric(server, line):
    headers = {"Authorization": f"Bearer {server.keys['none']}"}
    text = requests.get(f"http://127.0.0.1:{server.metrics_port}/metrics", headers=headers).text
    found = re.search("^" + re.escape(line) + r" (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_quota_refuses_with_a_hint(server):
    lent = infer(server, "tiny")
    assert lent.status_code == 200, lent.text
    refused = infer(server, "tiny")
    assert refused.status_code == 429 and "tenant 'tiny'" in refused.json()["error"], refused.text
    # 200 ms of a millionth of the time are more than two days.
    assert int(refused.headers["Retry-After"]) > 86_400
    message = ModelInferRequest(model_name="slow")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1])
    tensor.contents.fp32_contents.append(1.0)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as error:
            metadata = [("authorization", f"Bearer {server.keys['tiny']}")]
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, metadata=metadata)
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    hint = dict(error.value.trailing_metadata()) | dict(error.value.initial_metadata())
    assert int(hint["grpc-retry-pushback-ms"]) > 86_400_000
    assert metric(server, 'downbeat_tenant_refused_total{tenant="tiny"}') == 2


def test_requests_within_a_share_come_first(server):
    """Requests beyond a share wait in a queue; one within a share that comes last overtakes those that do not run yet."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ends = {}

        def ask(name, key):
            answer = infer(server, key)
            ends[name] = time.monotonic()
            return answer

        before = metric(server, 'downbeat_tenant_requests_total{standing="beyond",tenant="others"}')
        beyond = [pool.submit(ask, f"beyond {number}", "none") for number in range(6)]
        deadline = time.monotonic() + START_TIMEOUT_S
        while metric(server, 'downbeat_tenant_requests_total{standing="beyond",tenant="others"}') < before + 6:
            assert time.monotonic() < deadline, "six requests beyond a share have come"
            time.sleep(0.01)
        waited = 6 - len(ends)
        within = pool.submit(ask, "within", "search")
        assert within.result().status_code == 200
        assert all(answer.result().status_code == 200 for answer in beyond)
    if waited >= 3:
        later = sum(end > ends["within"] for name, end in ends.items() if name != "within")
        assert later >= 1, (waited, ends)


def test_a_client_cannot_choose_its_tenant(server):
    before = metric(server, 'downbeat_tenant_requests_total{standing="within",tenant="search"}')
    headers = {"Authorization": f"Bearer {server.keys['none']}"}
    body = BODY | {"parameters": {"downbeat_tenant": "search"}}
    assert requests.post(f"{server.url}/v2/models/slow/infer", json=body, headers=headers, timeout=120).status_code == 200
    assert metric(server, 'downbeat_tenant_requests_total{standing="within",tenant="search"}') == before


def test_a_request_that_can_never_be_in_time_is_no_matter_of_shares(server):
    late = infer(server, "none", timeout_us=1000)
    assert late.status_code == 504, late.text


def test_shares_above_one_are_refused_at_start(server, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text("[tenants.a]\nshare = 0.7\n\n[tenants.b]\nshare = 0.4\n")
    command = [server.binary, "serve", server.repository, "--engine", "emulated", "--api-keys", file, "--http-port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert ended.returncode != 0 and "add up to 1.100" in ended.stderr, ended.stderr


def test_a_quota_holds_where_the_device_makes_batches_and_shares_are_warned_of(server, tmp_path):
    version = tmp_path / "models" / "slow" / "1"
    version.mkdir(parents=True)
    (version / "model.emulated.toml").write_text(MODEL.replace("dims = [1]", "dims = [-1, 1]"))
    flags = ["--api-keys", server.key_file, "--device-policy", "windowed"]
    body = {"inputs": [BODY["inputs"][0] | {"shape": [1, 1]}]}
    with Server(server.binary, tmp_path / "models", tmp_path, *flags, engine="emulated") as windowed:

        def ask(key):
            headers = {"Authorization": f"Bearer {server.keys[key]}"}
            return requests.post(f"{windowed.url}/v2/models/slow/infer", json=body, headers=headers, timeout=120)

        assert ask("search").status_code == 200
        assert ask("tiny").status_code == 200
        refused = ask("tiny")
        assert refused.status_code == 429 and "tenant 'tiny'" in refused.json()["error"], refused.text
        assert "the shares of tenants do not hold for this model" in windowed.log, windowed.log
