"""The front door: TLS, API keys, restricted APIs, limits. Every route and every method, without a key, with a wrong one, and with too small a scope."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import ssl
import subprocess
import time

import grpc
import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import yaml
from cryptography import x509
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import models
from authority import Authority
from serving import START_TIMEOUT_S, Server

BODY = {"inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": [i] * 16} for i in range(2)]}
SCOPES = ["infer", "read", "manage"]


def until(what, holds):
    """Waits until `holds()`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


# Keys


def add_key(binary, file, name, *flags):
    """A key that `downbeat key add` makes."""
    made = subprocess.run([binary, "key", "add", file, name, *flags], capture_output=True, text=True, check=True)
    return made.stdout.strip()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(binary, tmp_path_factory):
    """A server with keys: one of each scope, one of one model, and the file's path."""
    folder = tmp_path_factory.mktemp("keyed")
    repository = folder / "models"
    models.add_sub(repository)
    models.add_sub(repository, "other")
    file = folder / "keys.toml"
    keys = {scope: add_key(binary, file, scope, "--scope", scope) for scope in SCOPES}
    keys["one"] = add_key(binary, file, "one", *[flag for scope in SCOPES for flag in ("--scope", scope)], "--model", "sim*")
    with Server(binary, repository, folder, "--api-keys", file, "--model-control-mode", "explicit", "--load-model", "*") as server:
        server.keys, server.key_file = keys, file
        yield server


def routes(server):
    """Every path and method of the server's own description, with names filled in."""
    described = yaml.safe_load(requests.get(f"{server.url}/v2/openapi.yaml", headers=bearer(server.keys["read"])).text)
    for path, methods in described["paths"].items():
        path = path.replace("{model}", "simple").replace("{version}", "1").replace("{region}", "none")
        for method in methods.keys() & {"get", "put", "post", "delete", "patch"}:
            yield method.upper(), path


def scope_of(method, path):
    if path.startswith(("/v2/health/", "/docs", "/v2/openapi.yaml")):
        return None
    if path.endswith(("/infer", "/generate", "/generate_stream")):
        return "infer"
    return "read" if method == "GET" or path == "/v2/repository/index" else "manage"


def ask(server, method, path, headers):
    port = server.metrics_port if path == "/metrics" else server.http_port
    return requests.request(method, f"http://127.0.0.1:{port}{path}", headers=headers, data=b"{}", timeout=60)


def test_no_route_is_open_but_health(keyed):
    walked = list(routes(keyed)) + [("GET", "/metrics"), ("GET", "/docs"), ("GET", "/no/such/path"), ("POST", "/no/such/path")]
    assert len(walked) > 30
    for method, path in walked:
        needed = scope_of(method, path)
        for variant in [path, path + "/"]:
            for headers in [{}, bearer("infer.wrong"), bearer("nobody.x"), bearer(""), {"Authorization": "Basic abc"}]:
                answer = ask(keyed, method, variant, headers)
                expected = 200 if needed is None else 401
                assert answer.status_code == expected, (method, variant, headers, answer.text)
                if needed:
                    assert answer.headers["WWW-Authenticate"] == "Bearer" and "API key" in answer.json()["error"]
        for scope in SCOPES:
            if needed not in (None, scope):
                answer = ask(keyed, method, path, bearer(keyed.keys[scope]))
                assert answer.status_code == 403 and f"'{needed}'" in answer.json()["error"], (method, path, scope, answer.text)


@pytest.mark.parametrize("written", [
    "/v2/models/simple/infer/", "/v2//models/simple/infer", "/v2/models/s%69mple/infer", "/v2/models/simple/versions/1/infer",
    "/v2/models/simple%2Finfer/infer", "/v2/models/../models/simple/infer",
])
def test_no_spelling_of_a_path_goes_around_the_keys(keyed, written):
    """The path goes out as it is written."""
    body = json.dumps(BODY).encode()
    for key in [None, keyed.keys["read"]]:
        head = f"POST {written} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        with socket.create_connection(("127.0.0.1", keyed.http_port), timeout=60) as client:
            client.sendall(head.encode() + b"\r\n" + body)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        status = int(answer.split()[1])
        assert status == (403 if key else 401), answer


def test_each_scope_is_enough_for_its_requests(keyed):
    assert ask_infer(keyed, "infer", "simple").status_code == 200
    assert requests.get(f"{keyed.url}/v2/models/simple", headers=bearer(keyed.keys["read"])).status_code == 200
    assert ask(keyed, "GET", "/metrics", bearer(keyed.keys["read"])).status_code == 200
    assert ask(keyed, "POST", "/v2/repository/models/simple/load", bearer(keyed.keys["manage"])).status_code == 200


