"""A server that is killed again and again under load. Its files on the disk can be read, and the
next server starts from them."""
import contextlib
import json
import random
import subprocess
import threading
import time

import pytest
import requests

import models
from serving import Server, environment

ROUNDS = 5
X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}


@pytest.fixture
def options(tmp_path):
    """Options that give one model a device policy: its decision log has another form."""
    file = tmp_path / "options.toml"
    file.write_text('[[device.groups]]\nmodels = ["lanes"]\npolicy = "windowed"\n')
    return file


def test_what_a_killed_server_leaves_is_sound(binary, repository, options, tmp_path, monkeypatch):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    models.add(repository, "one", 1)
    models.add(repository, "lanes", 2)
    upload = {"parameters": {"config": "{}", "file:1/model.onnx": encoded(repository / "one" / "1" / "model.onnx")}}
    decisions = tmp_path / "decisions"
    flags = ("--config", str(options), "--decision-log", str(decisions), "--model-control-mode", "explicit",
             "--load-model", "one", "--load-model", "lanes")
    for _ in range(ROUNDS):
        server = Server(binary, repository, tmp_path, *flags, engine="rten")
        ended = threading.Event()
        threads = [threading.Thread(target=load, args=(server, name, ended)) for name in ("one", "lanes") for _ in range(2)]
        threads.append(threading.Thread(target=reload, args=(server, upload, ended)))
        for thread in threads:
            thread.start()
        # A second and more, so that logs have been written to the disk.
        time.sleep(chance.uniform(0.2, 1.8))
        server.process.kill()
        server.process.wait()
        ended.set()
        for thread in threads:
            thread.join()
        assert "panicked" not in server.log
        check(binary, decisions, tmp_path)
    # The temporary files of the killed servers are gone, and the next server uses their
    # measurements.
    with Server(binary, repository, tmp_path, *flags, engine="rten") as server:
        for name, expected in (("one", 2.0), ("lanes", 3.0)):
            reply = requests.post(f"{server.url}/v2/models/{name}/infer", json=X, timeout=60)
            assert reply.status_code == 200 and reply.json()["outputs"][0]["data"][0] == expected
        assert not list(temporary.glob("downbeat*/*"))
    check(binary, decisions, tmp_path)


def encoded(file):
    import base64

    return base64.b64encode(file.read_bytes()).decode()


def load(server, name, ended):
    session = requests.Session()
    with contextlib.suppress(requests.RequestException):
        while not ended.is_set():
            session.post(f"{server.url}/v2/models/{name}/infer", json=X, timeout=60)


def reload(server, upload, ended):
    with contextlib.suppress(requests.RequestException):
        while not ended.is_set():
            requests.post(f"{server.url}/v2/repository/models/one/load", json=upload, timeout=60)


def check(binary, decisions, folder):
    logs = sorted(decisions.glob("*.log"))
    assert any(log.name.startswith("device-") for log in logs) and any(log.name.startswith("shard-") for log in logs)
    for log in logs:
        if log.stat().st_size == 0:
            # Killed before its first write.
            continue
        shown = subprocess.run([binary, "log", "show", log], capture_output=True, text=True, timeout=60, env=environment(folder, "rten"))
        assert shown.returncode == 0, f"{log}: {shown.stderr}"
        assert "decision log of " in shown.stdout.partition("\n")[0], log
    for file in (folder / "cache").rglob("*.json"):
        json.loads(file.read_text())
