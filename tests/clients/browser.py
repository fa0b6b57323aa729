"""Debian's browsers without a window: Chromium by its DevTools protocol, Firefox by WebDriver BiDi."""
import base64
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import time

import requests
from websockets.sync.client import connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
START_S = 120


class Page:
    """One page of a browser. `troubles` has what the page complained of: errors, and violations of its policy."""

    def __init__(self, folder, name):
        self.folder = pathlib.Path(folder) / name
        self.folder.mkdir()
        self.log = open(f"{self.folder}.log", "wb")
        self.troubles, self.ids = [], itertools.count(1)
        self.process = subprocess.Popen(self.command(), stdout=self.log, stderr=self.log)
        try:
            self.socket = connect(self.until(self.address), max_size=None)
            self.begin()
        except BaseException:
            self.process.kill()
            raise

    def said(self):
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def until(self, value):
        """Waits for a value of the browser that starts."""
        deadline = time.monotonic() + START_S
        while not (found := value()):
            assert time.monotonic() < deadline and self.process.poll() is None, self.said()
            time.sleep(0.1)
        return found

    def call(self, method, **parameters):
        number = next(self.ids)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self.socket.recv(START_S))
            self.hear(told)
            if told.get("id") == number:
                assert "error" not in told, (method, told)
                return told["result"]

    def wait_for(self, script):
        deadline = time.monotonic() + START_S
        # Until the page's own script has run, its names are not there.
        patient = f"(() => {{ try {{ return ({script}) }} catch {{ return null }} }})()"
        while not (value := self.run(patient)):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"), self.troubles)
            time.sleep(0.1)
        return value

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()


class Browser(Page):
    """A page of Chromium."""

    def __init__(self, folder, dark=False):
        self.dark = dark
        super().__init__(folder, "browser")

    def command(self):
        # Tests run as root in containers, where the browser's own sandbox cannot.
        return [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0",
                "--remote-allow-origins=*", f"--user-data-dir={self.folder}", "about:blank"]

    def address(self):
        active = self.folder / "DevToolsActivePort"
        if not active.exists() or not (port := active.read_text().split("\n")[0]):
            return None
        pages = requests.get(f"http://127.0.0.1:{port}/json/list", timeout=START_S).json()
        return next((page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"), None)

    def begin(self):
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def hear(self, told):
        if told.get("method") == "Runtime.exceptionThrown":
            self.troubles.append(told["params"]["exceptionDetails"])
        if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] in ("error", "warning"):
            self.troubles.append(told["params"]["entry"])

    def open(self, address):
        self.call("Page.navigate", url=address)

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key, code):
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def look(self, width=1280, height=900, scale=1.0, dark=None, mobile=False):
        """Sets the size of the window, the zoom, and light or dark."""
        dark = self.dark if dark is None else dark
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path):
        """Writes what the page looks like, all of it."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        pathlib.Path(path).write_bytes(base64.b64decode(taken["data"]))


class Firefox(Page):
    """A page of Firefox, light or dark for its whole life."""

    # The names of keys, in WebDriver's code points.
    KEYS = {"ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}

    def __init__(self, folder, dark=False):
        self.dark = dark
        super().__init__(folder, "firefox-dark" if dark else "firefox")

    def command(self):
        scheme = f'user_pref("layout.css.prefers-color-scheme.content-override", {0 if self.dark else 1});\n'
        (self.folder / "user.js").write_text(scheme)
        return [FIREFOX, "--headless", "--no-remote", "--profile", str(self.folder), "--remote-debugging-port", "0", "about:blank"]

    def address(self):
        found = re.search(r"WebDriver BiDi listening on (ws://\S+)", self.said())
        return found and f"{found[1]}/session"

    def begin(self):
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["log.entryAdded"])
        self.context = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def hear(self, told):
        if told.get("method") == "log.entryAdded" and told["params"]["level"] in ("error", "warn"):
            self.troubles.append(told["params"])

    def open(self, address):
        self.call("browsingContext.navigate", context=self.context, url=address, wait="none")

    def run(self, script):
        """The value of an expression in the page."""
        told = f"Promise.resolve({script}).then((value) => JSON.stringify(value ?? null))"
        result = self.call("script.evaluate", expression=told, target={"context": self.context}, awaitPromise=True)
        assert result["type"] == "success", result
        return json.loads(result["result"]["value"])

    def press(self, key, _code):
        """Presses a key."""
        value = self.KEYS.get(key, key)
        actions = [{"type": kind, "value": value} for kind in ("keyDown", "keyUp")]
        self.call("input.performActions", context=self.context, actions=[{"type": "key", "id": "keys", "actions": actions}])

    def look(self, width=1280, height=900, scale=1.0, dark=None, mobile=False):
        """Sets the size of the window and the zoom. Firefox has no phone to imitate."""
        assert dark in (None, self.dark), "Firefox takes light or dark when it starts"
        self.call("browsingContext.setViewport", context=self.context, viewport={"width": width, "height": height}, devicePixelRatio=scale)

    def picture(self, path):
        """Writes what the page looks like, all of it."""
        taken = self.call("browsingContext.captureScreenshot", context=self.context, origin="document")
        pathlib.Path(path).write_bytes(base64.b64decode(taken["data"]))
