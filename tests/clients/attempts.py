"""What somebody with a socket and docs/protocol.md tries against a cluster, while a client counts its answers by id.

An attempt is a function of the cluster. Its doc string says what is tried, and it returns what happened. `OUTSIDERS` do not
know the cluster's secret. `LIARS` know it.
"""
import contextlib
import functools
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time

import requests

import ensembles
import roles_peer
import test_python_models as python_models
from roles_peer import BACKEND, FRONTEND, MOST, Peer, batch, claim, epoch, many, message, number, prefixed, scheduler, standing, text
from serving import EXAMPLES, START_TIMEOUT_S, Server, free_ports

DIGIT = json.loads((EXAMPLES / "digit.json").read_text())
PATIENCE_S = 60
OUTSIDERS, LIARS = [], []


# Models under each device policy, in Python, and an ensemble. All take the picture of a digit.
POLICIES = {
    "windowed": 'policy = "windowed"\nwindow_ms = 1',
    "elastic": 'policy = "elastic"\nmixes = { 4 = "4" }',
    "staged": 'policy = "staged"\nstages = 2',
    "auto": 'policy = "auto"',
}
ALL = ["digits", *POLICIES, "python", "pipeline"]
CODE = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            images = [pb_utils.get_input_tensor_by_name(request, "image").as_numpy() for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("probabilities", image.reshape(-1, 64)[:, :10])]) for image in images]
"""


def write_all(folder):
    """The models of `ALL`, and the options of their policies."""
    repository, digits = folder / "models", EXAMPLES / "models" / "digits"
    shutil.copytree(digits, repository / "digits")
    for name in POLICIES:
        shutil.copytree(digits, repository / name)
        config = (digits / "config.pbtxt").read_text().replace('name: "digits"', f'name: "{name}"')
        (repository / name / "config.pbtxt").write_text(config)
    image = [("image", "FP32", [8, 8])]
    python_models.write(repository, "python", CODE, python_models.config(image, [("probabilities", "FP32", [10])], "max_batch_size: 8"))
    picture = {"image": ("TYPE_FP32", [8, 8])}
    ensembles.write(repository, "pipeline", [ensembles.step("digits", {"image": "image"}, {"probabilities": "probabilities"})], picture,
                    {"probabilities": ("TYPE_FP32", [10])})
    options = folder / "policies.toml"
    options.write_text("".join(f'[[device.groups]]\nmodels = ["{name}"]\n{settings}\n' for name, settings in POLICIES.items()))
    return repository, options


class Cluster:
    """A scheduler, a backend and a frontend with one secret, and a client whose answers are counted. The backend has all models of
    `models`: `digits` alone, or `ALL`."""

    def __init__(self, binary, folder, *flags, models=("digits",)):
        folder, self.models = pathlib.Path(folder), list(models)
        repository, more = EXAMPLES / "models", flags
        if self.models == ALL:
            repository, options = write_all(folder)
            more = ("--config", str(options), "--python", sys.executable, *flags)
        self.secret_file = folder / "secret"
        subprocess.run([binary, "key", "secret", self.secret_file], check=True, capture_output=True)
        self.secret = self.secret_file.read_text().strip()
        ports = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.scheduler_at, self.frontend_at = ports
        common = ["--cluster-secret", str(self.secret_file), "--schedulers", self.scheduler_at]

        def start(role, *more):
            return Server(binary, repository, folder, *common, *more, engine="rten", role=role, wait=False)

        self.scheduler = start("scheduler", "--listen", self.scheduler_at)
        # An SLO that a busy machine keeps, so that only a fault fails a request.
        patient = [flag for name in self.models for flag in ("--slo-ms", f"{name}=3600000")]
        self.backend = start("backend", "--no-profiling", *([] if flags else patient), *more)
        self.frontend = start("frontend", "--listen", self.frontend_at)
        self.processes = [self.scheduler, self.backend, self.frontend]
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            assert time.monotonic() < deadline, [process.log for process in self.processes]
            time.sleep(0.05)

    def is_ready(self):
        with contextlib.suppress(requests.RequestException):
            return all(requests.get(f"{self.frontend.url}/v2/models/{name}/ready", timeout=10).status_code == 200 for name in self.models)
        return False

    def state(self):
        """Whether the scheduler leads, and its epoch."""
        found = requests.get(f"{self.scheduler.url}/v2/cluster", timeout=PATIENCE_S).json()
        return found["leads"], found["epoch"]

    def epoch(self):
        return self.state()[1]

    def node(self, role):
        """The number of a peer of the scheduler with this role."""
        peers = requests.get(f"{self.scheduler.url}/v2/cluster", timeout=PATIENCE_S).json()["peers"]
        return next(int(peer["node"], 16) for peer in peers if peer["role"] == role and peer["name"] != "stranger")

    def peer(self, role=BACKEND, at=None, **options):
        return Peer(at or self.scheduler_at, role, self.secret, **options)

    def close(self):
        for process in reversed(self.processes):
            process.process.kill()
            process.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Client:
    """Asks the frontend again and again, from two threads, in turns for each model. Each answer must have the id and the class of
    its request."""

    def __init__(self, port, models=("digits",), pause_s=0.005):
        self.port, self.models, self.pause_s, self.is_over = port, models, pause_s, threading.Event()
        self.asked, self.answers, self.lock = 0, [], threading.Lock()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.right = {model: self.ask(connection, model, "first") for model in models}
        assert all(status == 200 for status, _ in self.right.values()), self.right
        self.threads = [threading.Thread(target=self._go) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def ask(self, connection, model, name):
        body = json.dumps(dict(DIGIT, id=name))
        connection.request("POST", f"/v2/models/{model}/infer", body)
        reply = connection.getresponse()
        said = json.loads(reply.read())
        if reply.status == 200 and said.get("id") != name:
            return 0, "another request's id"
        return reply.status, said.get("outputs")

    def _go(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        while not self.is_over.wait(self.pause_s):
            with self.lock:
                self.asked += 1
                name, model = f"r{self.asked}", self.models[self.asked % len(self.models)]
            begin = time.monotonic()
            try:
                status, outputs = self.ask(connection, model, name)
            except (OSError, http.client.HTTPException):
                status, outputs = 0, None
                connection.close()
            is_right = (status, outputs) == self.right[model]
            with self.lock:
                self.answers.append((is_right, status, time.monotonic() - begin))

    def wait_for(self, answers):
        """Waits for so many more answers."""
        until, deadline = len(self.answers) + answers, time.monotonic() + PATIENCE_S
        while len(self.answers) < until and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self):
        self.is_over.set()
        for thread in self.threads:
            thread.join()
        assert len(self.answers) == self.asked, "each request is answered once"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Result:
    """The end of an attempt, and what the client saw meanwhile."""

    def __init__(self, attempt, happened, client, before, after):
        self.attempt, self.happened = attempt, happened
        self.answers = len(client.answers)
        self.bad = [status for is_right, status, _ in client.answers if not is_right]
        took = [took for _, _, took in client.answers]
        self.median_ms, self.most_ms = statistics.median(took) * 1e3, max(took) * 1e3
        self.before, self.after = before, after

    def row(self):
        bad = f"{len(self.bad)} of {self.answers} failed ({', '.join(map(str, sorted(set(self.bad))))})" if self.bad else f"{self.answers}, all right"
        epochs = "" if self.before == self.after else f" Epoch {self.before[1]} became {self.after[1]}."
        return f"| {self.attempt.__doc__} | {self.happened}.{epochs} | {bad} | {self.median_ms:.0f} | {self.most_ms:.0f} |"


def run(cluster, attempt, answers=40):
    """Tries one thing beside a client. The client has at least so many answers before the attempt begins and after its end."""
    before = cluster.state()
    with Client(cluster.frontend.http_port, cluster.models) as client:
        client.wait_for(answers)
        happened = attempt(cluster)
        client.wait_for(answers)
    return Result(attempt, happened, client, before, cluster.state())


def outsider(attempt):
    OUTSIDERS.append(attempt)
    return attempt


def liar(attempt):
    LIARS.append(attempt)
    return attempt


def ended(stream, seconds=PATIENCE_S):
    """How the process ends a connection."""
    stream.settimeout(seconds)
    begin, said = time.monotonic(), 0
    try:
        while data := stream.recv(1 << 16):
            said += len(data)
        how = "closed"
    except TimeoutError:
        return f"open after {seconds} s"
    except OSError:
        how = "reset"
    return f"{how} after {time.monotonic() - begin:.1f} s, {said} bytes came"


def each(cluster, act):
    """The same at the scheduler and at the frontend."""
    said = [act(at) for at in (cluster.scheduler_at, cluster.frontend_at)]
    return said[0] if said[0] == said[1] else f"scheduler: {said[0]}; frontend: {said[1]}"


def sends(cluster, data):
    def act(at):
        with roles_peer.connect(at) as stream:
            with contextlib.suppress(OSError):
                stream.sendall(data)
            return ended(stream)
    return each(cluster, act)


def greets(cluster, introduction, mine=None):
    """Sends an opening, reads the other, and sends what `introduction` makes of both."""
    def act(at):
        with roles_peer.connect(at) as stream:
            first = mine or roles_peer.opening()
            stream.sendall(first)
            theirs = roles_peer.read_exactly(stream, 43)
            with contextlib.suppress(OSError):
                stream.sendall(introduction(first, theirs))
            return ended(stream)
    return each(cluster, act)


# -- without the secret


@outsider
def silent(cluster):
    """says nothing"""
    return sends(cluster, b"")


@outsider
def garbage(cluster):
    """sends 1 MiB of random bytes"""
    return sends(cluster, random.Random(7).randbytes(1 << 20))


@outsider
def web(cluster):
    """speaks HTTP"""
    return sends(cluster, b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")


@outsider
def tls(cluster):
    """begins TLS"""
    return sends(cluster, bytes.fromhex("16030100a5010000a10303") + bytes(160))


@outsider
def no_greeting(cluster):
    """sends the message of 13 bytes that once ended service, without a greeting"""
    return sends(cluster, prefixed(number(7) + number(1) + number(0) * 2 + number(1) + standing(epoch(MOST)) + number(0) * 3))


@outsider
def other_version(cluster):
    """greets with another version of the protocol"""
    return sends(cluster, roles_peer.opening(protocol=99))


@outsider
def no_trust(cluster):
    """says that it has no secret, and introduces itself as a backend"""
    return sends(cluster, roles_peer.opening(trust=0) + roles_peer.hello(BACKEND, 7))


@outsider
def strange_trust(cluster):
    """says 7 in place of having a secret or none"""
    return sends(cluster, roles_peer.opening(trust=7))


@outsider
def half_opening(cluster):
    """stops in the midst of the opening"""
    return sends(cluster, roles_peer.opening()[:20])


@outsider
def slow_opening(cluster):
    """sends the opening byte by byte, ten bytes a second"""
    def act(at):
        with roles_peer.connect(at) as stream:
            begin = time.monotonic()
            with contextlib.suppress(OSError):
                for byte in roles_peer.opening():
                    stream.sendall(bytes([byte]))
                    time.sleep(0.1)
            return f"ended within {time.monotonic() - begin:.0f} s"
    return each(cluster, act)


@outsider
def random_proof(cluster):
    """introduces itself with a random proof"""
    return greets(cluster, lambda *_: roles_peer.hello(BACKEND, 7) + os.urandom(32))


@outsider
def zero_proof(cluster):
    """introduces itself with a proof of zeros"""
    return greets(cluster, lambda *_: roles_peer.hello(FRONTEND, 7) + bytes(32))


@outsider
def empty_secret(cluster):
    """proves the empty secret"""
    def introduction(mine, theirs):
        body = roles_peer.hello(BACKEND, 7)
        return body + roles_peer.proof("", mine + theirs + body)
    return greets(cluster, introduction)


@outsider
def guessed_secrets(cluster):
    """tries 200 secrets of a list"""
    refused = 0
    for guess in range(100):
        for at in (cluster.scheduler_at, cluster.frontend_at):
            try:
                with roles_peer.connect(at) as stream:
                    roles_peer.greet(stream, BACKEND, 7, f"secret{guess}")
            except (ConnectionError, OSError):
                refused += 1
    return f"{refused} of 200 refused"


@outsider
def other_magic(cluster):
    """begins with another word than `downbeat`"""
    return sends(cluster, b"Downbeat" + roles_peer.opening()[8:])


@outsider
def two_openings(cluster):
    """sends two openings, and no introduction"""
    return sends(cluster, roles_peer.opening() + roles_peer.opening())


@outsider
def short_proof(cluster):
    """sends 31 of the 32 bytes of a proof, and waits"""
    return greets(cluster, lambda *_: roles_peer.hello(BACKEND, 7) + bytes(31))


def recorded(cluster, at):
    """The bytes of a dialler that knew the secret, as somebody on the way hears them."""
    class Ear:
        def __init__(self, stream):
            self.stream, self.heard = stream, b""

        def sendall(self, data):
            self.heard += data
            self.stream.sendall(data)

        def recv(self, count):
            return self.stream.recv(count)

    with roles_peer.connect(at) as stream:
        ear = Ear(stream)
        roles_peer.greet(ear, BACKEND, 77, cluster.secret)
        return ear.heard


@outsider
def replay(cluster):
    """sends a recorded greeting again"""
    def act(at):
        heard = recorded(cluster, at)
        with roles_peer.connect(at) as stream:
            with contextlib.suppress(OSError):
                stream.sendall(heard)
            return ended(stream)
    return each(cluster, act)


@outsider
def replay_elsewhere(cluster):
    """sends a greeting that was recorded at the frontend to the scheduler, with the same nonce"""
    heard = recorded(cluster, cluster.frontend_at)
    with roles_peer.connect(cluster.scheduler_at) as stream:
        stream.sendall(heard[:43])
        roles_peer.read_exactly(stream, 43)
        stream.sendall(heard[43:])
        return ended(stream)


@outsider
def reflection(cluster):
    """sends the listener's own opening back as its own"""
    def act(at):
        with roles_peer.connect(at) as one, roles_peer.connect(at) as other:
            one.sendall(roles_peer.opening())
            theirs = roles_peer.read_exactly(one, 43)
            other.sendall(theirs)
            roles_peer.read_exactly(other, 43)
            other.sendall(roles_peer.hello(BACKEND, 7) + theirs[11:])
            return ended(other)
    return each(cluster, act)


