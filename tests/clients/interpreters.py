"""Kills, stops and traps the interpreters of a Python model under load. Every request is counted by its id.

    python tests/clients/interpreters.py                      # ten minutes
    DOWNBEAT_BIN=target/debug/downbeat python tests/clients/interpreters.py --seconds 30 --seed 5

Each id must get exactly one answer within its bound: the right one, or an error that names the model. No id may run twice. Requests to another
Python model and to an ONNX model must all succeed.
"""
import argparse
import collections
import contextlib
import itertools
import os
import pathlib
import queue
import random
import signal
import sys
import tempfile
import threading
import time

import grpc
import requests
from tritonclient.grpc import service_pb2, service_pb2_grpc

import models
from serving import Server
from test_python_models import config, write

RUN_TIMEOUT_S = 2
# A run is told to end, then its process is ended; each takes up to the limit again. Requests may wait for several such runs.
BOUND_S = 60
INSTANCES = 3

CODE = """
    import ctypes, json, os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            folder = os.path.join(args["model_repository"], "seen")
            os.makedirs(folder, exist_ok=True)
            self.ids = os.open(os.path.join(folder, f"ids-{os.getpid()}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            open(os.path.join(folder, f"pid-{os.getpid()}"), "w").close()

        def execute(self, requests):
            return [self.one(request) for request in requests]

        def one(self, request):
            if request.request_id():
                os.write(self.ids, f"{request.request_id()}\\n".encode())
            trap = json.loads(request.parameters()).get("trap")
            while trap == "loop":
                pass
            if trap == "stuck":
                ctypes.CDLL(None).sleep(3600)
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * 2)])
"""
CONFIG = config([("X", "FP32", [4])], [("Y", "FP32", [4])],
                f"max_batch_size: 8 dynamic_batching {{ }} instance_group [ {{ count: {INSTANCES} kind: KIND_CPU }} ]")


class Ledger:
    """What became of each id."""

    def __init__(self):
        self.lock, self.sent, self.answers = threading.Lock(), {}, collections.defaultdict(list)
        self.wrong, self.longest, self.events = [], 0.0, collections.Counter()

    def send(self, id):
        with self.lock:
            self.sent[id] = time.monotonic()

    def answer(self, id, kind, fault=None):
        with self.lock:
            self.answers[id].append(kind)
            self.longest = max(self.longest, time.monotonic() - self.sent.get(id, time.monotonic()))
            if fault:
                self.wrong.append(f"{id}: {fault}"[:300])


