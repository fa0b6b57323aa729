"""Statistics and metrics: Triton's names, and numbers that add up."""
import concurrent.futures

import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import emulated
import models
from serving import processes

# docs of Triton 2.51, "Inference Request Metrics"; what boards are drawn from.
COUNTERS = ["nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count",
            "nv_inference_request_duration_us", "nv_inference_queue_duration_us", "nv_inference_compute_input_duration_us",
            "nv_inference_compute_infer_duration_us", "nv_inference_compute_output_duration_us"]
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "data": [0.0] * 12}]}


def test_metrics_count_what_was_sent(start, repository):
    models.add(repository, "one", 1)
    models.add(repository, "two", 1)
    server = start(repository)
    for _ in range(5):
        assert requests.post(f"{server.url}/v2/models/one/infer", json=BODY).status_code == 200
    assert requests.post(f"{server.url}/v2/models/one/infer", json={"inputs": []}).status_code == 400
    labels = {"model": "one", "version": "1"}
    metrics = server.metrics()
    for name in COUNTERS:
        assert any(labels.items() <= sample[0].items() for sample in metrics.get(name, [])), f"{name} is missing from {sorted(metrics)}"

    def count(name):
        return server.metric(name, **labels)

    assert count("nv_inference_request_success") == 5
    assert count("nv_inference_count") == 15, "a batch dimension of three counts as three"
    assert 1 <= count("nv_inference_exec_count") <= 5
    total = count("nv_inference_request_duration_us")
    parts = sum(count(f"nv_inference_{phase}_duration_us") for phase in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < parts <= total * 1.05
    assert server.metric("nv_inference_request_success", model="two") == 0
    # And a histogram for each phase, which can be summed over servers.
    for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert server.metric("downbeat_phase_duration_seconds_count", phase=phase, **labels) > 0, phase
        assert metrics["downbeat_phase_duration_seconds_bucket"], phase


def test_both_clients_see_the_same_statistics(start, repository):
    models.add(repository, "one", 1)
    server = start(repository)
    for _ in range(4):
        requests.post(f"{server.url}/v2/models/one/infer", json=BODY)
    with httpclient.InferenceServerClient(server.http) as http, grpcclient.InferenceServerClient(server.grpc) as grpc:
        over_http = http.get_inference_statistics("one")["model_stats"][0]
        over_grpc = grpc.get_inference_statistics("one", as_json=True)["model_stats"][0]
        assert int(over_http["inference_count"]) == int(over_grpc["inference_count"]) == 12
        for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            a, b = over_http["inference_stats"][part], over_grpc["inference_stats"][part]
            assert int(a["count"]) == int(b["count"]) == 4 and int(a["ns"]) == int(b["ns"]) > 0, part
        batches = {int(b["batch_size"]): int(b["compute_infer"]["count"]) for b in over_http["batch_stats"]}
        assert sum(size * count for size, count in batches.items()) == 12
        assert sum(batches.values()) == int(over_http["execution_count"])
        assert [m["name"] for m in http.get_inference_statistics()["model_stats"]] == ["one"]
        for client in (http, grpc):
            try:
                client.get_inference_statistics("one", "9")
                raise AssertionError("statistics of a version that is not there")
            except InferenceServerException as error:
                assert "9" in error.message()


def test_queue_depth_is_back_at_zero_and_the_page_can_be_read(examples):
    text = requests.get(f"http://127.0.0.1:{examples.metrics_port}/metrics").text
    samples = [line.rsplit(" ", 1)[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert len(samples) == len(set(samples))
    families = {family.name for family in text_string_to_metric_families(text)}
    assert "nv_inference_count" in families and "downbeat_batch_size" in families
    assert examples.metric("nv_inference_pending_request_count") == 0


def test_frontends_count_the_batches_of_their_requests_once(binary, tmp_path):
    """Eight requests of two frontends make one batch, which leaves once it is full."""
    repository = tmp_path / "models"
    emulated.write(repository, "m", "alpha_ms = 1\nbeta_ms = 20\nmax_batch = 8\n")
    (repository / "m" / "config.pbtxt").write_text("max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 60000000 }\n")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}]}
    flags = ("--scheduler", "timeout", "--devices", "1")
    with processes(binary, repository, tmp_path, *flags, models=["m"], frontends=2, engine="emulated") as (_, (backend,), frontends):
        ask = lambda frontend: requests.post(f"{frontend.url}/v2/models/m/infer", json=body, timeout=120).status_code
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                assert set(pool.map(ask, [frontends[0]] * 3 + [frontends[1]] * 5)) == {200}

        def both(name, **labels):
            return sum(frontend.metric(name, model="m", **labels) for frontend in frontends)

        # A batch may run without members whose inputs came late on a busy machine: there are three or more.
        batches = backend.metric("nv_inference_exec_count", model="m")
        assert both("nv_inference_exec_count") == batches >= 3
        assert [frontend.metric("nv_inference_count", model="m") for frontend in frontends] == [9, 15]
        assert (both("downbeat_batch_size_count"), both("downbeat_batch_size_sum")) == (batches, 24)
        sizes = {}
        for frontend in frontends:
            micros = {part: frontend.metric(f"nv_inference_{part}_duration_us", model="m") for part in ("request", "queue", "compute_input", "compute_infer", "compute_output")}
            ran = frontend.metric("nv_inference_count", model="m")
            # A batch takes at least 21 ms, and each of its requests has that time.
            assert micros["compute_infer"] >= 21_000 * ran and micros["queue"] > 0, micros
            assert sum(micros.values()) - micros["request"] <= micros["request"], micros
            [statistics] = requests.get(f"{frontend.url}/v2/models/m/stats", timeout=60).json()["model_stats"]
            assert statistics["inference_stats"]["compute_infer"]["ns"] >= 21_000_000 * ran
            for batch in statistics["batch_stats"]:
                sizes[batch["batch_size"]] = sizes.get(batch["batch_size"], 0) + batch["compute_infer"]["count"]
        assert sum(size * count for size, count in sizes.items()) == 24 and sum(sizes.values()) == batches and max(sizes) > 5, sizes


def test_memory_of_models_by_device(start, repository):
    models.add(repository, "one", 1)
    server = start(repository)
    parts = {part: server.metric("downbeat_device_memory_bytes", device="cpu", part=part) for part in ("weights", "rings", "runs")}
    assert parts["weights"] > 0 and sum(parts.values()) == server.metric("downbeat_models_memory_bytes"), parts
