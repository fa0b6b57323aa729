"""The page /ui, in Debian's Chromium and Firefox: its figures, its keys, its looks."""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import time

import pytest
import requests

import ensembles
from browser import FIREFOX, PROGRAM, Browser, Firefox
from serving import EXAMPLES, processes

DIGIT = json.loads((EXAMPLES / "digit.json").read_text())
# An SLO that a busy machine keeps, and one that no machine keeps.
SLOS = ("--slo-ms", "digits=3600000", "--slo-ms", "mlp=0.0001")
# The remembered requests begin anew when a model that was measured behind the service is loaded again.
UNMEASURED = ("--no-profiling",)
VARIABLE = "DOWNBEAT_PICTURES"

IS_REQUIRED = "DOWNBEAT_REQUIRE_BROWSER" in os.environ
needs_browser = pytest.mark.skipif(PROGRAM is None and not IS_REQUIRED, reason="Debian's package chromium is not installed")
needs_firefox = pytest.mark.skipif(FIREFOX is None and not IS_REQUIRED, reason="Debian's package firefox-esr is not installed")
PHONE = {"width": 390, "height": 844, "scale": 2, "mobile": True}
# Chromium changes between light and dark while it runs. Firefox starts with one of them.
BROWSERS = [
    pytest.param(Browser, {"light": {}, "dark": {"dark": True}, "zoom": {"width": 1600, "height": 1125, "scale": 0.8}, "phone": PHONE}, marks=needs_browser, id="chromium"),
    pytest.param(Firefox, {"firefox-light": {}, "firefox-phone": PHONE}, marks=needs_firefox, id="firefox"),
]
# An expression: whether each canvas in sight has more than one colour.
ARE_DRAWN = """[...document.querySelectorAll('canvas')].filter((canvas) => canvas.width && canvas.offsetParent).every((canvas) => {
    const pen = Object.assign(document.createElement('canvas'), {width: canvas.width, height: canvas.height}).getContext('2d', {willReadFrequently: true});
    pen.drawImage(canvas, 0, 0);
    const pixels = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return pixels.some((pixel) => pixel !== pixels[0]);
})"""
# An expression: how light the page is, from 0 to 255.
LIGHTNESS = "Math.max(...getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number))"


def infer(server, model="digits", body=DIGIT, **more):
    return requests.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=60, **more)


def zeros(server, model, **more):
    """A request of one item to a model of one input."""
    [tensor] = requests.get(f"{server.url}/v2/models/{model}", timeout=60).json()["inputs"]
    size = tensor["shape"][1]
    return {"inputs": [{"name": tensor["name"], "datatype": tensor["datatype"], "shape": [1, size], "data": [0.0] * size}], **more}


def cell(model, column):
    """An expression: a cell of the table of models."""
    row = f"[...document.querySelectorAll('#table tbody tr')].find((row) => row.cells[0].innerText.startsWith('{model}'))"
    return f"({row})?.cells[{column}].innerText"


def tile(title):
    return f"[...document.querySelectorAll('#tiles div')].find((tile) => tile.innerText.startsWith('{title}'))?.querySelector('dd').innerText"


def keep(browser, name):
    """Keeps a picture for a person, if the variable names a folder."""
    if folder := os.environ.get(VARIABLE):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        browser.picture(pathlib.Path(folder) / f"{name}.png")


def test_live_has_the_outcomes_of_requests(start, copied_examples):
    server = start(copied_examples, *SLOS, engine="rten")
    for _ in range(3):
        assert infer(server).status_code == 200
    refused = infer(server, "mlp", zeros(server, "mlp"))
    assert refused.status_code != 200, refused.text
    live = requests.get(f"{server.url}/v2/live?history=true", timeout=60).json()
    of = {model["model"]: model for model in live["models"]}
    digits, mlp = of["digits"], of["mlp"]
    assert (digits["state"], digits["in_time"], digits["late"], digits["unanswered"]) == ("READY", 3, 0, {})
    assert sum(digits["latency"]) == 3 and len(digits["latency"]) == len(live["latency_bounds_ms"]) + 1
    assert 1 <= sum(digits["batches"]) <= 3 and len(digits["batches"]) == len(live["batch_bounds"]) + 1
    assert digits["slo_ms"] == 3_600_000 and digits["profile"][0][0] == 1 and digits["profile"][0][1] > 0
    assert digits["slowdown"] > 0 and mlp["slowdown"] is None
    assert sum(part[1] for part in digits["history"]) == 3 == sum(part[2] for part in digits["history"])
    assert mlp["in_time"] == 0 and sum(mlp["unanswered"].values()) == 1, mlp
    assert "history" not in requests.get(f"{server.url}/v2/live", timeout=60).json()["models"][0]
    wrong = requests.get(f"{server.url}/v2/live?past=1", timeout=60)
    assert wrong.status_code == 400 and "the parameters are history" in wrong.json()["error"]