@outsider
def two_listeners(cluster):
    """connects the scheduler's listener to the frontend's, so that they prove the secret to each other"""
    with roles_peer.connect(cluster.scheduler_at) as one, roles_peer.connect(cluster.frontend_at) as other:
        opening = roles_peer.opening()
        one.sendall(opening)
        other.sendall(roles_peer.read_exactly(one, 43))
        one.sendall(roles_peer.read_exactly(other, 43))
        return f"{ended(one)}; neither speaks before the other end has proved itself"


@outsider
def changed_role(cluster):
    """changes the role in a greeting on its way"""
    def act(at):
        with roles_peer.connect(at) as stream:
            mine = roles_peer.opening()
            stream.sendall(mine)
            theirs = roles_peer.read_exactly(stream, 43)
            honest = roles_peer.hello(BACKEND, 7)
            sent = roles_peer.hello(FRONTEND, 7) + roles_peer.proof(cluster.secret, mine + theirs + honest)
            with contextlib.suppress(OSError):
                stream.sendall(sent)
            return ended(stream)
    return each(cluster, act)


@outsider
def long_introduction(cluster):
    """announces an introduction of 64 KiB"""
    return greets(cluster, lambda *_: b"\xff\xff" + bytes(1 << 16))


@outsider
def empty_introduction(cluster):
    """announces an introduction of no bytes"""
    return greets(cluster, lambda *_: b"\0\0" + bytes(32))


