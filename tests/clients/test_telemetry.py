"""The server collects nothing about the process and sends nothing away, for all defaults of the
ONNX Runtime library in use."""
import re
import shutil
import time

import pytest
import requests

import models
from serving import Server

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}


def serve(binary, repository, folder, seconds, before=""):
    """Serves a model for a while, with a home folder of its own and an environment that says nothing about telemetry; gives the folder."""
    home, program = folder / "home", folder / "program"
    home.mkdir()
    # Not in this process, which has the library too.
    program.write_text(f'#!/bin/sh\nunset ORT_DISABLE_TELEMETRY\nexport HOME="{home}"\nexec {before} "{binary}" "$@"\n')
    program.chmod(0o755)
    models.add(repository, "one", 1)
    with Server(program, repository, folder) as server:
        assert requests.post(f"{server.url}/v2/models/one/infer", json=BODY, timeout=60).status_code == 200
        time.sleep(seconds)
    return home


def test_the_users_folders_have_our_own_files_only(binary, repository, tmp_path):
    # Telemetry of ONNX Runtime would write files as soon as the library is loaded.
    home = serve(binary, repository, tmp_path, seconds=1)
    assert list(home.rglob("*")) == []
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["downbeat"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not there")
def test_nobody_outside_is_asked_or_told_anything(binary, repository, tmp_path):
    calls = tmp_path / "calls.txt"
    # Telemetry would look its host up some nine seconds after the library is loaded. With -D the
    # server is the process that the test started, and gets its signals.
    serve(binary, repository, tmp_path, seconds=12, before=f'strace -D -f -qq -e trace=connect,sendto,sendmsg,sendmmsg -o "{calls}"')
    reached = [line for line in calls.read_text().splitlines() if re.search(r"connect\(|AF_INET", line) and "127.0.0.1" not in line]
    assert reached == []