def missed(server, model, **more):
    return requests.get(f"{server.url}/v2/models/{model}/missed", timeout=60, **more).json()


def test_requests_that_missed_are_listed_with_their_ids_and_reasons(start, copied_examples):
    server = start(copied_examples, *SLOS, engine="rten")
    assert infer(server).status_code == 200
    assert missed(server, "digits") == {"model": "digits", "version": "1", "has_log": False, "requests": []}
    for number in range(60):
        assert infer(server, "mlp", zeros(server, "mlp", id=f"cam-{number}")).status_code == 504
    told = missed(server, "mlp")
    assert [request["id"] for request in told["requests"]] == [f"cam-{number}" for number in range(59, 9, -1)]
    first = told["requests"][0]
    assert first["reason"] == "deadline_impossible" and "command" not in first and "number" not in first
    assert "model 'mlp' needs" in first["why"] and "slo_ms" in first["why"]
    # The SLO is 100 ns: the request was late before anyone looked.
    assert abs(first["left_ms"]) < 60_000 and first["took_ms"] >= 0
    assert requests.get(f"{server.url}/v2/models/mlp/versions/1/missed", timeout=60).json() == told
    assert requests.get(f"{server.url}/v2/models/nobody/missed", timeout=60).status_code == 404
    # A wrong request, or one whose client chose to go, has not missed.
    assert infer(server, "mlp", {"inputs": []}).status_code == 400
    assert missed(server, "mlp") == told
    # A client's id is text, and bounded.
    assert infer(server, "mlp", zeros(server, "mlp", id="<b>" + "x" * 5000)).status_code == 504
    assert missed(server, "mlp")["requests"][0]["id"] == ("<b>" + "x" * 5000)[:64]


def test_a_late_request_and_a_timeout_are_among_the_missed(start, copied_examples):
    # Nothing is dropped, so that each request is answered, however late.
    server = start(copied_examples, "--slo-ms", "mlp=0.0001", "--drop", "none", engine="rten")
    assert infer(server, "mlp", zeros(server, "mlp", id="late-1")).status_code == 200
    [late] = missed(server, "mlp")["requests"]
    assert (late["id"], late["reason"]) == ("late-1", "late") and late["left_ms"] < 0
    assert "after the deadline: it waited" in late["why"] and "its batch of one item took" in late["why"]


def test_missed_requests_have_commands_with_a_decision_log(start, copied_examples, tmp_path, binary):
    log = tmp_path / "decisions"
    server = start(copied_examples, *SLOS, "--decision-log", str(log), engine="rten")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for identity in ("cam-7", "a; rm -rf ~"):
        assert infer(server, "mlp", zeros(server, "mlp", id=identity)).status_code == 504
    assert infer(server, "mlp", zeros(server, "mlp"), headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}).status_code == 504
    traced, rude, plain = missed(server, "mlp")["requests"]
    assert plain["command"] == "downbeat log why cam-7"
    assert rude["id"] == "a; rm -rf ~" and rude["command"] == f"downbeat log why r{rude['number']}"
    assert traced["trace"] == trace and traced["command"] == f"downbeat log why {trace}"
    server.stop()
    for request in (plain, rude, traced):
        command = [binary, *request["command"].split()[1:], log]
        story = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        assert "mlp" in story and "deadline_impossible" in story, story


def test_launches_say_why_their_batches_left(start, copied_examples):
    server = start(copied_examples, *SLOS, engine="rten")
    for name in ("cam-0", "", "x" * 5000):
        assert infer(server, body=dict(DIGIT, id=name)).status_code == 200
    timeline = requests.get(f"{server.url}/v2/timeline?seconds=60", timeout=60).json()
    launches = [launch for device in timeline["devices"] if device["model"] == "digits" for launch in device["launches"]]
    served = [launch for launch in launches if "granted" in launch]
    assert served and sum(launch["members"] for launch in served) == 3
    assert sorted(name for launch in served for name in launch.get("ids", [""] * launch["members"])) == ["", "cam-0", "x" * 64]
    for launch in served:
        assert launch["left"]["rule"] in timeline["rules"] and launch["left"]["behind"] == 0
        assert len(launch["requests"]) == launch["members"] and launch["deadline_ns"] > launch["end_ns"]


