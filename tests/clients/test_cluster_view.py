"""Each process of a cluster shows the whole: two frontends and two backends, with sums that a client has counted."""
import concurrent.futures
import json
import subprocess
import time

import pytest
import requests

from browser import Browser
from serving import EXAMPLES, processes
from test_ui import cell, infer, keep, needs_browser

SLOS = ("--slo-ms", "digits=3600000")
WITHIN_S = 120


@pytest.fixture(scope="module")
def cluster(binary, tmp_path_factory):
    with processes(binary, EXAMPLES / "models", tmp_path_factory.mktemp("view"), *SLOS, models=["digits"], backends=2, frontends=2, engine="rten", spares=1) as all_of_it:
        yield all_of_it


def get(process, path):
    reply = requests.get(f"{process.url}{path}", timeout=60)
    assert reply.status_code == 200, (path, reply.text)
    return reply.json()


def until(get_it, is_right):
    """Asks again until the answer is right: processes hear of each other a moment after their start."""
    deadline = time.monotonic() + WITHIN_S
    while not is_right(answer := get_it()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer


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
    before = digits(until(lambda: get(frontends[0], "/v2/live"), lambda live: len(live["processes"]) == 4))["in_time"]
    sent = use_both(backends, frontends)
    for process in everybody:
        live = until(lambda process=process: get(process, "/v2/live"), lambda live: len(live["processes"]) == 4)
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

    before = int(of(get(frontends[0], "/v2/cluster/stats")["cluster"])["inference_count"])
    send(frontends, 16)
    for process in [*schedulers, *backends, *frontends]:
        told = until(lambda process=process: get(process, "/v2/cluster/stats"), lambda told: len(told["processes"]) == 4)
        whole = of(told["cluster"])
        assert (int(whole["inference_count"]), int(whole["inference_stats"]["success"]["count"])) == (before + 16, before + 16)
        assert 1 <= int(whole["execution_count"]) <= before + 16
        by_role = {role: [of(its["statistics"]) for its in told["processes"] if its["role"] == role] for role in ("frontend", "backend")}
        assert sum(int(its["inference_count"]) for its in by_role["frontend"]) == before + 16
        # Each batch ran on one backend, and one frontend has counted it.
        ran = [sum(int(its["execution_count"]) for its in by_role[role]) for role in ("backend", "frontend")]
        assert ran[0] == ran[1] == int(whole["execution_count"])
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
        until(lambda process=process: get(process, "/v2/live"), lambda live: len(live["processes"]) == 4)
        told = subprocess.run([binary, "top", process.url, "--once", "--interval", "0.2"], capture_output=True, text=True, timeout=60)
        assert told.returncode == 0 and "of 2 frontends and 2 backends" in told.stdout and "digits 1" in told.stdout, told


def test_a_frontend_tells_the_policy_of_the_backends(cluster):
    _, backends, frontends = cluster
    report = get(frontends[0], "/v2/models/digits/policy")
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
        until(lambda: get(scheduler, "/v2/live"), lambda live: len(live["processes"]) == 4)
        sent = use_both(backends, frontends)
        watchers = [scheduler, frontends[0]]
        for watcher in watchers:
            assert digits(get(watcher, "/v2/live"))["in_time"] == sent
            assert len(get(watcher, "/v2/cluster/stats")["processes"]) == 4
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
        assert [digits(get(watcher, "/v2/live"))["in_time"] for watcher in watchers] == [sent + 8] * 2
        # Without a scheduler, a frontend has its own figures and the last ones of the others.
        scheduler.kill()
        live = until(lambda: get(frontends[0], "/v2/live"), lambda live: ("backend", "answers") not in states(live))
        assert digits(live)["in_time"] == sent + 8 and ("frontend", "answers") in states(live)
        assert get(frontends[0], "/v2/timeline")["devices"] == []