def ask_infer(server, key, model):
    return requests.post(f"{server.url}/v2/models/{model}/infer", json=BODY, headers=bearer(server.keys[key]), timeout=60)


def test_a_key_of_some_models_sees_no_others(keyed):
    headers = bearer(keyed.keys["one"])
    assert ask_infer(keyed, "one", "simple").status_code == 200
    for path in ["", "/config", "/ready", "/stats"]:
        assert requests.get(f"{keyed.url}/v2/models/simple{path}", headers=headers).status_code == 200
        for hidden in ["other", "none"]:
            answer = requests.get(f"{keyed.url}/v2/models/{hidden}{path}", headers=headers)
            assert answer.status_code == 403 and f"'{hidden}'" in answer.json()["error"], "a model that is not there looks the same"
    assert ask_infer(keyed, "one", "other").status_code == 403
    index = requests.post(f"{keyed.url}/v2/repository/index", headers=headers).json()
    assert {entry["name"] for entry in index} == {"simple"}
    statistics = requests.get(f"{keyed.url}/v2/models/stats", headers=headers).json()
    assert {entry["name"] for entry in statistics["model_stats"]} == {"simple"}
    for method, path in [("GET", "/metrics"), ("GET", "/v2/timeline"), ("GET", "/v2/devices"), ("POST", "/v2/logging")]:
        assert ask(keyed, method, path, headers).status_code == 403, path
    assert ask(keyed, "POST", "/v2/repository/models/other/unload", headers).status_code == 403