@outsider
def endless_introduction(cluster):
    """sends 64 MiB behind the opening"""
    return greets(cluster, lambda *_: bytes(64 << 20))


@outsider
def half_closed(cluster):
    """ends its own way after the opening, and listens"""
    def act(at):
        with roles_peer.connect(at) as stream:
            stream.sendall(roles_peer.opening())
            stream.shutdown(socket.SHUT_WR)
            return ended(stream)
    return each(cluster, act)


@outsider
def crowd(cluster):
    """holds 400 silent connections"""
    with contextlib.ExitStack() as stack:
        for at in (cluster.scheduler_at, cluster.frontend_at):
            for _ in range(200):
                with contextlib.suppress(OSError):
                    stack.enter_context(roles_peer.connect(at))
        time.sleep(2.5)
        with cluster.peer() as joins:
            return f"a process with the secret joined meanwhile: {joins.is_up.is_set()}"


@outsider
def many_addresses(cluster):
    """holds 600 silent connections from 100 addresses"""
    with contextlib.ExitStack() as stack:
        for place in range(600):
            host, port = (cluster.scheduler_at, cluster.frontend_at)[place % 2].rsplit(":", 1)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=5, source_address=(f"127.0.9.{1 + place // 6}", 0)))
        with cluster.peer() as joins:
            return f"a process with the secret joined meanwhile: {joins.is_up.is_set()}"


