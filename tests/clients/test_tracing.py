"""Traces of requests: Triton's settings and files, spans for a collector, the access log, and the levels of the log."""
import collections
import http.server
import json
import queue
import threading
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import ensembles
import models

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
NOT_SAMPLED = f"00-{TRACE}-{PARENT}-00"


def eventually(what, within=60):
    """The first result of `what` that is true: writers of traces are a moment behind."""
    deadline = time.monotonic() + within
    while not (result := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


def ask(url, model="one", headers=None, **extra):
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}], **extra}
    return requests.post(f"{url}/v2/models/{model}/infer", json=body, headers=headers, timeout=60)


def ask_grpc(server, headers=None):
    tensor = grpcclient.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        return client.infer("one", [tensor], request_id="over gRPC", headers=headers)


def clients(server):
    with httpclient.InferenceServerClient(server.http) as client:
        yield client, lambda settings: settings
    with grpcclient.InferenceServerClient(server.grpc) as client:
        # The values of the answer, without their types.
        def plain(response):
            def value(setting):
                if "value" in setting:
                    return setting["value"]
                return next(iter(setting.values()))
            return {name: value(setting) for name, setting in response["settings"].items()}
        yield client, plain


def as_json(client):
    return {} if isinstance(client, httpclient.InferenceServerClient) else {"as_json": True}


# -- levels of the log


def test_the_level_of_the_log_changes_while_the_server_runs(start, repository):
    models.add(repository, "one", 1)
    server = start(repository)
    for client, plain in clients(server):
        now = plain(client.get_log_settings(**as_json(client)))
        assert now["log_info"] is True and now["log_verbose_level"] == 0 and now["log_format"] == "default"
        assert " DEBUG " not in server.log
        now = plain(client.update_log_settings({"log_verbose_level": 1, "log_info": None}, **as_json(client)))
        assert now["log_verbose_level"] == 1
        requests.post(f"{server.url}/v2/repository/models/one/load", timeout=60)
        now = plain(client.update_log_settings({"log_verbose_level": 0, "log_warning": False}, **as_json(client)))
        assert (now["log_verbose_level"], now["log_warning"], now["log_info"]) == (0, False, True)
        assert plain(client.update_log_settings({"log_warning": True, "log_format": "ISO8601"}, **as_json(client)))["log_warning"] is True
        client.update_log_settings({"log_format": "default"})
        for wrong, said in (({"log_file": "/tmp/log"}, "can not be updated"), ({"log_format": "xml"}, "--log-format json")):
            with pytest.raises(InferenceServerException, match=said):
                client.update_log_settings(wrong)


# -- Triton's settings and files


def test_tritonclient_reads_and_changes_the_settings_of_traces(start, repository, tmp_path):
    models.add(repository, "one", 1)
    server = start(repository, "--trace-file", str(tmp_path / "trace.json"), "--trace-level", "OFF")
    one = lambda value: value if isinstance(value, str) else value[0]  # noqa: E731
    for client, plain in clients(server):
        def change(settings, model=None):
            return plain(client.update_trace_settings(model, settings, **as_json(client)))
        now = plain(client.get_trace_settings(**as_json(client)))
        assert {name: one(value) for name, value in now.items()} == {
            "trace_level": "OFF", "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_mode": "triton",
            "trace_file": str(tmp_path / "trace.json")}
        assert one(change({"trace_rate": "7"}, "one")["trace_rate"]) == "7"
        assert one(change({"trace_rate": "9", "trace_level": ["TIMESTAMPS"]})["trace_rate"]) == "9"
        of_model = plain(client.get_trace_settings("one", **as_json(client)))
        assert (one(of_model["trace_rate"]), one(of_model["trace_level"])) == ("7", "TIMESTAMPS")
        assert one(change({"trace_rate": None}, "one")["trace_rate"]) == "9"
        assert one(change({"trace_rate": None, "trace_level": None})["trace_level"]) == "OFF"
        for wrong in ({"trace_rate": "0"}, {"trace_level": ["TENSORS"]}, {"trace_file": "/etc/passwd"}, {"trace_colour": "red"}):
            with pytest.raises(InferenceServerException):
                client.update_trace_settings(None, wrong)
        with pytest.raises(InferenceServerException, match="nobody"):
            client.update_trace_settings("nobody", {"trace_rate": "7"})


def stamps(path):
    """The timestamps of each trace in a file, by name, beside the object about the trace."""
    traces = collections.defaultdict(dict)
    for part in json.loads(path.read_text() or "[]"):
        if "timestamps" in part:
            traces[part["id"]].setdefault("ns", {}).update({stamp["name"]: stamp["ns"] for stamp in part["timestamps"]})
        else:
            traces[part["id"]].update(part)
    return dict(traces)


