#!/usr/bin/env python3
"""Writes Grafana's board of Downbeat: deploy/grafana/downbeat.json.

    python3 deploy/grafana/board.py            writes the board
    python3 deploy/grafana/board.py --check    fails if the file differs

The board asks Prometheus. Its queries use recording rules of deploy/prometheus/rules.yml for shares of requests in time.
"""
import json
import pathlib
import sys

FILE = pathlib.Path(__file__).with_name("downbeat.json")
# Grafana divides the width of a board into so many columns.
COLUMNS = 24
OBJECTIVE = 0.99
# The server's and the models' variables of the board.
SERVER = 'job=~"$job",instance=~"$instance"'
MODEL = SERVER + ',model=~"$model"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Of good and bad shares, from bad to good.
TRAFFIC_LIGHT = [(None, "red"), (0.95, "orange"), (OBJECTIVE, "green")]


def outcomes(outcome="", window="$__rate_interval", by="model"):
    """Requests a second whose deadline was kept or missed."""
    labels = MODEL + (f',outcome="{outcome}"' if outcome else "")
    return f"sum by ({by}) (rate(downbeat_slo_requests_total{{{labels}}}[{window}]))"


def attainment(window, by="model"):
    return f"{outcomes('in_time', window, by)} / ({outcomes(window=window, by=by)} > 0)"


def quantile(q, name, by="model", labels=MODEL):
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({name}_bucket{{{labels}}}[$__rate_interval])))"


def rate(name, by, labels=MODEL):
    return f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"


def items(kind):
    """Items of launches a second: `asked` for, or `computed`."""
    return rate("downbeat_launch_items_total", "model", MODEL + f',kind="{kind}"')


