"""The page /ui, in Debian's Chromium: its figures, its keys, its looks."""
import json
import os
import pathlib
import subprocess

import pytest
import requests

from browser import PROGRAM, Browser
from serving import EXAMPLES

DIGIT = json.loads((EXAMPLES / "digit.json").read_text())
# An SLO that a busy machine keeps, and one that no machine keeps.
SLOS = ("--slo-ms", "digits=3600000", "--slo-ms", "mlp=0.0001")
VARIABLE = "DOWNBEAT_PICTURES"

needs_browser = pytest.mark.skipif(PROGRAM is None and "DOWNBEAT_REQUIRE_BROWSER" not in os.environ, reason="Debian's package chromium is not installed")


def infer(server, model="digits", body=DIGIT, **more):
    return requests.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=60, **more)


def zeros(server, model):
    """A request of one item to a model of one input."""
    [tensor] = requests.get(f"{server.url}/v2/models/{model}", timeout=60).json()["inputs"]
    size = tensor["shape"][1]
    return {"inputs": [{"name": tensor["name"], "datatype": tensor["datatype"], "shape": [1, size], "data": [0.0] * size}]}


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
    assert sum(part[1] for part in digits["history"]) == 3 == sum(part[2] for part in digits["history"])
    assert mlp["in_time"] == 0 and sum(mlp["unanswered"].values()) == 1, mlp
    assert "history" not in requests.get(f"{server.url}/v2/live", timeout=60).json()["models"][0]
    wrong = requests.get(f"{server.url}/v2/live?past=1", timeout=60)
    assert wrong.status_code == 400 and "only parameter is history" in wrong.json()["error"]


@needs_browser
def test_the_page_shows_what_the_server_does(start, copied_examples, tmp_path):
    server = start(copied_examples, *SLOS, engine="rten")
    with Browser(tmp_path) as browser:
        browser.look()
        browser.open(f"{server.url}/ui")
        browser.wait_for(f"({cell('digits', 1)}) === 'ready'")
        assert browser.run(tile("In time now")) == "no requests"
        # Until the page has drawn a launch, requests go on.
        drawn = "state.boxes.some((box) => box.launch.model === 'digits')"
        browser.wait_for("document.getElementById('table') && state.samples.length >= 2")
        while not browser.run(drawn):
            assert infer(server).status_code == 200
        browser.wait_for(f"({cell('digits', 3)}) === '100%'")
        browser.wait_for(f"({tile('In time, 5 minutes')}) === '100%'")
        assert browser.run(f"/^\\d.*\\/s$/.test({tile('Goodput')})")
        assert "digits" in browser.run("document.getElementById('legend').innerText")
        # A launch that is pointed at is described.
        browser.press(" ", 32)
        assert browser.run("state.paused && document.getElementById('pause').innerText") == "Go on"
        browser.run("draw_timelines(); (() => { const box = state.boxes.at(-1), at = box.canvas.getBoundingClientRect();"
                    " box.canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: at.left + (box.left + box.right) / 2, clientY: at.top + box.top + 9})); })()")
        assert "digits version 1" in browser.run("document.getElementById('launch').innerText")
        browser.press("ArrowLeft", 37)
        assert browser.run("state.back_s") > 0
        browser.press(" ", 32)
        # A click on a model opens its charts.
        browser.run("[...document.querySelectorAll('#table button')].find((button) => button.innerText === 'digits').click()")
        browser.wait_for("document.querySelectorAll('#model canvas').length >= 3")
        assert browser.run("document.activeElement.id") == "model"
        for name, options in {
            "light": {}, "dark": {"dark": True}, "zoom": {"width": 1600, "height": 1125, "scale": 0.8}, "phone": {"width": 390, "height": 844, "scale": 2, "mobile": True},
        }.items():
            browser.look(**options)
            browser.wait_for(f"innerWidth === {options.get('width', 1280)}")
            browser.run("scrollTo(0, 0), new Promise((done) => setTimeout(done, 1200))")
            keep(browser, name)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{name}: the page is wider than its window"
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
        body = zeros(server, "mlp")
        for _ in range(20):
            assert infer(server, "mlp", body).status_code != 200
        browser.wait_for(f"({cell('mlp', 9)} || '').includes('deadline_impossible')")
        browser.wait_for(f"({tile('Worst model')} || '').startsWith('mlp')")
        assert browser.run(cell("broken", 1)) == "unavailable"
        assert "broken" in browser.run(cell("broken", 9)), "the reason"
        browser.run("[...document.querySelectorAll('#table button')].find((button) => button.innerText === 'mlp').click()")
        browser.wait_for("document.getElementById('model').innerText.includes('one run alone takes longer than the deadline leaves')")
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
