"""Debian's Chromium without a window, driven by its DevTools protocol."""
import base64
import itertools
import json
import pathlib
import shutil
import subprocess
import time

import requests
from websockets.sync.client import connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
START_S = 120


class Browser:
    """One page of a browser. `troubles` has what the page complained of: errors, and violations of its policy."""

    def __init__(self, folder):
        folder = pathlib.Path(folder) / "browser"
        self.log = open(f"{folder}.log", "wb")
        # Tests run as root in containers, where the browser's own sandbox cannot.
        command = [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0",
                   "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.troubles, self.ids = [], itertools.count(1)
        try:
            self.socket = connect(self._page(folder / "DevToolsActivePort"), max_size=None)
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.process.kill()
            raise

    def _page(self, active):
        deadline = time.monotonic() + START_S
        while True:
            if active.exists() and (port := active.read_text().split("\n")[0]):
                for page in requests.get(f"http://127.0.0.1:{port}/json/list", timeout=START_S).json():
                    if page["type"] == "page":
                        return page["webSocketDebuggerUrl"]
            assert time.monotonic() < deadline and self.process.poll() is None, pathlib.Path(self.log.name).read_text()
            time.sleep(0.1)

    def call(self, method, **parameters):
        number = next(self.ids)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self.socket.recv(START_S))
            if told.get("method") == "Runtime.exceptionThrown":
                self.troubles.append(told["params"]["exceptionDetails"])
            if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] in ("error", "warning"):
                self.troubles.append(told["params"]["entry"])
            if told.get("id") == number:
                assert "error" not in told, (method, told)
                return told["result"]

    def open(self, address):
        self.call("Page.navigate", url=address)

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script):
        deadline = time.monotonic() + START_S
        # Until the page's own script has run, its names are not there.
        patient = f"(() => {{ try {{ return ({script}) }} catch {{ return null }} }})()"
        while not (value := self.run(patient)):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"), self.troubles)
            time.sleep(0.1)
        return value

    def press(self, key, code):
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def look(self, width=1280, height=900, scale=1.0, dark=False, mobile=False):
        """Sets the size of the window, the zoom, and light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path):
        """Writes what the page looks like, all of it."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        pathlib.Path(path).write_bytes(base64.b64decode(taken["data"]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
