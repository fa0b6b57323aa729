"""Prometheus scrapes a live server; the board's queries and the alerts work on the series that it finds."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest
import requests

import models
from serving import START_TIMEOUT_S, free_ports

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
BOARD = ROOT / "deploy" / "grafana" / "downbeat.json"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "data": [0.0] * 12}]}
# Series that a server on a CPU alone, without tenants and without a cluster, does not have.
ELSEWHERE = ("nv_gpu_", "downbeat_gpu_", "downbeat_tenant_", "downbeat_cluster_", "downbeat_rollout_")
# Names of series in an expression.
SERIES = re.compile(r"\b(?:downbeat|nv|process)_\w+")

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None and "DOWNBEAT_REQUIRE_PROMETHEUS" not in os.environ, reason="Debian's package prometheus is not installed")


def targets():
    """Each query of the board with the title of its panel, and each query of its variables."""
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def filled(query):
    """The query as Grafana sends it, with all of everything."""
    for variable in ("job", "instance", "model"):
        query = query.replace(f"${variable}", ".*")
    query = query.replace("$__rate_interval", "20s").replace("[5m]", "[20s]").replace("[1h]", "[20s]")
    assert "$" not in query, query
    return query


class Prometheus:
    """Debian's Prometheus, which scrapes a server each second."""

    def __init__(self, folder, port):
        config = folder / "prometheus.yml"
        config.write_text(
            "global: { scrape_interval: 1s, evaluation_interval: 1s }\n"
            f"rule_files: ['{RULES}']\n"
            f"scrape_configs: [{{ job_name: downbeat, static_configs: [{{ targets: ['127.0.0.1:{port}'] }}] }}]\n")
        [self.port] = free_ports(1)
        self.log = open(folder / "prometheus.log", "w+")
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def get(self, path, **parameters):
        answer = requests.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def query(self, query):
        return self.get("query", query=query)["result"]

    def wait_for(self, query):
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if self.query(query):
                    return
            # Until it has read its files, it says 503 and no JSON.
            except (requests.ConnectionError, requests.JSONDecodeError):
                assert self.process.poll() is None, pathlib.Path(self.log.name).read_text()
            assert time.monotonic() < deadline, f"no result: {query}"
            time.sleep(0.2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()


def test_the_board_is_what_its_script_writes():
    subprocess.run([sys.executable, ROOT / "deploy" / "grafana" / "board.py", "--check"], check=True)
    board = json.loads(BOARD.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for other in board["panels"]:
            there = other["gridPos"]
            apart = (place["x"] + place["w"] <= there["x"] or there["x"] + there["w"] <= place["x"]
                     or place["y"] + place["h"] <= there["y"] or there["y"] + there["h"] <= place["y"])
            assert other is panel or apart, (panel["title"], other["title"])


@needs_prometheus
def test_the_rules_do_what_their_tests_say():
    done = subprocess.run(["promtool", "test", "rules", "rules_test.yml"], cwd=RULES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=RULES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)", (RULES.parent / "rules_test.yml").read_text()))
    assert tested == set(re.findall(r"alert: (\w+)", RULES.read_text())), "each alert has a test"


@needs_prometheus
def test_every_query_of_the_board_and_every_alert_finds_series_of_a_live_server(start, repository, tmp_path):
    models.add(repository, "one", 1)
    server = start(repository, "--slo-ms", "one=3600000", "--decision-log", str(tmp_path / "decisions"))
    with Prometheus(tmp_path, server.metrics_port) as prometheus:
        prometheus.wait_for("downbeat_build_info")
        for _ in range(20):
            assert requests.post(f"{server.url}/v2/models/one/infer", json=BODY, timeout=60).status_code == 200
        assert requests.post(f"{server.url}/v2/models/one/infer", json={"inputs": []}, timeout=60).status_code == 400
        prometheus.wait_for('rate(downbeat_slo_requests_total{outcome="in_time"}[20s]) > 0')
        known = set(prometheus.get("label/__name__/values"))
        expressions = [*targets(), *re.findall(r"alert: (\w+)\n(?:\s*#.*\n)?\s*expr: (.*)", RULES.read_text())]
        for title, query in expressions:
            names = set(SERIES.findall(re.sub(r'"[^"]*"', "", query)))
            missing = {name for name in names - known if not name.startswith(ELSEWHERE)}
            assert not missing, f"'{title}' asks for {missing}"
        empty = []
        for title, query in targets():
            found = prometheus.query(filled(query))
            elsewhere = any(name.startswith(ELSEWHERE) for name in SERIES.findall(query))
            if not found and not elsewhere:
                empty.append((title, query))
        assert not empty, empty
        [in_time] = prometheus.query('sum(downbeat_slo_requests_total{outcome="in_time"})')
        assert in_time["value"][1] == "20"
        answers = {its["metric"]["code"]: its["value"][1] for its in prometheus.query('downbeat_answers_total{protocol="HTTP"}')}
        assert answers["400"] == "1" and int(answers["200"]) >= 20, answers
        [rules] = [group for group in prometheus.get("rules")["groups"] if group["name"] == "downbeat_alerts"]
        assert all(rule["health"] == "ok" for rule in rules["rules"]), rules
        firing = [rule["name"] for rule in rules["rules"] if rule["state"] == "firing"]
        assert not firing, "a calm server raises no alarm"