def test_a_what_if_replays_the_last_requests(start, copied_examples):
    server = start(copied_examples, *SLOS, *UNMEASURED, engine="rten")
    ask = lambda **asked: requests.get(f"{server.url}/v2/what-if", params=asked, timeout=60)
    few = ask()
    assert few.status_code == 400 and "a what-if needs 20" in few.json()["error"]
    for _ in range(40):
        assert infer(server).status_code == 200
    # The rehearsal's thread takes the requests now and then.
    while (told := ask()).status_code == 400:
        time.sleep(0.05)
    told = told.json()
    assert told["present_devices"] == told["devices"] == 1 and told["requests"] >= 20 and told["policy"] == "as served"
    here = next(point for point in told["curve"] if point["rate"] == 1)
    assert here["attainment"] == 1 and here["worst_model"] == "digits"
    # The counts of the same requests, as soon as enough of them lie between two moments at which they were counted.
    while told["measured"] is None:
        assert infer(server).status_code == 200
        told = ask().json()
    assert told["measured"] == 1
    other = ask(rate=2, devices=3, slo=0.5, policy="eager+head").json()
    assert (other["rate"], other["devices"], other["slo"], other["policy"]) == (2, 3, 0.5, "eager+head")
    assert told["one_device_fewer"] is None and other["one_device_fewer"]["rate"] == 2
    assert 2 in [point["rate"] for point in other["curve"]]
    for asked, words in {"rate": "a factor from 0.05 to 20", "devices": "a whole number from 1 to 1000", "policy": "unknown policy"}.items():
        wrong = ask(**{asked: "1e9"})
        assert wrong.status_code == 400 and words in wrong.json()["error"], wrong.text
    # One at a time: of several that ask at once, each gets an answer or a hint when to ask again.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(), range(16)))
    assert {answer.status_code for answer in answers} <= {200, 429} and 200 in {answer.status_code for answer in answers}
    assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status_code == 429)


@pytest.mark.parametrize("program, looks", BROWSERS)
def test_the_page_shows_what_the_server_does(start, copied_examples, tmp_path, program, looks):
    server = start(copied_examples, *SLOS, *UNMEASURED, engine="rten")
    with program(tmp_path) as browser:
        browser.look()
        browser.open(f"{server.url}/ui")
        browser.wait_for(f"({cell('digits', 1)}) === 'ready'")
        assert browser.run(tile("In time now")) == "no requests"
        # Until the page has drawn a launch, requests go on.
        drawn = "state.boxes.some((box) => box.launch.model === 'digits')"
        browser.wait_for("document.getElementById('table') && state.samples.length >= 2")
        while not browser.run(drawn):
            assert infer(server, body=dict(DIGIT, id="<cam>\u202e7\n")).status_code == 200
        browser.wait_for(f"({cell('digits', 3)}) === '100%'")
        browser.wait_for(f"({tile('In time, 5 minutes')}) === '100%'")
        assert browser.run(f"/^\\d.*\\/s$/.test({tile('Goodput')})")
        assert "digits" in browser.run("document.getElementById('legend').innerText")
        # A launch that is pointed at is described.
        browser.press(" ", 32)
        assert browser.run("state.paused && document.getElementById('pause').innerText") == "Go on"
        browser.run("draw_timelines(), (() => { const box = state.boxes.at(-1), at = box.canvas.getBoundingClientRect();"
                    " box.canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: at.left + (box.left + box.right) / 2, clientY: at.top + box.top + 9})); })()")
        told = browser.run("document.getElementById('launch').innerText")
        assert "digits version 1" in told and "It left then because " in told and "before its earliest deadline. Request" in told
        # The client's id is text on one line, and no character of it changes the order of the others.
        assert r"(<cam>\u{202e}7\u{a})" in told and browser.run("document.querySelectorAll('#launch *').length") == 0, told
        # So is the launch before it, by the keys alone.
        browser.run("state.boxes.at(-1).canvas.focus()")
        browser.press("ArrowUp", 38)
        assert browser.run("state.pointed && document.activeElement.tagName") == "CANVAS"
        browser.press("ArrowLeft", 37)
        assert browser.run("state.back_s") > 0
        browser.press(" ", 32)
        # A click on a model opens its charts.
        browser.run("[...document.querySelectorAll('#table button')].find((button) => button.innerText === 'digits').click()")
        browser.wait_for("document.querySelectorAll('#model canvas').length >= 3")
        assert browser.run("document.activeElement.id") == "model"
        browser.wait_for("document.getElementById('missed').innerText.includes('None was late')")
        # A what-if, by its sliders. It needs some requests, of which the rehearsal's thread hears now and then.
        while requests.get(f"{server.url}/v2/what-if", timeout=60).status_code != 200:
            assert infer(server).status_code == 200
            time.sleep(0.05)
        browser.run("(() => { const slider = document.getElementById('asked-rate'); slider.value = '1'; slider.dispatchEvent(new Event('input', {bubbles: true})); })()")
        assert browser.run("document.getElementById('told-rate').innerText") == "2.00×"
        browser.wait_for("document.getElementById('what-if-status').innerText.includes('2.00× the rate')")
        browser.run("document.querySelector('#asked button[type=reset]').click()")
        browser.wait_for("document.getElementById('what-if-status').innerText.includes('These requests, measured: 100%')")
        assert browser.run("document.querySelectorAll('#what-if-body canvas').length") == 1
        for name, options in looks.items():
            browser.look(**options)
            browser.wait_for(f"innerWidth === {options.get('width', 1280)}")
            browser.run("scrollTo(0, 0), new Promise((done) => setTimeout(done, 1200))")
            keep(browser, name)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{name}: the page is wider than its window"
            assert browser.run(ARE_DRAWN), name
            assert (browser.run(LIGHTNESS) < 128) == options.get("dark", False), name
        assert not browser.troubles, browser.troubles