def call(server, method, key, request=None):
    """The status of a call over gRPC with a key, or None."""
    metadata = [("authorization", f"Bearer {key}")] if key else []
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = request or message_of(method)
        try:
            if method.client_streaming:
                for _ in getattr(stub, method.name)(iter([request]), metadata=metadata, timeout=60):
                    pass
            else:
                getattr(stub, method.name)(request, metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def methods():
    return service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods


def message_of(method):
    return getattr(service_pb2, method.input_type.name)()


def rpc_scope(name):
    if name in ("ServerLive", "ServerReady"):
        return None
    if name.endswith("Infer"):
        return "infer"
    reads = ("ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "SystemSharedMemoryStatus", "CudaSharedMemoryStatus")
    return "read" if name in reads else "manage"


def test_no_method_is_open_but_health(keyed):
    assert len(methods()) >= 20
    for method in methods():
        needed = rpc_scope(method.name)
        for key in [None, "infer.wrong", "nobody.x"]:
            code, _ = call(keyed, method, key)
            assert code == (grpc.StatusCode.OK if needed is None else grpc.StatusCode.UNAUTHENTICATED), (method.name, key)
        for scope in SCOPES:
            if needed not in (None, scope):
                code, details = call(keyed, method, keyed.keys[scope])
                assert code == grpc.StatusCode.PERMISSION_DENIED and f"'{needed}'" in details, (method.name, scope)


def test_over_grpc_a_key_of_some_models_sees_no_others(keyed):
    key = keyed.keys["one"]
    for name in ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"]:
        method = next(method for method in methods() if method.name == name)
        for model, expected in [("simple", grpc.StatusCode.OK), ("other", grpc.StatusCode.PERMISSION_DENIED), ("none", grpc.StatusCode.PERMISSION_DENIED)]:
            request = message_of(method)
            request.name = model
            assert call(keyed, method, key, request)[0] == expected, (name, model)
    for name in ["RepositoryModelLoad", "RepositoryModelUnload"]:
        method = next(method for method in methods() if method.name == name)
        request = message_of(method)
        request.model_name = "other"
        assert call(keyed, method, key, request)[0] == grpc.StatusCode.PERMISSION_DENIED, name
    for model in ["other", "none"]:
        request = service_pb2.ModelInferRequest(model_name=model)
        assert call(keyed, next(m for m in methods() if m.name == "ModelInfer"), key, request)[0] == grpc.StatusCode.PERMISSION_DENIED
    with grpc.insecure_channel(keyed.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(iter([service_pb2.ModelInferRequest(model_name="other")]), metadata=[("authorization", f"Bearer {key}")], timeout=60)
        assert "not for model 'other'" in next(stream).error_message


def test_tritonclient_sends_keys(keyed):
    def inputs(module):
        found = [module.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in range(2)]
        for i, tensor in enumerate(found):
            tensor.set_data_from_numpy(np.full((1, 16), i, np.int32))
        return found

    for module, address in [(httpclient, keyed.http), (grpcclient, keyed.grpc)]:
        # The client adds headers of its own to these.
        headers = {"authorization": f"Bearer {keyed.keys['infer']}"}
        client = module.InferenceServerClient(address)
        answer = client.infer("simple", inputs(module), headers=headers)
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), np.ones((1, 16), np.int32))
        with pytest.raises(InferenceServerException, match="API key"):
            client.infer("simple", inputs(module))


def test_the_file_of_keys_is_followed(binary, keyed):
    """A key that comes is taken, one that goes is refused on the connections that it has, and a wrong file changes nothing."""
    before = keyed.key_file.read_text()
    try:
        late = add_key(binary, keyed.key_file, "late", "--scope", "infer")
        with requests.Session() as session:
            def status():
                return session.post(f"{keyed.url}/v2/models/simple/infer", json=BODY, headers=bearer(late)).status_code

            until("the new key is taken", lambda: status() == 200)
            keyed.key_file.write_text("nonsense")
            until("the wrong file is reported", lambda: "those before stay" in keyed.log)
            assert status() == 200
            keyed.key_file.write_text(before)
            until("the key is gone", lambda: status() == 401)
    finally:
        keyed.key_file.write_text(before)


def test_a_key_has_its_limits(binary, start, repository, tmp_path):
    models.add_sub(repository)
    file = tmp_path / "keys.toml"
    slow = add_key(binary, file, "slow", "--requests-per-second", "1")
    small = add_key(binary, file, "small", "--bytes-in-flight", "64")
    free = add_key(binary, file, "free")
    server = start(repository, "--api-keys", file)
    server.keys = {"slow": slow, "small": small, "free": free}
    assert ask_infer(server, "slow", "simple").status_code == 200
    answers = []
    until("a request too many is refused", lambda: answers.append(ask_infer(server, "slow", "simple")) or answers[-1].status_code != 200)
    refused = answers[-1]
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert "key 'slow' may send 1" in refused.json()["error"]
    answer = ask_infer(server, "small", "simple")
    assert answer.status_code == 413 and "bytes_in_flight" in answer.json()["error"], answer.text
    assert all(ask_infer(server, "free", "simple").status_code == 200 for _ in range(20)), "others are not touched"


def test_a_wrong_file_of_keys_ends_the_start(binary, start, repository, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text("[keys.web]\nhash = 'secret'\nscopes = ['infer']\n")
    models.add_sub(repository)
    server = start(repository, "--api-keys", file, wait=False)
    assert server.wait_end() == 1 and "64 hexadecimal digits" in server.log and "web" in server.log
    answer = subprocess.run([binary, "key", "add", file, "web"], capture_output=True, text=True)
    assert answer.returncode == 1 and "no file of API keys" in answer.stderr


# Other rules


def test_tritons_restricted_apis_need_their_header(start, repository):
    models.add_sub(repository)
    server = start(repository, "--http-restricted-api=inference,model-repository:admin-key=secret", "--grpc-restricted-protocol=inference:grpc-key=other")
    infer = f"{server.url}/v2/models/simple/infer"
    assert requests.get(f"{server.url}/v2/models/simple").status_code == 200
    for headers in [{}, {"admin-key": "wrong"}, {"admin-key": ""}]:
        answer = requests.post(infer, json=BODY, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (403, "This API is restricted, expecting header 'admin-key'")
        assert requests.post(f"{server.url}/v2/repository/index", headers=headers).status_code == 403
    assert requests.post(infer, json=BODY, headers={"admin-key": "secret"}).status_code == 200
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="expecting header 'triton-grpc-protocol-grpc-key'") as refused:
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="simple"), timeout=60)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as admitted:
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="simple"), metadata=[("triton-grpc-protocol-grpc-key", "other")], timeout=60)
        assert admitted.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready


def test_management_has_a_port_of_its_own(start, repository):
    from serving import free_ports

    models.add_sub(repository)
    (port,) = free_ports(1)
    server = start(repository, "--management-port", str(port), "--model-control-mode", "explicit", "--load-model", "*")
    refused = requests.post(f"{server.url}/v2/repository/models/simple/unload")
    assert refused.status_code == 403 and str(port) in refused.json()["error"]
    with pytest.raises(InferenceServerException, match="management port"):
        grpcclient.InferenceServerClient(server.grpc).unload_model("simple")
    assert requests.post(f"{server.url}/v2/models/simple/infer", json=BODY).status_code == 200
    assert requests.post(f"http://127.0.0.1:{port}/v2/repository/models/simple/unload").status_code == 200
    assert requests.get(f"{server.url}/v2/models/simple/ready").status_code in (400, 404, 503)


