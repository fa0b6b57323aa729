"""Each process of a cluster shows the whole: two frontends and two backends, with sums that a client has counted."""
import concurrent.futures
import json
import subprocess
import time

import pytest
import requests

import emulated
import ensembles
from browser import Browser
from serving import EXAMPLES, free_ports, processes
from test_ui import cell, infer, keep, needs_browser

SLOS = ("--slo-ms", "digits=3600000")
WITHIN_S = 120


@pytest.fixture(scope="module")
def cluster(binary, tmp_path_factory):
    with processes(binary, EXAMPLES / "models", tmp_path_factory.mktemp("view"), *SLOS, models=["digits"], backends=2, frontends=2, engine="rten", spares=1, lost_after_ms=10_000) as all_of_it:
        yield all_of_it


def get(process, path, **more):
    reply = requests.get(f"{process.url}{path}", timeout=60, **more)
    assert reply.status_code == 200, (path, reply.text)
    return reply.json()


def until(get_it, is_right):
    """Asks again until the answer is right: processes hear of each other a moment after their start."""
    deadline = time.monotonic() + WITHIN_S
    while not is_right(answer := get_it()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer


def whole(process, path, count=4, **more):
    """The answer of `process` once all `count` processes of the cluster are part of it.

    On a busy machine a process may be silent for longer than the cluster waits. Its last counts then
    stand in the answer.
    """
    def has_all(told):
        return len(told["processes"]) == count and {its["state"] for its in told["processes"]} == {"answers"}

    return until(lambda: get(process, path, **more), has_all)


def digits(report):
    return next(model for model in report["models"] if model["model"] == "digits")


def send(frontends, count):
    """Requests of one item each, at one time, to the frontends in turn."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda number: infer(frontends[number % len(frontends)]), range(count)))
    assert {reply.status_code for reply in replies} == {200}


def use_both(backends, frontends):
    """Sends requests until both backends have run batches. Returns their number."""
    sent = 0
    while not sent or not all(backend.metric("downbeat_launches_total") for backend in backends):
        send(frontends, 16)
        sent += 16
    return sent


def states(live):
    return sorted((process["role"], process["state"]) for process in live["processes"])


def test_every_process_tells_the_sums_that_the_client_has_counted(cluster):
    schedulers, backends, frontends = cluster
    everybody = [*schedulers, *backends, *frontends]
    before = digits(whole(frontends[0], "/v2/live"))["in_time"]
    sent = use_both(backends, frontends)
    for process in everybody:
        live = whole(process, "/v2/live")
        its = digits(live)
        assert (its["in_time"], its["late"], its["unanswered"], its["items"]) == (before + sent, 0, {}, before + sent)
        assert sum(its["latency"]) == before + sent and 1 <= sum(its["batches"]) <= before + sent
        assert states(live) == [("backend", "answers")] * 2 + [("frontend", "answers")] * 2
        assert (its["state"], its["policy"]) == ("READY", "exclusive") and its["max_batch"] > 1 and its["profile"]
        names = {name["backend"] for name in live["device_names"]}
        assert len(names) == 2 and len(live["device_names"]) == len(live["device_busy_s"]) and all(busy > 0 for busy in live["device_busy_s"])
    # The share of each frontend, and the devices of each backend.
    shares = [digits(get(frontend, "/v2/live?scope=process")) for frontend in frontends]
    assert sum(share["in_time"] for share in shares) == before + sent and all(share["in_time"] >= sent // 2 for share in shares)
    own = get(backends[0], "/v2/live?scope=process")
    assert "processes" not in own and "device_names" not in own
    assert requests.get(f"{schedulers[0].url}/v2/live?scope=process", timeout=60).status_code == 404
    assert "scope" in requests.get(f"{frontends[0].url}/v2/live?scope=world", timeout=60).json()["error"]


def test_statistics_are_those_of_all_frontends_and_of_each_process(cluster):
    schedulers, backends, frontends = cluster
    def of(statistics):
        return next(model for model in statistics["model_stats"] if model["name"] == "digits")

    before = int(of(whole(frontends[0], "/v2/cluster/stats")["cluster"])["inference_count"])
    send(frontends, 16)
    for process in [*schedulers, *backends, *frontends]:
        told = whole(process, "/v2/cluster/stats")
        sums = of(told["cluster"])
        assert (int(sums["inference_count"]), int(sums["inference_stats"]["success"]["count"])) == (before + 16, before + 16)
        assert 1 <= int(sums["execution_count"]) <= before + 16
        by_role = {role: [of(its["statistics"]) for its in told["processes"] if its["role"] == role] for role in ("frontend", "backend")}
        assert sum(int(its["inference_count"]) for its in by_role["frontend"]) == before + 16
        # Each batch ran on one backend, and one frontend has counted it.
        ran = [sum(int(its["execution_count"]) for its in by_role[role]) for role in ("backend", "frontend")]
        assert ran[0] == ran[1] == int(sums["execution_count"])
    assert requests.get(f"{frontends[0].url}/v2/models/stats", timeout=60).json()["model_stats"], "a frontend's own share"


def test_one_timeline_has_the_launches_of_all_backends(cluster, binary, tmp_path):
    schedulers, backends, frontends = cluster
    for process in [*schedulers, *backends, *frontends]:
        use_both(backends, frontends)
        begin = get(process, "/v2/timeline?seconds=60")["now_ns"]
        send(frontends, 64)
        timeline = until(lambda process=process: get(process, "/v2/timeline?seconds=60"), lambda told: len({past["backend"] for past in told["devices"]}) == 2)
        errors = {its["backend"]: its["error_ns"] for its in timeline["backends"]}
        assert len(errors) == 2 and all(error is not None for error in errors.values()), timeline["backends"]
        assert all(its["complete"] for its in timeline["backends"])
        ended = [(past["backend"], launch["end_ns"]) for past in timeline["devices"] for launch in past["launches"]]
        # Launches of this moment lie between two looks at the asked process's own clock.
        lately = [(backend, end) for backend, end in ended if end > begin - errors[backend]]
        assert lately and all(end <= timeline["now_ns"] + errors[backend] for backend, end in ended), (begin, timeline["now_ns"], ended[-5:])
    page = tmp_path / "timeline.html"
    told = subprocess.run([binary, "timeline", schedulers[0].url, "--seconds", "60", "-o", page], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and "on 2 devices" in told.stdout and "its times are right to" in told.stdout, told
    assert page.read_text().count(", device 0</h2>") == 2


def test_top_shows_the_cluster(cluster, binary):
    schedulers, _, frontends = cluster
    for process in (schedulers[0], frontends[1]):
        whole(process, "/v2/live")
        def top(process=process):
            told = subprocess.run([binary, "top", process.url, "--once", "--interval", "0.2"], capture_output=True, text=True, timeout=60)
            assert told.returncode == 0 and "digits 1" in told.stdout, told
            return told.stdout

        until(top, lambda told: "of 2 frontends and 2 backends" in told)


def test_a_frontend_tells_the_policy_of_the_backends(cluster):
    _, backends, frontends = cluster
    # Backends that are silent for a moment tell nothing.
    path = "/v2/models/digits/policy"
    report = until(lambda: requests.get(f"{frontends[0].url}{path}", timeout=60), lambda reply: reply.status_code == 200).json()
    assert (report["policy"], report["asked"]) == ("exclusive", "exclusive") and "backends" not in report
    assert report["reason"] == get(backends[0], "/v2/models/digits/policy")["reason"]
    assert requests.get(f"{frontends[0].url}/v2/models/nobody/policy", timeout=60).status_code == 404


@needs_browser
def test_the_page_of_each_process_shows_the_whole_cluster(cluster, tmp_path):
    schedulers, backends, frontends = cluster
    with Browser(tmp_path) as browser:
        browser.look()
        for role, process in [("scheduler", schedulers[0]), ("frontend", frontends[0]), ("backend", backends[0])]:
            browser.open(f"{process.url}/ui")
            browser.wait_for(f"document.getElementById('cluster-body').innerText.includes('This process is a {role}')")
            while not browser.run(f"({cell('digits', 3)}) === '100%' && document.querySelectorAll('#timelines canvas').length === 2"):
                send(frontends, 32)
            headings = browser.run("[...document.querySelectorAll('#timelines h3')].map((head) => head.innerText)")
            assert all(", device 0" in heading for heading in headings), headings
            assert "times of backends are right to" in browser.run("document.getElementById('shown').innerText")
            counted = "document.querySelectorAll('#cluster-body table[aria-label=\"Processes whose counts are above\"] tbody tr').length"
            browser.wait_for(f"{counted} === 4")
            keep(browser, f"cluster-{role}")
        assert not browser.troubles, browser.troubles


def test_numbers_do_not_go_back_when_processes_die(binary, copied_examples, tmp_path):
    with processes(binary, copied_examples, tmp_path, *SLOS, models=["digits"], backends=2, frontends=2, engine="rten") as (scheduler, backends, frontends):
        whole(scheduler, "/v2/live")
        sent = use_both(backends, frontends)
        watchers = [scheduler, frontends[0]]
        for watcher in watchers:
            assert digits(whole(watcher, "/v2/live"))["in_time"] == sent
            whole(watcher, "/v2/cluster/stats")
        frontends[1].kill()
        backends[1].kill()
        for watcher in watchers:
            gone = [("backend", "answers"), ("backend", "gone"), ("frontend", "answers"), ("frontend", "gone")]
            live = until(lambda watcher=watcher: get(watcher, "/v2/live"), lambda live: states(live) == gone)
            assert digits(live)["in_time"] == sent and len(live["device_busy_s"]) == 2
            told = get(watcher, "/v2/cluster/stats")
            assert int(told["cluster"]["model_stats"][0]["inference_count"]) == sent, json.dumps(told)
            top = subprocess.run([binary, "top", watcher.url, "--once", "--interval", "0.2"], capture_output=True, text=True, timeout=60)
            assert top.stdout.count("is gone, its last counts stand") >= 1, top
        send(frontends[:1], 8)
        for watcher in watchers:
            until(lambda watcher=watcher: digits(get(watcher, "/v2/live"))["in_time"], lambda counted: counted == sent + 8)
        # Without a scheduler, a frontend has its own figures and the last ones of the others.
        scheduler.kill()
        live = until(lambda: get(frontends[0], "/v2/live"), lambda live: ("backend", "answers") not in states(live))
        assert digits(live)["in_time"] == sent + 8 and ("frontend", "answers") in states(live)
        assert get(frontends[0], "/v2/timeline")["devices"] == []


# Takes 20 ms for each item.
EMULATED = "alpha_ms = 20.0\nbeta_ms = 0.0\nmax_batch = 4\n"
ONE = {"datatype": "FP32", "shape": [1, 1], "data": [0]}


def named(report, name):
    return next(model for model in report["models"] if model["model"] == name)


@pytest.fixture(scope="module")
def pipeline(binary, tmp_path_factory):
    """A backend with the ensemble `both` of two models, and two frontends."""
    folder = tmp_path_factory.mktemp("pipeline")
    for name in ("first", "second"):
        emulated.write(folder / "models", name, EMULATED)
    scalar = ("TYPE_FP32", [1])
    steps = [ensembles.step("first", {"x": "in"}, {"y": "t"}), ensembles.step("second", {"x": "t"}, {"y": "out"})]
    ensembles.write(folder / "models", "both", steps, {"in": scalar}, {"out": scalar}, max_batch_size=4)
    with processes(binary, folder / "models", folder, "--slo-ms", "3600000", models=["both"], frontends=2, engine="emulated") as all_of_it:
        yield all_of_it


BOTH = {"inputs": [{"name": "in", **ONE}]}


def test_steps_of_an_ensemble_are_those_of_all_frontends(pipeline):
    scheduler, [backend], frontends = pipeline
    asked = [frontends[0]] * 2 + [frontends[1]] * 3
    begin = time.monotonic()
    assert [infer(frontend, "both", BOTH).status_code for frontend in asked] == [200] * 5
    took = time.monotonic() - begin
    assert infer(frontends[0], "both", {"inputs": [{"name": "nothing", **ONE}]}).status_code == 400
    for process in [scheduler, backend, *frontends]:
        both = named(whole(process, "/v2/live", count=3), "both")
        assert (both["ensemble"], both["in_time"], both["items"], sum(both["latency"]), both["slo_ms"]) == (True, 5, 5, 5, 3600000.0)
        assert [(step["model"], step["done"], step["dropped"], step["failed"]) for step in both["steps"]] == [("first", 5, 0, 0), ("second", 5, 0, 0)]
        assert sum(step["share"] for step in both["steps"]) == pytest.approx(1)
        # The emulated engine takes its time, the wait is part of the rest, and the client has waited for both.
        ran, waited = (sum(step[part] for step in both["steps"]) for part in ("ran_s", "waited_s"))
        assert all(step["ran_s"] >= 5 * 0.02 and step["waited_s"] > 0 for step in both["steps"]) and ran + waited <= took, (both, took)
        [statistics] = [its for its in whole(process, "/v2/cluster/stats", count=3)["cluster"]["model_stats"] if its["name"] == "both"]
        times = {part: int(statistics["inference_stats"][part]["ns"]) / 1e9 for part in ("queue", "compute_infer", "success")}
        assert int(statistics["inference_stats"]["success"]["count"]) == int(statistics["inference_count"]) == 5
        assert times["compute_infer"] == pytest.approx(ran) and times["queue"] == pytest.approx(waited) and times["success"] >= ran + waited
    shares = [named(get(frontend, "/v2/live?scope=process"), "both")["steps"][0]["done"] for frontend in frontends]
    assert shares == [2, 3]
    assert frontends[1].metric("downbeat_pipeline_step_duration_seconds_count", ensemble="both", step="1", phase="running") == 3


@needs_browser
def test_the_page_of_a_scheduler_shows_the_steps(pipeline, tmp_path):
    scheduler, _, frontends = pipeline
    with Browser(tmp_path) as browser:
        browser.look()
        browser.open(f"{scheduler.url}/ui")
        done = "[...document.querySelectorAll('#pipelines-body tbody tr')].map((row) => [row.cells[1].innerText, Number(row.cells[6].innerText) > 0]).join()"
        while not browser.run(f"{done} === 'first,true,second,true'"):
            assert infer(frontends[1], "both", BOTH).status_code == 200
        keep(browser, "cluster-pipelines")
        assert not browser.troubles, browser.troubles


def test_tenants_are_those_of_all_frontends(binary, tmp_path):
    repository, file = tmp_path / "models", tmp_path / "keys.toml"
    emulated.write(repository, "slow", EMULATED)
    file.write_text("".join(f"[tenants.{tenant}]\nrequests_per_second = 1e6\n" for tenant in ("ads", "search")))

    def key(name, *flags):
        return subprocess.run([binary, "key", "add", file, name, *flags], capture_output=True, text=True, check=True).stdout.strip()

    keys = {"ads": key("ads", "--tenant", "ads"), "search": key("search", "--tenant", "search"), "others": key("none")}
    reader = key("reader", "--scope", "read")
    with processes(binary, repository, tmp_path, "--slo-ms", "3600000", models=["slow"], frontends=2, engine="emulated", keys=(file, reader)) as (scheduler, [backend], frontends):
        for tenant, frontend in [("ads", 0), ("search", 0), ("search", 1), ("others", 1), ("search", 1)]:
            # A client cannot choose its tenant.
            body = {"inputs": [{"name": "x", **ONE}], "parameters": {"downbeat_tenant": "ads"}}
            reply = infer(frontends[frontend], "slow", body, headers={"Authorization": f"Bearer {keys[tenant]}"})
            assert reply.status_code == 200, reply.text
        headers = {"Authorization": f"Bearer {reader}"}
        for process in [scheduler, backend, *frontends]:
            live = whole(process, "/v2/live", count=3, headers=headers)
            counted = [(tenant["tenant"], tenant["within"], tenant["beyond"], tenant["refused"]) for tenant in live["tenants"]]
            assert counted == [("ads", 1, 0, 0), ("search", 3, 0, 0), ("others", 1, 0, 0)]
            assert all(tenant["device_s"] >= 0.02 * tenant["within"] for tenant in live["tenants"]), live["tenants"]
        own = get(frontends[0], "/v2/live?scope=process", headers=headers)["tenants"]
        assert [(tenant["tenant"], tenant["within"]) for tenant in own] == [("ads", 1), ("search", 1), ("others", 0)]


def test_processes_of_a_cluster_refuse_shares_of_tenants(binary, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "keys.toml").write_text("[tenants.search]\nshare = 0.5\n")
    ports = [flag for name, port in zip(("http", "grpc", "metrics"), free_ports(3)) for flag in (f"--{name}-port", str(port))]
    for role in (["frontend", "--listen", "127.0.0.1:0"], ["backend", tmp_path / "models", "--allow-empty"]):
        command = [binary, *role, "--schedulers", "127.0.0.1:1", "--host", "127.0.0.1", *ports, "--api-keys", tmp_path / "keys.toml"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
        assert ended.returncode != 0 and "tenant 'search' has a share or a quota" in ended.stdout + ended.stderr, (role, ended)