class Load:
    """The clients and the one who does harm."""

    def __init__(self, server, seed, seconds):
        self.server, self.ledger, self.until = server, Ledger(), time.monotonic() + seconds
        self.random = random.Random(seed)
        self.numbers = itertools.count()

    def over(self):
        return time.monotonic() >= self.until

    def http(self, model, kind, trap=None):
        """One request over HTTP, whose answer must be right, or name the model."""
        number = next(self.numbers)
        id, x = f"{kind}-{number}", [float(number % 1000), 1.0, 2.0, 3.0]
        body = {"id": id, "inputs": [{"name": "X" if model != "plain" else "x", "datatype": "FP32", "shape": [1, 4], "data": x}]}
        if trap:
            body["parameters"] = {"trap": trap}
        self.ledger.send(id)
        try:
            reply = requests.post(f"{self.server.url}/v2/models/{model}/infer", json=body, timeout=BOUND_S)
        except requests.RequestException as error:
            return self.ledger.answer(id, "none", f"no answer: {error}")
        answer = reply.json()
        if reply.status_code == 200:
            y = [2 * value for value in x] if model != "plain" else [value + 1 for value in x]
            good = answer["id"] == id and answer["outputs"][0]["data"] == y
            return self.ledger.answer(id, "right", None if good else answer)
        names = f"'{model}'" in answer["error"] and reply.status_code in (500, 503, 504)
        self.ledger.answer(id, f"error {reply.status_code}", None if names and model == "harmed" else answer)

    def client(self, model, kind):
        while not self.over():
            self.http(model, kind)

    def trap(self):
        """A request that its interpreter does not come back from."""
        self.http("harmed", "trap", self.random.choice(["loop", "stuck"]))

    def stream(self):
        """Requests over one gRPC stream, of which several are under way."""
        asked, room = queue.Queue(), threading.Semaphore(8)
        with grpc.insecure_channel(self.server.grpc) as channel:
            answers = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(asked.get, None), timeout=self.until - time.monotonic() + BOUND_S)
            sender = threading.Thread(target=self.send_stream, args=(asked, room))
            sender.start()
            try:
                for answer in answers:
                    room.release()
                    id, error = answer.infer_response.id, answer.error_message
                    if error:
                        self.ledger.answer(id, "error in the stream", None if "'harmed'" in error else error)
                    else:
                        self.ledger.answer(id, "right")
            except grpc.RpcError as error:
                self.ledger.wrong.append(f"the stream ended: {error}")
            sender.join()

    def send_stream(self, asked, room):
        while not self.over():
            if not room.acquire(timeout=1):
                continue
            id = f"stream-{next(self.numbers)}"
            request = service_pb2.ModelInferRequest(model_name="harmed", id=id)
            tensor = request.inputs.add(name="X", datatype="FP32", shape=[1, 4])
            tensor.contents.fp32_contents.extend([1, 2, 3, 4])
            self.ledger.send(id)
            asked.put(request)
        asked.put(None)

    def harm(self):
        seen = self.server.repository / "harmed" / "seen"
        while not self.over():
            time.sleep(self.random.uniform(0.2, 2.5))
            pids = [int(path.name[4:]) for path in seen.glob("pid-*") if pathlib.Path(f"/proc/{path.name[4:]}").exists()]
            kind = self.random.choice(["kill", "stop", "trap"])
            if kind == "trap":
                threading.Thread(target=self.trap, daemon=True).start()
            elif pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(pids), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self.ledger.events[kind] += 1

    def run(self):
        work = [(self.client, "harmed", f"http{i}") for i in range(6)]
        work += [(self.client, "bystander", "bystander"), (self.client, "plain", "plain"), (self.stream,), (self.stream,), (self.harm,)]
        threads = [threading.Thread(target=function, args=arguments) for function, *arguments in work]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        deadline = time.monotonic() + BOUND_S
        while len(self.ledger.answers) < len(self.ledger.sent) and time.monotonic() < deadline:
            time.sleep(0.05)


def judge(load, repository):
    """The counts, and the faults."""
    ledger = load.ledger
    counts = collections.Counter(f"{id.partition('-')[0].rstrip('0123456789')}: {kinds[0]}" for id, kinds in ledger.answers.items())
    faults = list(ledger.wrong)
    faults += [f"{id} got no answer" for id in ledger.sent if id not in ledger.answers]
    faults += [f"{id or 'an answer without an id'} got {len(kinds)} answers" for id, kinds in ledger.answers.items() if len(kinds) > 1 or id not in ledger.sent]
    ran = collections.Counter(id for path in (repository / "harmed" / "seen").glob("ids-*") for id in path.read_text().split())
    faults += [f"{id} ran {times} times" for id, times in ran.items() if times > 1]
    others = {kind: count for kind, count in counts.items() if kind.startswith(("bystander", "plain")) and not kind.endswith("right")}
    faults += [f"another model was harmed: {others}"] if others else []
    return counts, faults


def run(binary, seconds, seed, folder):
    repository = folder / "models"
    write(repository, "harmed", CODE, CONFIG)
    write(repository, "bystander", CODE, CONFIG.replace(f"count: {INSTANCES}", "count: 1"))
    models.add(repository, "plain", 1)
    with Server(binary, repository, folder, "--python", sys.executable, "--run-timeout", str(RUN_TIMEOUT_S), "--run-timeout-factor", "1") as server:
        load = Load(server, seed, seconds)
        load.run()
        counts, faults = judge(load, repository)
        restarts = server.metric("downbeat_executor_restarts_total", model="harmed")
        if server.metric("downbeat_executor_restarts_total", model="bystander"):
            faults.append("the bystander's process was started again")
    ledger = load.ledger
    print(f"seed {seed}, {seconds} s: {len(ledger.sent)} ids; {dict(ledger.events)}; {restarts:.0f} restarts; longest {ledger.longest:.1f} s")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:32} {count}")
    return counts, faults, ledger


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, faults, _ = run(pathlib.Path(os.environ["DOWNBEAT_BIN"]).resolve(), given.seconds, given.seed, pathlib.Path(folder))
    print("\n".join(faults[:20]) or "no fault")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
