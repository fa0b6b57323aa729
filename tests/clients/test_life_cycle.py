"""Start, probes, drain and end. Also the messages of a server that cannot start or cannot load."""
import shutil
import signal
import socket
import subprocess
import threading
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import models
from serving import EXAMPLES, environment, free_ports

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
SLOW_BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}


# -- probes


def test_probes_as_kubernetes_sends_them(examples):
    live = requests.get(f"{examples.url}/v2/health/live", headers={"User-Agent": "kube-probe/1.31", "Accept": "*/*", "Connection": "close"})
    assert live.status_code == 200 and live.json() == {"live": True}
    ready = requests.get(f"{examples.url}/v2/health/ready", headers={"User-Agent": "kube-probe/1.31", "Connection": "close"})
    assert ready.status_code == 200 and ready.json() == {"ready": True}
    assert requests.get(f"{examples.url}/v2/models/digits/ready").status_code == 200
    assert not requests.get(f"{examples.url}/v2/models/nothing/ready").ok
    assert requests.head(f"{examples.url}/v2/health/live").status_code == 200


def test_the_grpc_health_service_that_kubernetes_probes_use(examples):
    """`grpc.health.v1.Health/Check`: request {1: service name}, answer {1: status}, 1 is SERVING."""
    import grpc

    with grpc.insecure_channel(examples.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", lambda data: data, lambda data: data)
        assert check(b"") == b"\x08\x01"


# -- end


def test_sigterm_lets_requests_finish_and_answers_those_that_still_come(start, repository):
    models.slow(repository, products=80)
    # On a busy machine eight requests wait for longer than a request without a deadline may.
    server = start(repository, "--shutdown-grace", "60", "--drain-timeout", "120", "--max-queue-wait", "0")
    assert requests.post(f"{server.url}/v2/models/slow/infer", json=SLOW_BODY).status_code == 200
    codes, errors = [], []
    sent = threading.Barrier(9)

    def over_http():
        session = requests.Session()
        session.get(f"{server.url}/v2/health/live")
        sent.wait()
        codes.append(session.post(f"{server.url}/v2/models/slow/infer", json=SLOW_BODY).status_code)

    def over_grpc():
        with grpcclient.InferenceServerClient(server.grpc) as client:
            client.is_server_live()
            tensor = grpcclient.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            sent.wait()
            try:
                client.infer("slow", [tensor])
                codes.append(200)
            except InferenceServerException as error:
                errors.append(str(error))

    threads = [threading.Thread(target=f) for f in [over_http] * 4 + [over_grpc] * 4]
    for thread in threads:
        thread.start()
    late = requests.Session()
    assert late.get(f"{server.url}/v2/health/ready").status_code == 200
    sent.wait()
    # The eight requests are in the server once its queue depth says so; then the test ends the
    # server.
    for _ in range(500):
        if server.metric("nv_inference_pending_request_count", model="slow") >= 4:
            break
        time.sleep(0.005)
    server.terminate()
    while server.process.poll() is None and requests.get(f"{server.url}/v2/health/ready").status_code == 200:
        time.sleep(0.005)
    # On the earlier connection, and on a new one.
    for _ in range(2):
        reply = late.post(f"{server.url}/v2/models/slow/infer", json=SLOW_BODY)
        assert reply.status_code == 200 and reply.headers["Connection"] == "close", f"{reply.status_code} {reply.text}"
    # Asked again, it gives no more grace.
    server.terminate()
    for thread in threads:
        thread.join()
    assert server.wait_end() == 0, server.log
    assert errors == [] and codes == [200] * 8
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/v2/health/live")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once_with_status_0(start, repository, number):
    models.add(repository, "one", 1)
    server = start(repository)
    # A client that keeps its connection does not keep the server.
    with requests.Session() as session:
        session.get(f"{server.url}/v2/health/live")
        started = time.monotonic()
        server.process.send_signal(number)
        assert server.wait_end() == 0, server.log
        assert time.monotonic() - started < 20


def test_it_starts_again_on_the_same_ports_at_once(start, binary, repository, tmp_path):
    models.add(repository, "one", 1)
    first = start(repository)
    requests.post(f"{first.url}/v2/models/one/infer", json=BODY)
    first.stop()
    flags = ["--host", "127.0.0.1", "--http-port", str(first.http_port), "--grpc-port", str(first.grpc_port), "--metrics-port", str(first.metrics_port)]
    process = subprocess.Popen([binary, "serve", repository, *flags], env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            assert process.poll() is None
            try:
                if requests.get(f"{first.url}/v2/health/ready").status_code == 200:
                    break
            except requests.ConnectionError:
                pass
            time.sleep(0.05)
        assert requests.post(f"{first.url}/v2/models/one/infer", json=BODY).status_code == 200
    finally:
        process.terminate()
        assert process.wait(60) == 0


# -- a server that cannot start


def serve(binary, tmp_path, *arguments, **options):
    """Runs `downbeat serve` to its end, which is expected soon."""
    run = subprocess.run([str(binary), "serve", *map(str, arguments)], env=environment(tmp_path), cwd=tmp_path, capture_output=True,
                         text=True, timeout=120, **options)
    output = run.stdout + run.stderr
    assert run.returncode != 0, output
    assert "panicked" not in output and "RUST_BACKTRACE" not in output, output
    return output


def ports():
    return [str(p) for pair in zip(["--http-port", "--grpc-port", "--metrics-port"], free_ports(3)) for p in pair]


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port"])
def test_a_port_in_use_is_named(binary, tmp_path, repository, flag):
    models.add(repository, "one", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ports()
        flags[flags.index(flag) + 1] = port
        assert port in serve(binary, tmp_path, repository, "--host", "127.0.0.1", *flags)


def test_a_repository_that_is_not_there_is_named(binary, tmp_path):
    assert "no-such-folder" in serve(binary, tmp_path, tmp_path / "no-such-folder", *ports())


def test_an_unknown_flag_is_named(binary, tmp_path, repository):
    assert "--polite" in serve(binary, tmp_path, repository, "--polite")


def test_the_example_of_an_options_file_is_accepted(start, tmp_path):
    text = (EXAMPLES / "downbeat.toml").read_text()
    for commented, said in (('mode = "none"', 'mode = "explicit"'), ('# load = ["digits"]', 'load = ["digits"]'), ("# cache_dir", "cache_dir")):
        assert commented in text
        text = text.replace(commented, said)
    (tmp_path / "downbeat.toml").write_text(text)
    shutil.copytree(EXAMPLES / "models", tmp_path / "models")
    server = start(tmp_path / "models")
    ready = [entry["name"] for entry in requests.post(f"{server.url}/v2/repository/index", json={"ready": True}).json()]
    assert ready == ["digits"], server.log


def test_a_typo_in_downbeat_toml_is_named_with_its_line(binary, tmp_path, repository):
    models.add(repository, "one", 1)
    (tmp_path / "downbeat.toml").write_text("# a comment\nhtpp_port = 8000\n")
    output = serve(binary, tmp_path, repository, *ports())
    assert "downbeat.toml" in output and "htpp_port" in output and "2" in output


def test_a_missing_onnxruntime_library_is_named(binary, tmp_path, repository):
    models.add(repository, "one", 1)
    env = dict(environment(tmp_path, engine="rten"), ORT_DYLIB_PATH=str(tmp_path / "libnothing.so"))
    run = subprocess.run([binary, "serve", repository, "--engine", "onnxruntime", *ports()], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and "libnothing.so" in run.stdout + run.stderr and "panicked" not in run.stderr


# -- models that cannot be loaded, beside one that can


def garbage_gigabytes(repository):
    path = repository / "huge" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.write(b"\x0a\xff\xff\xff\xff\x07garbage")
        file.truncate(3 << 30)
    return "huge"


def garbage(repository):
    path = repository / "garbage" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(np.random.default_rng(0).bytes(100_000))
    return "garbage"


def truncated(repository):
    path = models.add(repository, "truncated", 1) / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-20])
    return "truncated"


def empty_file(repository):
    path = repository / "empty" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return "empty"


def no_version(repository):
    (repository / "versionless").mkdir()
    (repository / "versionless" / "config.pbtxt").write_text("max_batch_size: 4\n")
    return "versionless"


def unsupported(repository):
    models.unsupported(repository)
    return "unsupported"


def outside(repository):
    models.outside(repository)
    return "outside"


def outside_by_link(repository):
    models.outside(repository, "linked", "weights.bin")
    inside = repository / "linked" / "1" / "weights.bin"
    inside.rename(repository / "elsewhere.bin")
    inside.symlink_to(repository / "elsewhere.bin")
    return "linked"


def absolute(repository):
    models.outside(repository, "absolute", str(repository / "weights.bin"))
    return "absolute"


def misspelt(repository):
    (models.add(repository, "misspelt", 1) / "config.pbtxt").write_text('max_batch_size: 8\nimput [ { name: "x" } ]\n')
    return "misspelt"


def contradicting(repository):
    (models.add(repository, "contradicting", 1) / "config.pbtxt").write_text(
        'max_batch_size: 8\ninput [ { name: "x" data_type: TYPE_INT32 dims: [ 4 ] } ]\n')
    return "contradicting"


def other_name(repository):
    (models.add(repository, "named", 1) / "config.pbtxt").write_text('name: "other"\n')
    return "named"


def wait_for_model(server, name):
    """Waits until a model is ready, whether or not the server is."""
    for _ in range(2400):
        try:
            if requests.get(f"{server.url}/v2/models/{name}/ready").ok:
                return
        except requests.ConnectionError:
            pass
        assert server.process.poll() is None, server.log
        time.sleep(0.05)
    raise AssertionError(server.log)


def index_entry(server, name):
    """The index's line of a model, once it has been tried."""
    for _ in range(2400):
        entry = next((e for e in requests.post(f"{server.url}/v2/repository/index").json() if e["name"] == name), {})
        if entry.get("reason"):
            return entry
        time.sleep(0.05)
    raise AssertionError(f"{name} has no state: {entry}")


@pytest.mark.parametrize("engine", ["rten", "onnxruntime"])
@pytest.mark.parametrize("make, words", [
    (garbage, []), (truncated, []), (empty_file, []), (no_version, []), (unsupported, ["Teleport"]), (outside, []),
    (outside_by_link, []), (absolute, []), (misspelt, ["imput", "config.pbtxt"]), (contradicting, ["x"]), (other_name, ["other"]),
    (garbage_gigabytes, []),
])
def test_a_bad_model_is_named_and_the_others_are_served(start, repository, make, words, engine):
    models.add(repository, "good", 1)
    name = make(repository)
    server = start(repository, engine=engine, wait=False)
    wait_for_model(server, "good")
    entry = index_entry(server, name)
    reply = requests.post(f"{server.url}/v2/models/good/infer", json=BODY)
    assert reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [2.0, 3.0, 4.0, 5.0]
    assert not requests.get(f"{server.url}/v2/models/{name}/ready").ok
    assert entry["state"] == "UNAVAILABLE" and entry["reason"], entry
    for word in words:
        assert word in entry["reason"] and word in server.log, f"{entry}\n{server.log}"
    assert not requests.post(f"{server.url}/v2/models/{name}/infer", json=BODY).ok
    if make is garbage_gigabytes:
        import psutil

        assert psutil.Process(server.process.pid).memory_info().rss < 1 << 30, "the garbage was read into memory"


def test_a_folder_that_is_no_model_is_named_in_a_warning(start, repository):
    models.add(repository, "good", 1)
    (repository / "notes").mkdir()
    server = start(repository)
    assert "notes" in server.log and "WARN" in server.log, server.log
    assert [entry["name"] for entry in requests.post(f"{server.url}/v2/repository/index").json()] == ["good"]


def test_with_strict_readiness_a_bad_model_keeps_the_server_unready(start, repository):
    models.add(repository, "good", 1)
    garbage(repository)
    server = start(repository, wait=False)
    wait_for_model(server, "good")
    index_entry(server, "garbage")
    assert requests.get(f"{server.url}/v2/health/live").status_code == 200
    assert not requests.get(f"{server.url}/v2/health/ready").ok
    assert requests.post(f"{server.url}/v2/models/good/infer", json=BODY).status_code == 200


def test_unsupported_fields_of_a_configuration_are_named_in_a_warning(start, repository):
    (models.add(repository, "one", 1) / "config.pbtxt").write_text(
        "max_batch_size: 4\nresponse_cache { enable: true }\n")
    server = start(repository)
    assert "response_cache" in server.log, server.log
    assert requests.post(f"{server.url}/v2/models/one/infer", json=BODY).status_code == 200
