#!/usr/bin/env python3
"""Records messages of a frontend, a scheduler and a backend as seeds of the fuzz target `role_frames`.
Run it when their protocol changes.

    cargo build -p downbeat && tools/record_roles.py

Three processes on this machine, with a proxy on each connection, and some requests. Writes the
beginning of each direction to fuzz/seeds/role_frames/.
"""

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BINARY = os.path.join(ROOT, "target/debug/downbeat")
SEEDS = os.path.join(ROOT, "fuzz/seeds/role_frames")
MOST_BYTES = 4096


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Proxy:
    """Brings connections to a port, and keeps what was said first on the first of them, both ways."""

    def __init__(self, to, there, back):
        self.said = {there: bytearray(), back: bytearray()}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.serve, args=(to, there, back), daemon=True).start()

    def serve(self, to, there, back):
        while True:
            client, _ = self.listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", to))
            except OSError:
                client.close()
                continue
            for source, sink, name in [(client, server, there), (server, client, back)]:
                threading.Thread(target=self.copy, args=(source, sink, name), daemon=True).start()

    def copy(self, source, sink, name):
        try:
            while data := source.recv(65536):
                self.said[name] += data
                sink.sendall(data)
        except OSError:
            # One of the two processes has gone.
            pass


def main():
    scheduler, frontend, http = free_port(), free_port(), [free_port() for _ in range(3)]
    proxies = [
        Proxy(scheduler, "backend_to_scheduler", "scheduler_to_backend"),
        Proxy(scheduler, "frontend_to_scheduler", "scheduler_to_frontend"),
        Proxy(frontend, "backend_to_frontend", "frontend_to_backend"),
    ]
    common = ["--host", "127.0.0.1", "--grpc-port", "off", "--metrics-port", "off", "--http-port"]
    commands = [
        ["scheduler", "--listen", f"127.0.0.1:{scheduler}", "--sub-clusters", "1", *common, str(http[0])],
        ["frontend", "--schedulers", proxies[1].address, "--listen", f"127.0.0.1:{frontend}", "--advertise", proxies[2].address,
         *common, str(http[1])],
        ["backend", "--schedulers", proxies[0].address, "--engine", "rten", "--profiling-budget", "0", "--model-control-mode", "explicit",
         *common, str(http[2]), os.path.join(ROOT, "examples/models")],
    ]
    running = [subprocess.Popen([BINARY, *command], stderr=subprocess.DEVNULL) for command in commands]
    with open(os.path.join(ROOT, "examples/digit.json"), "rb") as file:
        body = file.read()
    answered = 0
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{http[1]}/v2/models/digits/infer", body, timeout=5).read()
            answered += 1
        except (urllib.error.URLError, OSError):
            pass
        if answered == 3:
            break
        time.sleep(0.05)
    running[2].terminate()
    running[2].wait()
    for process in running:
        process.kill()
    assert answered == 3, "nobody answered"
    for proxy in proxies:
        for name, said in proxy.said.items():
            with open(os.path.join(SEEDS, name), "wb") as file:
                file.write(said[:MOST_BYTES])
            print(json.dumps({"seed": name, "said": len(said)}))


main()
