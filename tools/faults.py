"""Injects faults into a cluster of real processes, beside clients that count each request by its id.

    target/clients-venv/bin/python tools/faults.py BINARY --faults 300 [--seed N] [--beside 60] [--etcd]

The cluster is two schedulers, two backends and two frontends. Relays carry the connections to the schedulers, so that wires can
stall, break and refuse. With `--etcd` the schedulers are found in an etcd, which can stop and die, too, and no relay is used.
A fault is drawn from `FAULTS`. Faults overlap: the next one comes before the last one has healed.

Clients send a request once, and never again. A request must end with its own answer, a refusal, or a broken connection. A
connection may break only if its frontend died meanwhile. The rules are checked at the end:

- no request is lost: each one has ended, at the latest `PATIENCE_S` after it began;
- no answer is doubled or wrong: the id is that of the request, and the tensors are right;
- no process has panicked, exactly one scheduler leads, and each frontend answers `LAST` requests in a row.
"""
import argparse
import collections
import contextlib
import http.client
import json
import pathlib
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import requests

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "clients"))

from serving import EXAMPLES, Server, free_ports

DIGIT = json.loads((EXAMPLES / "digit.json").read_text())
PATIENCE_S = 60
LAST = 100
THREADS = 4
# Each role with the same chance, and each way to fail within it.
FAULTS = ["kill", "end", "stop", "stall", "break", "refuse"]


class Relay:
    """A wire to a scheduler. Bytes wait while it stalls."""

    def __init__(self, target):
        self.target, self.flows, self.connections = target, threading.Event(), []
        self.takes = True
        self.flows.set()
        self.listener = socket.create_server(("127.0.0.1", free_ports(1)[0]))
        self.at = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            near, _ = self.listener.accept()
            if not self.takes:
                near.close()
                continue
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections = [pair for pair in self.connections if pair[0].fileno() >= 0] + [(near, far)]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.flows.wait()
                sink.sendall(data)
        close(source, sink)

    def stall(self, seconds):
        self.flows.clear()
        threading.Timer(seconds, self.flows.set).start()

    def cut(self):
        for pair in self.connections:
            close(*pair)

    def refuse(self, seconds):
        def take():
            self.takes = True
        self.takes = False
        self.cut()
        threading.Timer(seconds, take).start()


def close(*ends):
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