@needs_firefox
def test_the_page_is_dark_in_a_dark_firefox(start, copied_examples, tmp_path):
    server = start(copied_examples, *SLOS, engine="rten")
    with Firefox(tmp_path, dark=True) as browser:
        browser.look()
        browser.open(f"{server.url}/ui")
        browser.wait_for("document.getElementById('table') && state.samples.length >= 2")
        while not browser.run("state.boxes.length > 0"):
            assert infer(server).status_code == 200
        browser.run("[...document.querySelectorAll('#table button')].find((button) => button.innerText === 'digits').click()")
        browser.wait_for("document.querySelectorAll('#model canvas').length >= 3")
        assert browser.run(LIGHTNESS) < 128
        browser.wait_for(ARE_DRAWN)
        keep(browser, "firefox-dark")
        assert not browser.troubles, browser.troubles


@needs_browser
def test_the_page_says_why_a_model_is_missing_and_what_was_dropped(start, copied_examples, tmp_path):
    (copied_examples / "broken" / "1").mkdir(parents=True)
    (copied_examples / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    server = start(copied_examples, *SLOS, "--exit-on-error", "false", "--strict-readiness", "false", engine="rten")
    with Browser(tmp_path) as browser:
        browser.look()
        browser.open(f"{server.url}/ui")
        browser.wait_for("document.getElementById('table') && state.samples.length >= 2")
        for number in range(20):
            assert infer(server, "mlp", zeros(server, "mlp", id=f"<img src=x onerror=alert({number})>")).status_code != 200
        browser.wait_for(f"({cell('mlp', 9)} || '').includes('deadline_impossible')")
        browser.wait_for(f"({tile('Worst model')} || '').startsWith('mlp')")
        assert browser.run(cell("broken", 1)) == "unavailable"
        assert "broken" in browser.run(cell("broken", 9)), "the reason"
        browser.run("[...document.querySelectorAll('#table button')].find((button) => button.innerText === 'mlp').click()")
        browser.wait_for("document.getElementById('model').innerText.includes('one run alone takes longer than the deadline leaves')")
        # The last requests that missed, with the clients' ids as text.
        browser.wait_for("document.querySelector('#missed tbody tr')?.innerText.includes('<img src=x onerror=alert(19)>')")
        assert browser.run("document.querySelectorAll('#missed tbody tr').length") == 20
        assert browser.run("document.querySelectorAll('#missed img').length") == 0
        keep(browser, "trouble")
        assert not browser.troubles, browser.troubles


@needs_browser
def test_the_page_asks_for_a_key_where_the_server_does(start, copied_examples, tmp_path, binary):
    keys = tmp_path / "keys.toml"

    def key(name, scope):
        added = subprocess.run([binary, "key", "add", keys, name, "--scope", scope], check=True, capture_output=True, text=True)
        return added.stdout.split()[-1]

    reads, infers = key("board", "read"), key("app", "infer")
    server = start(copied_examples, "--api-keys", str(keys), engine="rten")
    assert requests.get(f"{server.url}/v2/live", timeout=60).status_code == 401
    with Browser(tmp_path) as browser:
        browser.look()
        browser.open(f"{server.url}/ui")
        browser.wait_for("document.getElementById('login')?.hidden === false")
        for secret in (infers, reads):
            browser.run(f"document.getElementById('key').value = '{secret}'; document.querySelector('#login button').click()")
            if secret == infers:
                browser.wait_for("document.getElementById('status').innerText.includes('scope')")
                assert browser.run("state.samples.length") == 0
        browser.wait_for(f"({cell('digits', 1)}) === 'ready'")
        assert browser.run("document.getElementById('login').hidden")


@needs_browser
def test_the_page_shows_pipelines_and_tenants(start, repository, tmp_path, binary):
    ensembles.chain(repository)
    keys = tmp_path / "keys.toml"
    keys.write_text("[tenants.search]\nshare = 0.75\nquota = 0.9\n")

    def key(name, *flags):
        added = subprocess.run([binary, "key", "add", keys, name, *flags], check=True, capture_output=True, text=True)
        return added.stdout.split()[-1]

    asks, reads = key("search", "--tenant", "search"), key("board", "--scope", "read")
    server = start(repository, "--api-keys", str(keys), "--slo-ms", "chain=3600000", "--profiling-budget", "0", engine="rten")
    body = {"inputs": [{"name": "in", "datatype": "FP32", "shape": [1, 4], "data": [0.0, 1.0, 2.0, 3.0]}]}

    def infer_chain():
        # On a busy machine the steps use up the quota.
        while (answer := requests.post(f"{server.url}/v2/models/chain/infer", json=body, timeout=60, headers={"Authorization": f"Bearer {asks}"})).status_code == 429:
            time.sleep(0.2)
        assert answer.status_code == 200, answer.text

    infer_chain()
    live = requests.get(f"{server.url}/v2/live", timeout=60, headers={"Authorization": f"Bearer {reads}"}).json()
    chain = next(model for model in live["models"] if model["model"] == "chain")
    assert [step["model"] for step in chain["steps"]] == ["plus1", "plus10", "plus100"] and all(step["done"] >= 1 for step in chain["steps"])
    assert abs(sum(step["share"] for step in chain["steps"]) - 1) < 1e-9
    search, others = live["tenants"]
    assert (search["tenant"], search["share"], search["quota"]) == ("search", 0.75, 0.9)
    assert (others["tenant"], others["share"], others["quota"]) == ("others", 0.25, None)
    # Each step is a request of its model, and the whole is one of the ensemble.
    assert search["within"] + search["beyond"] >= 3 and search["device_s"] > 0
    with Browser(tmp_path) as browser:
        browser.look()
        browser.open(f"{server.url}/ui")
        browser.wait_for("document.getElementById('login')?.hidden === false")
        browser.run(f"document.getElementById('key').value = '{reads}'; document.querySelector('#login button').click()")
        browser.wait_for("state.samples.length >= 2")
        while not browser.run("document.querySelectorAll('#pipelines .parts span').length === 3"):
            infer_chain()
        assert "plus10" in browser.run("document.querySelector('#pipelines table').innerText")
        assert "search" in browser.run("document.querySelector('#tenants table').innerText")
        for name, options in {"pipelines": {}, "pipelines-dark-phone": {"dark": True, "width": 390, "height": 844, "scale": 2, "mobile": True}}.items():
            browser.look(**options)
            browser.run("new Promise((done) => setTimeout(done, 1200))")
            keep(browser, name)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{name}: the page is wider than its window"
        assert not [trouble for trouble in browser.troubles if "401" not in str(trouble)], browser.troubles


def test_frontends_of_a_cluster_tell_what_their_requests_did(binary, copied_examples, tmp_path):
    with processes(binary, copied_examples, tmp_path, *SLOS, models=["digits"], engine="rten") as (scheduler, _, (frontend,)):
        for _ in range(3):
            assert infer(frontend).status_code == 200
        live = requests.get(f"{frontend.url}/v2/live?history=true", timeout=60).json()
        digits = next(model for model in live["models"] if model["model"] == "digits")
        assert (digits["in_time"], digits["late"], digits["slo_ms"], digits["state"]) == (3, 0, 3_600_000, "READY")
        assert sum(digits["latency"]) == 3 and 1 <= sum(digits["batches"]) <= 3
        assert live["in_cluster"] and len(live["device_busy_s"]) == len(live["device_names"]) == 1
        # Each process tells the same counts.
        told = next(model for model in requests.get(f"{scheduler.url}/v2/live", timeout=60).json()["models"] if model["model"] == "digits")
        assert [told[count] for count in ("in_time", "items", "latency", "batches")] == [digits[count] for count in ("in_time", "items", "latency", "batches")]


def test_frontends_of_a_cluster_list_the_requests_that_missed(binary, copied_examples, tmp_path):
    with processes(binary, copied_examples, tmp_path, *SLOS, models=["digits", "mlp"], engine="rten") as (_, _, (frontend,)):
        assert infer(frontend).status_code == 200
        assert missed(frontend, "digits") == {"model": "digits", "version": "1", "has_log": False, "requests": []}
        answers = [infer(frontend, "mlp", zeros(frontend, "mlp", id=f"cam-{number}")) for number in range(3)]
        assert {answer.status_code for answer in answers} == {504}
        told = missed(frontend, "mlp")
        assert [request["id"] for request in told["requests"]] == ["cam-2", "cam-1", "cam-0"]
        assert [request["why"] for request in told["requests"]] == [answer.json()["error"] for answer in answers[::-1]]
        assert all(request["reason"].startswith("deadline_") and request["took_ms"] >= 0 for request in told["requests"]), told
        # A wrong request has not missed.
        assert infer(frontend, "mlp", {"inputs": []}).status_code == 400
        assert missed(frontend, "mlp") == told
        assert requests.get(f"{frontend.url}/v2/models/nobody/missed", timeout=60).status_code == 404


def test_a_late_request_is_among_the_missed_of_a_frontend(binary, copied_examples, tmp_path):
    flags = ("--slo-ms", "mlp=0.0001", "--drop", "none")
    with processes(binary, copied_examples, tmp_path, *flags, models=["mlp"], engine="rten") as (_, _, (frontend,)):
        assert infer(frontend, "mlp", zeros(frontend, "mlp", id="late-1")).status_code == 200
        [late] = missed(frontend, "mlp")["requests"]
        assert (late["id"], late["reason"]) == ("late-1", "late") and late["left_ms"] < 0
        assert "after the deadline: it waited" in late["why"] and "its batch of one item took" in late["why"]


@needs_browser
def test_each_process_of_a_cluster_has_its_page(binary, copied_examples, tmp_path):
    with processes(binary, copied_examples, tmp_path, *SLOS, models=["digits"], backends=2, frontends=2, engine="rten") as (scheduler, backends, frontends):
        shown = "[...document.querySelectorAll('main > section')].filter((part) => !part.hidden).map((part) => part.id)"
        parts = ["overview", "devices", "models", "cluster"]
        expected = [("scheduler", scheduler), ("frontend", frontends[0]), ("backend", backends[0])]
        with Browser(tmp_path) as browser:
            browser.look()
            for role, process in expected:
                browser.open(f"{process.url}/ui")
                browser.wait_for(f"document.getElementById('cluster-body').innerText.includes('This process is a {role}')")
                # Requests at one time go to both backends.
                with concurrent.futures.ThreadPoolExecutor(8) as pool:
                    while browser.run(f"({cell('digits', 3)}) !== '100%'"):
                        assert {answer.status_code for answer in pool.map(lambda _: infer(frontends[0]), range(16))} == {200}
                browser.wait_for(f"JSON.stringify({shown}) === '{json.dumps(parts, separators=(',', ':'))}'")
                # The scheduler knows all processes. A frontend and a backend know each other once a batch of one has been at the other.
                peers = "[...document.querySelectorAll('#cluster-body table[aria-label=\"Connected processes\"] tbody tr')].map((peer) => peer.cells[0].innerText)"
                browser.wait_for(f"{peers}.length >= {4 if role == 'scheduler' else 2}")
                assert sorted(browser.run(peers)) == ["backend"] * 2 + ["frontend"] * 2 if role == "scheduler" else "scheduler" in browser.run(peers)
                browser.run("new Promise((done) => setTimeout(done, 1200))")
                keep(browser, f"cluster-{role}")
                # A process without figures says so by its status, which the browser writes down.
                assert not [trouble for trouble in browser.troubles if "404" not in str(trouble)], browser.troubles