def test_the_file_of_traces_has_each_step_of_a_request_in_order(start, repository, tmp_path):
    models.add(repository, "one", 1)
    path = tmp_path / "trace.json"
    server = start(repository, "--trace-config", f"triton,file={path}", "--trace-config", "rate=2")
    before = time.time_ns()
    for _ in range(3):
        assert ask(server.url, id="mine").status_code == 200
    ask_grpc(server)
    assert ask(server.url, id="mine", parameters={"downbeat_trace": 1}).status_code == 200
    traces = eventually(lambda: (found := stamps(path)) and len(found) == 2 and found)
    order = ["REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END", "INFER_RESPONSE_COMPLETE"]
    ways = [["HTTP_RECV_START", "HTTP_RECV_END", *order, "HTTP_SEND_START", "HTTP_SEND_END"],
            ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", *order, "GRPC_SEND_START", "GRPC_SEND_END"]]
    for (trace, way), name in zip(zip(traces.values(), ways), ("mine", "over gRPC")):
        assert (trace["model_name"], trace["model_version"], trace["request_id"]) == ("one", 1, name)
        times = [trace["ns"][step] for step in way]
        assert times == sorted(times) and len(trace["ns"]) == len(way), trace
        assert before < times[0] and times[-1] < time.time_ns()


def test_each_numbered_file_has_its_share_of_traces(start, repository, tmp_path):
    models.add(repository, "one", 1)
    path = tmp_path / "trace.json"
    server = start(repository, "--trace-file", str(path), "--trace-rate", "1", "--trace-log-frequency", "2", "--trace-count", "5")
    for _ in range(8):
        ask(server.url)
    assert requests.get(f"{server.url}/v2/trace/setting", timeout=60).json()["trace_count"] == "0"
    server.stop()
    files = sorted(tmp_path.glob("trace.json.*"))
    assert [len(stamps(file)) for file in files] == [2, 2, 1], "the last file is written at the end"


def test_the_steps_of_an_ensemble_are_children_of_its_trace(start, repository, tmp_path):
    ensembles.chain(repository)
    path = tmp_path / "trace.json"
    server = start(repository, "--trace-file", str(path), "--trace-rate", "1")
    body = {"inputs": [{"name": "in", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}]}
    assert requests.post(f"{server.url}/v2/models/chain/infer", json=body, timeout=60).status_code == 200
    traces = eventually(lambda: stamps(path))
    whole, *steps = traces.values()
    assert (whole["model_name"], "parent_id" in whole, "QUEUE_START" in whole["ns"]) == ("chain", False, False)
    assert [(step["model_name"], step["parent_id"]) for step in steps] == [(name, whole["id"]) for name in ("plus1", "plus10", "plus100")]
    for step in steps:
        assert whole["ns"]["REQUEST_START"] <= step["ns"]["QUEUE_START"] <= step["ns"]["COMPUTE_START"] <= step["ns"]["REQUEST_END"] <= whole["ns"]["REQUEST_END"]


def test_streams_and_generate_are_traced(start, repository, tmp_path):
    models.add(repository, "one", 1)
    path = tmp_path / "trace.json"
    server = start(repository, "--trace-file", str(path), "--trace-rate", "1")
    tensor = grpcclient.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    answers = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("one", [tensor], request_id="in a stream")
        assert answers.get(timeout=60) is None
        client.stop_stream()
    for way in ("generate", "generate_stream"):
        assert requests.post(f"{server.url}/v2/models/one/{way}", json={"id": way, "x": [1.0, 2.0, 3.0, 4.0]}, timeout=60).status_code == 200
    traces = eventually(lambda: (found := stamps(path)) and len(found) == 3 and found)
    assert {trace.get("request_id") for trace in traces.values()} == {"in a stream", "generate", "generate_stream"}
    for trace in traces.values():
        ends = {name for name in trace["ns"] if name.endswith("_SEND_END")}
        assert len(ends) == 1 and trace["ns"]["COMPUTE_END"] <= trace["ns"][ends.pop()]


# -- spans


class Collector(http.server.BaseHTTPRequestHandler):
    """A receiver of OTLP over HTTP that keeps the spans."""

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append((self.path, self.headers["Authorization"]))
        for resource in request.resource_spans:
            name = {pair.key: pair.value.string_value for pair in resource.resource.attributes}["service.name"]
            self.server.spans.extend((name, span) for scope in resource.scope_spans for span in scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.spans, server.paths = [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def attributes(span):
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}


def test_a_collector_gets_the_spans_of_a_request_with_its_batch(start, repository, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer secret")
    models.add(repository, "one", 1)
    server = start(repository, "--otlp-endpoint", f"127.0.0.1:{collector.server_port}", "--server-name", "mine")
    assert "traceparent" not in ask(server.url, headers={"traceparent": NOT_SAMPLED}).headers
    assert "traceparent" not in ask(server.url).headers, "one request in 1000 is traced"
    answer = ask(server.url, headers={"traceparent": SAMPLED}, id="order-4711")
    version, trace, span, flags = answer.headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    spans = eventually(lambda: len(collector.spans) >= 8 and [span for _, span in collector.spans])
    assert {name for name, _ in collector.spans} == {"mine"}
    assert set(collector.paths) == {("/v1/traces", "Bearer secret")}
    by_name = {span.name: span for span in spans}
    assert sorted(by_name) == ["batch one", "infer", "infer one", "input", "output", "queue", "receive", "send"]
    root, batch = by_name["infer one"], by_name["batch one"]
    assert (root.span_id.hex(), root.parent_span_id.hex(), root.kind) == (span, PARENT, 2)
    told = attributes(root)
    assert (told["downbeat.request.id"], told["http.response.status_code"], told["downbeat.version"], told["client.address"]) == ("order-4711", 200, "1", "127.0.0.1")
    children = [by_name[name] for name in ("receive", "queue", "input", "infer", "output", "send")]
    times = [time for child in children for time in (child.start_time_unix_nano, child.end_time_unix_nano)]
    assert times == sorted(times) and root.start_time_unix_nano == times[0] and root.end_time_unix_nano == times[-1]
    assert all(child.parent_span_id == root.span_id and child.trace_id.hex() == TRACE for child in children)
    assert attributes(by_name["queue"])["downbeat.batch.reason"] in ("full", "frontrun", "latest", "timeout", "wake_margin", "eager", "device", "keeps_up")
    assert attributes(by_name["infer"])["downbeat.batch.requests"] == 1
    assert [(link.trace_id, link.span_id) for link in by_name["infer"].links] == [(batch.trace_id, batch.span_id)]
    assert [(link.trace_id, link.span_id) for link in batch.links] == [(root.trace_id, root.span_id)]
    assert batch.trace_id != root.trace_id


def test_a_dropped_request_has_the_reason_in_its_span(start, repository, collector):
    models.slow(repository)
    server = start(repository, "--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces", "--trace-rate", "1")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}], "parameters": {"timeout": 1}}
    refused = requests.post(f"{server.url}/v2/models/slow/infer", json=body, timeout=60)
    assert refused.status_code == 504
    spans = {span.name: span for span in eventually(lambda: collector.spans and [span for _, span in collector.spans])}
    assert attributes(spans["queue"])["downbeat.not_answered.reason"].startswith("deadline_")
    assert spans["infer slow"].status.code == 2 and spans["infer slow"].status.message == refused.json()["error"][:256]
    assert attributes(spans["infer slow"])["http.response.status_code"] == 504