@outsider
def churn(cluster):
    """opens and resets 2,000 connections"""
    for count in range(2_000):
        with contextlib.suppress(OSError), roles_peer.connect((cluster.scheduler_at, cluster.frontend_at)[count % 2]) as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            stream.sendall(roles_peer.opening()[:count % 43])
    return "all were taken"


def socket_of(cluster, node):
    """Asks for a process's memory at its Unix socket: how many file descriptors came."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(PATIENCE_S)
        stream.connect(f"\0downbeat-{node:016x}")
        try:
            return len(socket.recv_fds(stream, 64, 4)[1])
        except OSError:
            return 0


@outsider
def memory(cluster):
    """asks for the tensors' memory at the Unix socket, as another user"""
    node = cluster.node("frontend")
    if os.geteuid() != 0:
        return "not tried: the test has no second user"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            os.write(writer, str(socket_of(cluster, node)).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return f"{said.read() or 'no'} descriptors came"


# -- with the secret


def lies(role, *messages, at="scheduler", **changes):
    """An attempt that says these messages, which may be functions of the cluster."""
    def act(cluster):
        address = cluster.scheduler_at if at == "scheduler" else cluster.frontend_at
        with cluster.peer(role, address) as peer:
            found = [say(cluster) if callable(say) else say for say in messages]
            peer.say(*found, **changes)
            gone = peer.closed_within(1.5)
            return "the link was given up" if gone else "no effect"
    return act


def lie(what, role, *messages, **options):
    act = lies(role, *messages, **options)
    attempt = functools.wraps(act)(lambda cluster: act(cluster))
    attempt.__doc__, attempt.__name__ = what, re.sub(r"\W+", "_", what)
    LIARS.append(attempt)


def now(cluster, more=0):
    return epoch(cluster.epoch() + more)


def under_way(of):
    return message(roles_peer.UNDER_WAY, many(batch(of, n) + b"\0" + number(MOST) for n in range(10_000)))


lie("a backend reports epoch 2^64-1", BACKEND, standing(epoch(MOST)))
lie("a frontend reports epoch 2^64-1", FRONTEND, standing(epoch(MOST)))
lie("a backend reports an epoch 2^40 above the leader's", BACKEND, lambda cluster: standing(now(cluster, 1 << 40)))
lie("a backend says that the leader's next epoch is taken", BACKEND, lambda cluster: message(roles_peer.TAKEN, now(cluster, 1)))
lie("a backend says that another process has led in the leader's epoch", BACKEND, lambda cluster: message(roles_peer.TAKEN, now(cluster)))
lie("a backend says that it leads", BACKEND, lambda cluster: standing(now(cluster, 1), True))
lie("a backend sends a frontend's requests", BACKEND, message(roles_peer.REQUESTS, many([])))
lie("a backend sends `Leads`", BACKEND, lambda cluster: message(roles_peer.LEADS, now(cluster, 1)))
lie("a frontend offers models", FRONTEND, message(roles_peer.OFFER, b"\0\0\0\0\0"))
lie("a backend reports batches of others as completed", BACKEND,
    lambda cluster: message(roles_peer.COMPLETED, batch(now(cluster), 0), b"\0", many([])))
lie("a backend reports 10,000 batches under way", BACKEND, lambda cluster: under_way(now(cluster)))
lie("a backend measures endless delays", BACKEND, message(roles_peer.DELAYS, number(MOST) * 4, many([])))
lie("a backend offers 100,000 slots without a model", BACKEND,
    message(roles_peer.OFFER, many(text("cpu") + number(slot) + b"\0" for slot in range(100_000)), b"\0\0\0\0"))
lie("a frontend cancels the first 512 requests of another", FRONTEND, message(roles_peer.CANCEL, many(map(number, range(512)))))
lie("a frontend names a queue of a megabyte", FRONTEND, message(roles_peer.QUEUE, number(0), text(b"m" * (1 << 20)), b"\1\0"))
lie("a backend sends a frame with 129 messages", BACKEND, message(roles_peer.LEAVE), count=129)
lie("a backend speaks in another's name", BACKEND, message(roles_peer.LEAVE), node=7)
lie("a backend claims the requests of the moment, as only the leader does", BACKEND,
    lambda cluster: claim(batch(now(cluster), 1 << 40), 7, range(1_000)), at="frontend")
lie("a backend answers 1,000 requests that others run", BACKEND,
    message(roles_peer.ANSWERS, b"\0", many(number(n) + b"\1\3" + text("no") for n in range(1_000))), at="frontend")
lie("a backend says that it streams the answers of 1,000 requests that others run", BACKEND,
    message(roles_peer.ANSWERS, b"\0", many(number(n) + b"\2" for n in range(1_000))), at="frontend")
lie("a backend streams a last answer to each of 1,000 requests that others run", BACKEND,
    *(message(roles_peer.STREAMED, number(n), b"\1\1\3" + text("no"), b"\1") for n in range(1_000)), at="frontend")
lie("a frontend tells the scheduler that clients have room for answers", FRONTEND, message(roles_peer.ROOM, number(0), number(1 << 20)))
lie("a backend releases 1,000 requests that others run", BACKEND,
    lambda cluster: message(roles_peer.RELEASE, batch(now(cluster), 0), many(map(number, range(1_000)))), at="frontend")
lie("a backend speaks to a frontend as a scheduler does", BACKEND, message(roles_peer.LET_GO), at="frontend")


@liar
def second_of_a_name(cluster):
    """a process takes the number of the backend"""
    try:
        with cluster.peer(BACKEND, node=cluster.node("backend")) as peer:
            return "the connection was closed" if peer.closed_within(10) else "it stayed"
    except (ConnectionError, OSError):
        return "the connection was closed"


@liar
def damaged(cluster):
    """a backend sends a frame with a wrong checksum"""
    with cluster.peer() as peer:
        peer.raw(prefixed(peer.head([]), checksum=1))
        return "the connection was closed" if peer.closed_within() else "it stayed"


@liar
def many_messages(cluster):
    """a backend sends 8 MiB of messages of one byte in a frame"""
    with cluster.peer() as peer:
        peer.raw(prefixed(peer.head([message(roles_peer.LEAVE) * (8 << 20)], count=8 << 20)))
        return "the connection was closed" if peer.closed_within() else "it stayed"


@liar
def vast_head(cluster):
    """a backend announces a head of 4 GiB"""
    with cluster.peer() as peer:
        peer.raw(b"\xff" * 8)
        return "the connection was closed" if peer.closed_within() else "it stayed"


@liar
def vast_heads(cluster):
    """30 backends of one address send 60 of 64 MiB each, and stop"""
    before = cluster.scheduler.memory_mib("VmHWM")
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(cluster.peer()) for _ in range(30)]

        def announce(peer):
            peer.raw((64 << 20).to_bytes(4, "little") + bytes(4) + bytes(60 << 20))

        threads = [threading.Thread(target=announce, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        gone = sum(peer.closed_within() for peer in peers)
        for thread in threads:
            thread.join()
    return f"{gone} of 30 links were lost as silent; the scheduler took {cluster.scheduler.memory_mib('VmHWM') - before} MiB more at most"


@liar
def many_processes(cluster):
    """one process joins as 300"""
    joined = 0
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            # 600 threads of Python may be silent for longer than the scheduler bears.
            with contextlib.suppress(ConnectionError):
                stack.enter_context(cluster.peer())
                joined += 1
    return f"{joined} joined"


@liar
def flood(cluster):
    """a frontend hands in 200,000 requests for a model that nobody has"""
    with cluster.peer(FRONTEND) as peer:
        peer.say(message(roles_peer.QUEUE, number(0), text("none"), b"\1\0"))
        for begin in range(0, 200_000, 500):
            one = (number(n) + b"\0" + number(MOST) * 2 + b"\0\0\1\0" for n in range(begin, begin + 500))
            peer.say(message(roles_peer.REQUESTS, many(one)))
        time.sleep(1)
    return "they are refused, or forgotten with their frontend"


@liar
def step(cluster):
    """a backend reports an epoch 1,000 above the leader's"""
    said = lies(BACKEND, standing(now(cluster, 1_000)))(cluster)
    deadline = time.monotonic() + PATIENCE_S
    while not cluster.state()[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    return f"{said} on the link; the scheduler took a greater epoch and led on"


@liar
def other_leader(cluster):
    """a scheduler that nobody dials says that it leads in the next epoch"""
    # The leader's silence is short: a spare's heartbeats come each millisecond, too.
    with cluster.peer(scheduler(1), heartbeat_s=0.001) as peer:
        peer.say(standing(epoch(cluster.epoch() + 1, rank=1), True))
        time.sleep(2)
        leads = cluster.state()[0]
    deadline = time.monotonic() + PATIENCE_S
    while not cluster.state()[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    return "the leader went on" if leads else "the leader stood by for the 2 s that the liar was connected, and then led again"