class Board:
    """Panels in rows, from left to right and from top to bottom."""

    def __init__(self):
        self.panels, self.x, self.y, self.row_height = [], 0, 0, 0

    def _place(self, width, height):
        if self.x + width > COLUMNS:
            self.x, self.y = 0, self.y + self.row_height
            self.row_height = 0
        place = {"x": self.x, "y": self.y, "w": width, "h": height}
        self.x, self.row_height = self.x + width, max(self.row_height, height)
        return place

    def _add(self, kind, title, width, height, **more):
        self.panels.append({"id": len(self.panels) + 1, "type": kind, "title": title, "gridPos": self._place(width, height), **more})

    def row(self, title):
        self.x, self.y, self.row_height = 0, self.y + self.row_height, 0
        self._add("row", title, COLUMNS, 1, collapsed=False, panels=[])

    def number(self, title, query, unit, about, steps=None):
        """The value of now."""
        thresholds = {"mode": "absolute", "steps": [{"color": color, "value": value} for value, color in steps or [(None, "text")]]}
        self._add("stat", title, 4, 4, description=about, datasource=SOURCE, targets=[target(query)],
                  fieldConfig={"defaults": {"unit": unit, "thresholds": thresholds, "noValue": "no requests"}, "overrides": []},
                  options={"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"})

    def chart(self, title, queries, unit, about, stacked=False, width=12, most=None):
        """Lines over time. `queries`: pairs of a query and a legend."""
        custom = {"fillOpacity": 30 if stacked else 5, "stacking": {"mode": "normal" if stacked else "none"}, "showPoints": "never"}
        limits = {"min": 0, **({"max": most} if most else {})}
        self._add("timeseries", title, width, 8, description=about, datasource=SOURCE,
                  targets=[target(query, legend, chr(ord("A") + place)) for place, (query, legend) in enumerate(queries)],
                  fieldConfig={"defaults": {"unit": unit, "custom": custom, **limits}, "overrides": []},
                  options={"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}})

    def table(self, title, queries, about, units):
        """A row for each label value; `units` by the name of the column."""
        renames = {f"Value #{chr(ord('A') + place)}": name for place, (_, name) in enumerate(queries)}
        overrides = [{"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]} for name, unit in units.items()]
        self._add("table", title, 24, 8, description=about, datasource=SOURCE,
                  targets=[{**target(query, "", chr(ord("A") + place)), "instant": True, "range": False, "format": "table"}
                           for place, (query, _) in enumerate(queries)],
                  transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": renames}}],
                  fieldConfig={"defaults": {}, "overrides": overrides}, options={"showHeader": True})


def target(query, legend="", name="A"):
    return {"refId": name, "expr": query, "legendFormat": legend, "datasource": SOURCE}


def variable(name, query, label, **more):
    return {"name": name, "type": "query", "label": label, "datasource": SOURCE, "query": {"query": query, "refId": name},
            "refresh": 2, "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}, "allValue": ".*", "sort": 1, **more}


def fill(board):
    """All panels."""
    board.row("Are requests in time?")
    board.number("In time, 5 minutes", attainment("5m", "job"), "percentunit", "The share of requests answered by their deadline.", TRAFFIC_LIGHT)
    board.number("In time, 1 hour", attainment("1h", "job"), "percentunit", "The share of requests answered by their deadline.", TRAFFIC_LIGHT)
    board.number("Burn rate, 1 hour", f"(1 - ({attainment('1h', 'job')})) / {1 - OBJECTIVE:.2g}", "none",
                 f"How fast the budget of missed requests is used up; 1: just kept. The objective is {OBJECTIVE:.0%}.",
                 [(None, "green"), (1, "orange"), (6, "red")])
    board.number("Offered", outcomes(by="job"), "reqps", "Requests a second, without those that clients took back.")
    board.number("Goodput", outcomes("in_time", by="job"), "reqps", "Requests a second that are answered by their deadline.")
    board.number("The worst model", f"bottomk(1, {attainment('5m')})", "percentunit", "The least share of requests in time of any model, 5 minutes.", TRAFFIC_LIGHT)
    board.chart("In time, by model", [(attainment("5m"), "{{model}}")], "percentunit", "The share of requests answered by their deadline, over 5 minutes.", most=1)
    board.chart("Not in time, by reason", [
        (rate("downbeat_requests_not_answered_total", "reason"), "{{reason}}"),
        (f"sum(rate(downbeat_requests_late_total{{{MODEL}}}[$__rate_interval]))", "late"),
    ], "reqps", "Requests without an answer, and late answers. docs/guide/drops.md explains each reason.", stacked=True)
    board.chart("Requests, by model", [(outcomes(), "{{model}}")], "reqps", "Offered requests.", stacked=True)
    board.chart("Waiting, by model", [(f"sum by (model) (nv_inference_pending_request_count{{{MODEL}}})", "{{model}}")], "none", "Items in queues now.", stacked=True)

    board.row("How long do requests take?")
    request = "downbeat_request_duration_seconds"
    board.chart("Median and 99th percentile, with the SLO", [
        (quantile(0.5, request), "{{model}} p50"), (quantile(0.99, request), "{{model}} p99"),
        (f"max by (model) (downbeat_model_slo_seconds{{{MODEL}}})", "{{model}} SLO"),
    ], "s", "From arrival to result, of requests that got one.")
    phase = "downbeat_phase_duration_seconds"
    board.chart("Phases, mean", [
        (f"sum by (phase) (rate({phase}_sum{{{MODEL}}}[$__rate_interval])) / (sum by (phase) (rate({phase}_count{{{MODEL}}}[$__rate_interval])) > 0)", "{{phase}}"),
    ], "s", "queue is for each request; the others are for each launch.")

    board.row("Are batches large enough?")
    board.chart("Mean batch", [(f"{rate('nv_inference_count', 'model')} / ({rate('nv_inference_exec_count', 'model')} > 0)", "{{model}}")], "none", "Items of a launch.")
    board.chart("Computed for nothing", [
        (f"1 - {items('asked')} / ({items('computed')} > 0)", "{{model}}"),
    ], "percentunit", "The share of computed items that nobody asked for: padding.", most=1)

    board.row("Are the devices busy?")
    board.chart("Busy share", [(rate("downbeat_device_busy_seconds_total", "instance, device", SERVER), "{{instance}}, {{device}}")], "percentunit",
                "The share of time in which a device runs something.", most=1)
    board.chart("Devices, and the advice", [
        (f"sum(downbeat_devices{{{SERVER}}})", "there are"), (f"max(downbeat_autoscale_devices{{{SERVER}}})", "advised"),
    ], "none", "downbeat_autoscale_devices: scale by this number.")
    board.chart("GPUs in use", [(f"nv_gpu_utilization{{{SERVER}}}", "{{gpu_uuid}}")], "percentunit", "As the driver measures it.", most=1)
    board.chart("Memory of GPUs", [(f"nv_gpu_memory_used_bytes{{{SERVER}}}", "{{gpu_uuid}} used"), (f"nv_gpu_memory_total_bytes{{{SERVER}}}", "{{gpu_uuid}} in all")], "bytes",
                "As the driver measures it.")
    board.chart("Memory of models", [(f"sum by (instance, device, part) (downbeat_device_memory_bytes{{{SERVER}}})", "{{instance}}, {{device}}: {{part}}")], "bytes",
                "What models hold of each device: weights, sessions of GPUs, and on the CPU input rings and runs.")

    board.row("Which models are in service?")
    board.table("Models", [
        (f"sum by (model, version, state) (downbeat_model_state{{{MODEL}}})", "servers"),
        (f"max by (model, version) (downbeat_model_slo_seconds{{{MODEL}}})", "SLO"),
        (f"sum by (model, version) (downbeat_model_memory_bytes{{{MODEL}}})", "memory"),
        (f"max by (model, version) (nv_model_load_duration_secs{{{MODEL}}})", "load"),
        (f"sum by (model, version) (downbeat_executor_restarts_total{{{MODEL}}})", "restarts"),
    ], "By version and state.", {"SLO": "s", "memory": "bytes", "load": "s"})

    board.row("What goes through the ports?")
    board.chart("Answers, by code", [(rate("downbeat_answers_total", "protocol, code", SERVER), "{{protocol}} {{code}}")], "reqps", "The status of HTTP, or the code of gRPC.", stacked=True)
    board.chart("Bytes", [(rate("downbeat_received_bytes_total", "protocol", SERVER), "{{protocol}} received"), (rate("downbeat_sent_bytes_total", "protocol", SERVER), "{{protocol}} sent")], "Bps",
                "As the network moves them.")
    board.chart("Connections", [(f"sum by (protocol) (downbeat_connections{{{SERVER}}})", "{{protocol}}")], "none", "Open connections.")
    board.chart("Memory of requests", [(f"downbeat_in_flight_bytes{{{SERVER}}}", "{{instance}}"), (f"downbeat_in_flight_bytes_limit{{{SERVER}}}", "{{instance}} limit")], "bytes",
                "What requests in flight hold, and may hold.")
    board.chart("CPU of processes", [(rate("process_cpu_seconds_total", "instance", SERVER), "{{instance}}")], "none", "Cores.")
    board.chart("Memory of processes", [(f"process_resident_memory_bytes{{{SERVER}}}", "{{instance}}")], "bytes", "Resident.")

    board.row("Tenants and clusters")
    board.chart("Device time, by tenant", [(rate("downbeat_tenant_device_seconds_total", "tenant", SERVER), "{{tenant}}")], "none", "Devices that a tenant keeps busy.", stacked=True)
    board.chart("Refused, by tenant", [(rate("downbeat_tenant_refused_total", "tenant", SERVER), "{{tenant}}")], "reqps", "Requests refused for their tenant's share or quota.", stacked=True)
    board.chart("Who leads", [(f"downbeat_cluster_leads{{{SERVER}}}", "{{instance}}")], "none", "1: this scheduler leads.")
    board.chart("Budgets of the network", [(f"max by (part) (downbeat_cluster_budget_seconds{{{SERVER}}})", "{{part}}")], "s", "The planned times for messages, of the slowest backend.")


def text():
    board = Board()
    fill(board)
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "current": {}}
    described = {
        "title": "Downbeat", "uid": "downbeat", "schemaVersion": 39, "version": 1, "tags": ["downbeat"], "timezone": "browser", "editable": True,
        "refresh": "15s", "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [
            source,
            variable("job", "label_values(downbeat_build_info, job)", "Job"),
            variable("instance", 'label_values(downbeat_build_info{job=~"$job"}, instance)', "Server"),
            variable("model", f"label_values(downbeat_slo_requests_total{{{SERVER}}}, model)", "Model"),
        ]},
        "panels": board.panels,
    }
    return json.dumps(described, indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if FILE.read_text() != text():
            sys.exit(f"{FILE} differs; write it with: python3 {sys.argv[0]}")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        FILE.write_text(text())