def test_an_address_has_its_limits(start, repository):
    models.add_sub(repository)
    server = start(repository, "--requests-per-address", "1", "--connections-per-address", "4", wait=False)
    until("the server is ready", lambda: is_ready(server.url))
    with requests.Session() as session:
        until("the first request is served", lambda: infers(session, server) == 200)
        until("a request too many is refused", lambda: infers(session, server) == 429)
    with contextlib.ExitStack() as stack:
        for place in range(4):
            # Connections from before keep their place until the server has seen their end.
            until(f"place {place} is free", lambda: takes_place(server, stack))
        assert not takes_place(server, stack)
    until("the places are free again", lambda: is_ready(server.url))


def infers(session, server):
    return session.post(f"{server.url}/v2/models/simple/infer", json=BODY, timeout=60).status_code


def takes_place(server, stack):
    """Opens a connection that lasts as long as `stack`; false if the server refuses it."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port), timeout=60))
    client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = client.recv(4096)
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), answer
    return answer.startswith(b"HTTP/1.1 200")


def is_ready(url, **options):
    with contextlib.suppress(requests.RequestException):
        return requests.get(f"{url}/v2/health/ready", timeout=60, **options).status_code == 200
    return False


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"), "root")


@pytest.fixture
def tls(authority, start, repository):
    """Starts a server with TLS: `tls(*flags)`."""
    models.add_sub(repository)

    def start_server(*flags):
        server = start(repository, "--tls-certificate", authority.certificate("server")[0], "--tls-key", str(authority.folder / "server.key"), *flags, wait=False)
        server.https = f"https://127.0.0.1:{server.http_port}"
        return server

    return start_server


def serial(port, authority):
    """The serial number of a port's certificate."""
    context = ssl.create_default_context(cafile=authority.file)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain, context.wrap_socket(plain, server_hostname="localhost") as wrapped:
        return x509.load_der_x509_certificate(wrapped.getpeercert(True)).serial_number


def test_every_port_speaks_tls(binary, authority, tls):
    server = tls()
    until("the server is ready", lambda: is_ready(server.https, verify=authority.file))
    answer = requests.post(f"{server.https}/v2/models/simple/infer", json=BODY, verify=authority.file)
    assert answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [1] * 16
    assert "nv_inference" in requests.get(f"https://127.0.0.1:{server.metrics_port}/metrics", verify=authority.file).text
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(f"{server.https}/v2", timeout=60)
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
    with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
        assert service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerReady(service_pb2.ServerReadyRequest(), timeout=60).ready
    triton = httpclient.InferenceServerClient(f"localhost:{server.http_port}", ssl=True, ssl_context_factory=lambda: ssl.create_default_context(cafile=authority.file))
    assert triton.is_server_ready()
    # Large tensors in both directions, over one connection.
    rows = 20_000
    large = {"inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))} for i in range(2)], "id": "x" * rows}
    with requests.Session() as session:
        for _ in range(20):
            assert session.post(f"{server.https}/v2/models/simple/infer", json=large, verify=authority.file).json()["id"] == large["id"]
    # The command line.
    request = server.log_path.parent / "request.json"
    request.write_text(json.dumps(BODY))
    environment = dict(os.environ, DOWNBEAT_CA=str(authority.file))
    said = subprocess.run([binary, "infer", "simple", "--request", request, "--url", server.https], capture_output=True, text=True, env=environment)
    assert said.returncode == 0 and "OUTPUT0" in said.stdout, said.stderr
    said = subprocess.run([binary, "infer", "simple", "--request", request, "--url", server.https], capture_output=True, text=True)
    assert said.returncode == 1 and "DOWNBEAT_CA" in said.stderr, said.stderr


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_the_load_generator_speaks_tls_and_sends_a_key(binary, authority, tls, repository, tmp_path, scheme):
    models.identity(repository, "FP32")
    keys = tmp_path / "keys.toml"
    key = add_key(binary, keys, "load")
    server = tls("--api-keys", keys)
    until("the server is ready", lambda: is_ready(server.https, verify=authority.file))
    port, report = server.http_port if scheme == "https" else server.grpc.rpartition(":")[2], tmp_path / "report.json"
    # 4 KiB fit into a record of TLS, 1 MiB do not fit into a socket.
    load = ["-m", "identity_fp32", "-c", "4", "--closed", "--requests", "50", "--warmup", "0", "--variants", "2"]

    def bench(width, **variables):
        command = [binary, "bench", *load, "--shape", f"INPUT0:{width}", "-u", f"{scheme}://127.0.0.1:{port}", "--json", report, "-q"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ, **variables))

    for width in (1 << 10, 1 << 18):
        said = bench(width, DOWNBEAT_CA=str(authority.file), DOWNBEAT_API_KEY=key)
        assert said.returncode == 0, said.stderr
        total = json.loads(report.read_text())["total"]
        assert (total["ok"], total["bad"]) == (50, 0), total
    assert "certificate" in bench(1, DOWNBEAT_API_KEY=key).stderr
    assert "key" in bench(1, DOWNBEAT_CA=str(authority.file)).stderr