def metric(server, name, writer):
    for line in requests.get(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60).text.splitlines():
        if line.startswith(f'{name}{{writer="{writer}"}}'):
            return float(line.split()[-1])
    return None


def test_a_collector_that_is_not_there_costs_traces_and_nothing_else(start, repository, tmp_path):
    models.add(repository, "one", 1)
    server = start(repository, "--otlp-endpoint", "http://127.0.0.1:1", "--trace-rate", "1", "--trace-file", str(tmp_path / "trace.json"))
    for _ in range(20):
        assert ask(server.url).status_code == 200
    eventually(lambda: metric(server, "downbeat_traces_lost_total", "otlp") == 20)
    eventually(lambda: metric(server, "downbeat_traces_written_total", "file") == 20)
    assert metric(server, "downbeat_traces_written_total", "otlp") == 0
    assert "traces are lost: the collector takes no spans" in server.log
    assert len(stamps(tmp_path / "trace.json")) == 20


# -- the access log


def test_the_access_log_has_a_line_for_each_inference(start, repository, tmp_path):
    models.add(repository, "one", 1)
    path = tmp_path / "access.jsonl"
    server = start(repository, "--access-log", str(path))
    assert ask(server.url, id='a "name"').status_code == 200
    assert ask(server.url, model="nobody").status_code == 404
    assert requests.post(f"{server.url}/v2/models/one/infer", data="{", timeout=60).status_code == 400
    ask_grpc(server)
    requests.get(f"{server.url}/v2/models/one", timeout=60)
    lines = eventually(lambda: len(lines := path.read_text().splitlines()) >= 4 and [json.loads(line) for line in lines])
    shown = [(line["protocol"], line["model"], line.get("id"), line["status"], line["outcome"]) for line in lines]
    assert shown == [("http", "one", 'a "name"', 200, "answered"), ("http", "nobody", None, 404, "failed"),
                     ("http", "one", None, 400, "failed"), ("grpc", "one", "over gRPC", 0, "answered")]
    first = lines[0]
    assert first["client"] == "127.0.0.1" and first["version"] == "1" and first["batch"] == 1 and first["time"].endswith("Z")
    assert 0 <= first["queue_us"] + first["run_us"] <= first["took_us"]
    assert "nobody" in lines[1]["error"]


def test_a_destination_that_cannot_be_used_is_an_error_at_the_start(start, repository, tmp_path):
    models.add(repository, "one", 1)
    for flag in ("--trace-file", "--access-log"):
        server = start(repository, flag, str(tmp_path / "nowhere" / "file"), wait=False)
        assert server.process.wait(60) != 0
        assert flag in server.log and "nowhere" in server.log
    server = start(repository, "--otlp-endpoint", "ftp://host", wait=False)
    assert server.process.wait(60) != 0
    assert "expected one such as http://localhost:4318" in server.log and "panic" not in server.log