class Place:
    """A place of the cluster: the process that fills it now, and all that did before."""

    def __init__(self, name, start):
        self.name, self.start, self.past, self.deaths = name, start, [], []
        self.lock = threading.Lock()
        self.server = start()

    def replace(self, how, after_s):
        """Ends the process, and starts another one later."""
        with self.lock:
            # The death begins before the signal, so that a broken connection is never earlier.
            self.deaths.append([time.monotonic(), float("inf")])
            self.server.process.send_signal(how)
            # A process that was stopped ends only once it goes on.
            self.server.process.send_signal(signal.SIGCONT)
            self.server.process.wait(PATIENCE_S)
            self.past.append(self.server)
            time.sleep(after_s)
            self.server = self.start()
            # Connections are refused until the new process listens.
            deadline = time.monotonic() + PATIENCE_S
            while not self.listens() and time.monotonic() < deadline:
                time.sleep(0.02)
            self.deaths[-1][1] = time.monotonic()

    def listens(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", getattr(self.server, "http_port", None) or self.server.port)):
            return True
        return False

    def pause(self, seconds):
        with self.lock:
            self.server.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.server.process.send_signal(signal.SIGCONT)

    def died_between(self, begin, end):
        return any(begin <= back and death <= end for death, back in self.deaths)


class Etcd:
    """An etcd of one process, as far as `Place` needs it."""

    def __init__(self, folder, ports):
        client, peer = (f"http://127.0.0.1:{port}" for port in ports)
        command = ["etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        self.log, self.port = "", ports[0]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Cluster:
    def __init__(self, binary, folder, with_etcd, slo_ms):
        secret = folder / "secret"
        subprocess.run([binary, "key", "secret", secret], check=True, capture_output=True)
        ports = free_ports(2)
        own = [f"127.0.0.1:{port}" for port in ports]
        self.relays, self.places = [], []
        if with_etcd:
            etcd_ports = free_ports(2)
            self.places.append(Place("etcd", lambda: Etcd(folder, etcd_ports)))

        def listed(through_relays):
            if with_etcd:
                return ["--etcd", f"http://127.0.0.1:{etcd_ports[0]}"]
            if not through_relays:
                return ["--schedulers", ",".join(own)]
            wires = [Relay(("127.0.0.1", port)) for port in ports]
            self.relays += wires
            return ["--schedulers", ",".join(wire.at for wire in wires)]

        def place(role, rank, flags):
            def start():
                return Server(binary, EXAMPLES / "models", folder, "--cluster-secret", str(secret), *flags, engine="rten", role=role, wait=False)
            self.places.append(Place(f"{role} {rank}", start))
            return self.places[-1]

        self.schedulers = [place("scheduler", rank, [*listed(False), "--rank", str(rank), "--listen", at]) for rank, at in enumerate(own)]
        profiled = ["--no-profiling", "--slo-ms", f"digits={slo_ms}"]
        self.backends = [place("backend", rank, [*listed(True), *profiled]) for rank in range(2)]
        self.frontends = [place("frontend", rank, [*listed(True), "--listen", "127.0.0.1:0"]) for rank in range(2)]
        for frontend in self.frontends:
            self.wait_ready(frontend)

    def wait_ready(self, place):
        deadline = time.monotonic() + 2 * PATIENCE_S
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{place.server.url}/v2/models/digits/ready", timeout=10).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise SystemExit(f"{place.name} is not ready:\n{place.server.log[-3000:]}")
            time.sleep(0.05)

    def fault(self, rng):
        """A fault: what it is, and a function that takes as long as the fault lasts."""
        if (kind := rng.choice(FAULTS)) in ("stall", "break", "refuse") and self.relays:
            relay, seconds = rng.choice(self.relays), rng.uniform(0.05, 1.5)
            act = {"stall": lambda: relay.stall(seconds), "break": relay.cut, "refuse": lambda: relay.refuse(seconds)}[kind]
            return f"{kind} a wire", act
        kind = rng.choice(["kill", "end", "stop"])
        place = rng.choice([rng.choice(self.schedulers), rng.choice(self.backends), rng.choice(self.frontends), *self.places[:1]])
        seconds = rng.uniform(0.05, 1.5)
        act = {
            "kill": lambda: place.replace(signal.SIGKILL, seconds),
            "end": lambda: place.replace(signal.SIGTERM, seconds),
            "stop": lambda: place.pause(seconds),
        }[kind]
        return f"{kind} a {place.name.split()[0]}", act

    def close(self):
        for place in self.places:
            place.server.process.kill()
            place.server.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Client:
    """Threads that ask one frontend. `ends` has the way in which each id ended."""

    def __init__(self, frontend, right, pause_s):
        self.frontend, self.right, self.pause_s = frontend, right, pause_s
        self.begun, self.ends, self.is_over = {}, collections.defaultdict(list), threading.Event()
        self.threads = [threading.Thread(target=self._go, args=(number,)) for number in range(THREADS)]
        for thread in self.threads:
            thread.start()

    def _go(self, number):
        connection, at, count = None, None, 0
        while not self.is_over.wait(self.pause_s):
            name = f"{self.frontend.name}, {number}, {(count := count + 1)}"
            port = self.frontend.server.http_port
            if connection is None or port != at:
                connection, at = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S), port
            self.begun[name] = begin = time.monotonic()
            try:
                end = ask(connection, name, self.right)
            except TimeoutError:
                connection, end = None, "lost: nothing came"
            except (OSError, http.client.HTTPException):
                connection, end = None, "broken"
                # A connection of before the death may break only at the next request.
                if not self.frontend.died_between(begin - 2 * self.pause_s - 1, time.monotonic()):
                    end = "lost: the connection broke without a death"
            self.ends[name].append(end)

    def stop(self):
        self.is_over.set()
        for thread in self.threads:
            thread.join(2 * PATIENCE_S)


def ask(connection, name, right=None):
    """The end of a request with this id."""
    connection.request("POST", "/v2/models/digits/infer", json.dumps(dict(DIGIT, id=name)))
    reply = connection.getresponse()
    said = reply.read()
    if reply.status != 200:
        return f"refused {reply.status}"
    said = json.loads(said)
    if said.get("id") != name:
        return f"wrong: the answer of {said.get('id')}"
    return said["outputs"] if right is None else "right" if said["outputs"] == right else "wrong: other tensors"


def run(options):
    rng = random.Random(options.seed)
    beside = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(options.beside)]
    try:
        with tempfile.TemporaryDirectory() as folder, Cluster(options.binary, pathlib.Path(folder), options.etcd, options.slo_ms) as cluster:
            first = cluster.frontends[0].server.http_port
            right = ask(http.client.HTTPConnection("127.0.0.1", first, timeout=PATIENCE_S), "first")
            clients = [Client(frontend, right, options.pause_s) for frontend in cluster.frontends]
            drawn, acts = collections.Counter(), []
            for number in range(options.faults):
                what, act = cluster.fault(rng)
                drawn[what] += 1
                acts.append(threading.Thread(target=act))
                acts[-1].start()
                time.sleep(rng.uniform(0.05, 2 * options.between_s))
                if (number + 1) % 50 == 0:
                    print(f"{number + 1} faults, {sum(len(client.begun) for client in clients)} requests", flush=True)
            for act in acts:
                act.join(PATIENCE_S)
            faults = [f"{act.name} has not ended" for act in acts if act.is_alive()]
            faults += judge(cluster, clients, right)
    finally:
        for each in beside:
            each.kill()
    print("faults:", ", ".join(f"{what} {count}" for what, count in sorted(drawn.items())))
    ends = collections.Counter(end for client in clients for ended in client.ends.values() for end in ended)
    print(f"{sum(len(client.begun) for client in clients)} requests:", ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    for fault in faults:
        print("RULE BROKEN:", fault)
    print("load average %.1f %.1f %.1f" % tuple(map(float, pathlib.Path("/proc/loadavg").read_text().split()[:3])))
    return not faults


def judge(cluster, clients, right):
    """The rules that were broken."""
    for place in cluster.frontends:
        cluster.wait_ready(place)
    for client in clients:
        client.stop()
    broken = []
    for client in clients:
        for name in client.begun:
            ends = client.ends.get(name, [])
            if len(ends) != 1 or ends[0].startswith(("lost", "wrong")):
                broken.append(f"request '{name}': {ends}")
    for frontend in cluster.frontends:
        connection = http.client.HTTPConnection("127.0.0.1", frontend.server.http_port, timeout=PATIENCE_S)
        ends = collections.Counter(ask(connection, f"last {number}", right) for number in range(LAST))
        # A busy machine may make a request late.
        if set(ends) - {"right", "refused 503", "refused 504"} or ends["right"] < LAST / 2:
            broken.append(f"{frontend.name} at the end: {dict(ends)}")
    leads = [requests.get(f"{place.server.url}/v2/cluster", timeout=PATIENCE_S).json()["leads"] for place in cluster.schedulers]
    if leads.count(True) != 1:
        broken.append(f"who leads: {leads}")
    for place in cluster.places:
        broken += [f"{place.name} panicked:\n{server.log[-3000:]}" for server in [*place.past, place.server] if "panicked" in server.log]
        if place.server.process.poll() is not None:
            broken.append(f"{place.name} has ended by itself:\n{place.server.log[-3000:]}")
    return broken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--beside", type=int, default=0, help="processes that compute all the time")
    parser.add_argument("--etcd", action="store_true")
    parser.add_argument("--slo-ms", type=float, default=250)
    parser.add_argument("--between-s", type=float, default=0.7, help="mean seconds from a fault to the next one")
    parser.add_argument("--pause-s", type=float, default=0.01, help="seconds that each of the clients' threads waits between requests")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    sys.exit(0 if run(options) else 1)