def test_a_client_without_tls_is_told_so(authority, tls):
    server = tls()
    until("the server is ready", lambda: is_ready(server.https, verify=authority.file))
    answer = requests.post(f"{server.url}/v2/models/simple/infer", json=BODY)
    assert answer.status_code == 400 and "https://" in answer.json()["error"]
    with pytest.raises(grpc.RpcError) as refused, grpc.insecure_channel(server.grpc) as channel:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerReady(service_pb2.ServerReadyRequest(), timeout=60)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    # Silence, nonsense and half a greeting cost others nothing.
    with contextlib.ExitStack() as stack:
        for greeting in [b"", b"\x16", b"\x16\x03\x01\x02\x00", b"\x16\x03\x01\xff\xff" + b"x" * 1000, b"\x80\x80\x80"] * 8:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port), timeout=60))
            client.sendall(greeting)
        assert is_ready(server.https, verify=authority.file)


def test_certificates_are_reloaded_without_a_lost_connection(authority, tls):
    server = tls()
    until("the server is ready", lambda: is_ready(server.https, verify=authority.file))
    first = serial(server.http_port, authority)
    with requests.Session() as session:
        assert session.get(f"{server.https}/v2", verify=authority.file).status_code == 200
        stop = False

        def load():
            """Requests on new connections all the time."""
            answered = 0
            while not stop:
                assert requests.post(f"{server.https}/v2/models/simple/infer", json=BODY, verify=authority.file, timeout=60).status_code == 200
                answered += 1
            return answered

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answered = pool.submit(load)
            try:
                authority.certificate("server")
                until("the new certificate is used", lambda: serial(server.http_port, authority) != first)
                second = serial(server.http_port, authority)
                pathlib.Path(authority.folder / "server.key").write_text("nonsense")
                until("the wrong key is reported", lambda: "those before stay" in server.log)
                assert serial(server.grpc_port, authority) == second == serial(server.metrics_port, authority)
            finally:
                stop = True
            assert answered.result() > 0
        assert session.get(f"{server.https}/v2", verify=authority.file).status_code == 200, "an old connection goes on"


def test_clients_may_have_to_show_certificates(authority, tls, tmp_path):
    server = tls("--tls-client-ca", str(authority.file))
    own = authority.certificate("client")
    until("the server is ready", lambda: is_ready(server.https, verify=authority.file, cert=tuple(own)))
    stranger = Authority(tmp_path, "stranger").certificate("client")
    for cert in [None, tuple(stranger)]:
        with pytest.raises(requests.exceptions.ConnectionError):
            requests.get(f"{server.https}/v2", verify=authority.file, cert=cert, timeout=60)


@pytest.mark.parametrize("flags, words", [
    (["--tls-certificate", "{crt}"], "--tls-key FILE is missing"),
    (["--tls-key", "{key}"], "--tls-certificate FILE is missing"),
    (["--tls-certificate", "{key}", "--tls-key", "{key}"], "has no certificate in PEM"),
    (["--tls-certificate", "{crt}", "--tls-key", "{crt}"], "has no private key in PEM"),
    (["--tls-certificate", "/none.crt", "--tls-key", "{key}"], "cannot read /none.crt"),
    (["--tls-certificate", "{crt}", "--tls-key", "{other}"], "are no certificate with its key"),
])
def test_wrong_files_of_tls_end_the_start_with_a_reason(authority, start, repository, flags, words):
    crt, key = authority.certificate("server")
    _, other = authority.certificate("another")
    models.add_sub(repository)
    server = start(repository, *[flag.format(crt=crt, key=key, other=other) for flag in flags], wait=False)
    assert server.wait_end() == 1 and words in server.log, server.log
