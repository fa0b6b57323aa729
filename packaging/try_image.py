#!/usr/bin/env python3
"""Runs the program of an unpacked image as a container engine would, and asks which digit is in a picture.

    packaging/try_image.py BUNDLE      # a folder of `umoci unpack`: rootfs and config.json

bubblewrap gives the program the image's root file system, which is read-only, the image's environment, the
image's user, and no capability. Only /tmp and /profiles can be written, as in compose.yaml.
"""
import json
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
PORT = 18_000
START_TIMEOUT_S = 120


def command(bundle):
    """The command that starts the server of the image."""
    process = json.loads((bundle / "config.json").read_text())["process"]
    user = process["user"]
    assert user["uid"] != 0, "the image's user is root"
    words = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--cap-drop", "ALL", "--clearenv",
             "--uid", str(user["uid"]), "--gid", str(user["gid"]), "--ro-bind", str(bundle / "rootfs"), "/", "--proc", "/proc", "--dev", "/dev",
             "--tmpfs", "/tmp", "--tmpfs", "/profiles", "--ro-bind", str(ROOT / "examples/models"), "/models", "--chdir", process["cwd"]]
    for variable in process["env"]:
        words += ["--setenv", *variable.split("=", 1)]
    return [*words, *process["args"], "serve", "/models", "--host", "127.0.0.1", "--http-port", str(PORT), "--grpc-port", "off", "--metrics-port", "off"]


def answer(server):
    """The class of the digit in examples/digit.json, by the server in the image."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v2/models/digits/infer", (ROOT / "examples/digit.json").read_bytes())
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return json.load(reply)["outputs"]
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    sys.exit("the server of the image gave no answer")


def main():
    bundle = pathlib.Path(sys.argv[1])
    server = subprocess.Popen(command(bundle))
    try:
        print("the image answers", json.dumps(answer(server)))
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
