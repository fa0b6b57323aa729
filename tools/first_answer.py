#!/usr/bin/env python3
"""Measures the way from nothing to the first right answer of one's own model, in a fresh environment.

    tools/first_answer.py --wheel target/packages/downbeat_server-*.whl --archive target/packages/downbeat-*-linux.tar.gz
    tools/first_answer.py ... --peers mlserver pytriton --furnace target/peers/furnace-root/bin/furnace-onnx

A *way* is a wheel, an archive or another server. Each turn installs every way anew, in an empty folder, from files that
were fetched before. Then it starts the server on the model, and sends a request until the answer is right: equal to that
of ONNX Runtime in this Python. The table has medians, and least and most in brackets. With --check the goals of
Downbeat's own ways are held: 15 s for the wheel, 2 s for the archive.

Run it with the Python of the clients' tests (`just clients` makes it), which has numpy and onnxruntime.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import numpy as np
import onnxruntime

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools/peers"))
import compare  # noqa: E402

GOALS_S = {"Downbeat, wheel": 15, "Downbeat, archive": 2}
ONNXRUNTIME = f"onnxruntime=={onnxruntime.__version__}"
START_TIMEOUT_S = 300
DATATYPES = {"tensor(float)": ("FP32", np.float32), "tensor(int64)": ("INT64", np.int64), "tensor(int32)": ("INT32", np.int32)}


class OwnModel:
    """A user's model: a file, a request to it, and the right answer."""

    def __init__(self, path):
        self.path = path.resolve()
        session = onnxruntime.InferenceSession(str(path))
        random, feeds, tensors = np.random.default_rng(1), {}, []
        for argument in session.get_inputs():
            name, kind = DATATYPES[argument.type]
            shape = [size if isinstance(size, int) else 1 for size in argument.shape]
            values = random.random(shape).astype(kind) if kind is np.float32 else np.ones(shape, kind)
            feeds[argument.name] = values
            tensors.append({"name": argument.name, "datatype": name, "shape": shape, "data": values.ravel().tolist()})
        self.request = json.dumps({"inputs": tensors}).encode()
        self.output = session.get_outputs()[0].name
        self.right = session.run([self.output], feeds)[0].ravel()

    def is_right(self, answer):
        values = {output["name"]: output["data"] for output in answer["outputs"]}[self.output]
        return len(values) == len(self.right) and np.allclose(values, self.right, rtol=1e-3, atol=1e-4)

    def repository(self, folder):
        """A model repository with the file alone."""
        (folder / "own/1").mkdir(parents=True)
        shutil.copy(self.path, folder / "own/1/model.onnx")
        return folder


def size(path):
    """Bytes of the files in a folder, or of a file."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_symlink()]
    return sum(file.stat().st_size for file in files if file.is_file())


def environment(folder, house, packages):
    """A fresh Python environment with packages of the wheel house."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--find-links", house]
    subprocess.run([*pip, *packages], check=True)


def download(house, packages):
    """Fetches packages, with all that they need; the bytes."""
    house.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", house]
    subprocess.run([*pip, *packages], check=True)
    return size(house)


class Wheel:
    """Downbeat's wheel, with onnxruntime."""

    name = "Downbeat, wheel"

    def __init__(self, args):
        self.packages = [args.wheel, ONNXRUNTIME]

    def fetch(self, house):
        return download(house, self.packages)

    def install(self, folder, house):
        environment(folder, house, ["downbeat-server", ONNXRUNTIME])

    def start(self, folder, own, scratch):
        return downbeat(self.name, folder / "bin/downbeat", own, scratch)


class Archive:
    """Downbeat's archive, with the engine that is built in."""

    name = "Downbeat, archive"

    def __init__(self, args):
        self.archive = args.archive

    def fetch(self, house):
        house.mkdir()
        return size(self.archive)

    def install(self, folder, house):
        folder.mkdir()
        subprocess.run(["tar", "-xzf", self.archive, "-C", folder, "--strip-components=1"], check=True)

    def start(self, folder, own, scratch):
        return downbeat(self.name, folder / "downbeat", own, scratch)


def downbeat(name, program, own, scratch):
    """A server with defaults, a cache of its own, and no ONNX Runtime but that of its environment."""
    http, grpc, metrics = compare.free_ports(3)
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    return compare.Server(name, http, grpc, [program, "serve", *ports, own.repository(scratch / "models")], folder=scratch,
                          XDG_CACHE_HOME=str(scratch / "cache"), ORT_DYLIB_PATH="")


class OfPackages:
    """A server that is installed as Python `packages`."""

    def __init__(self, args):
        pass

    def fetch(self, house):
        return download(house, self.packages)

    def install(self, folder, house):
        environment(folder, house, self.packages)


class MlServer(OfPackages):
    """MLServer, with a runtime of a few lines for ONNX files."""

    name = "MLServer"
    packages = ["mlserver==1.7.1", ONNXRUNTIME, "uvloop==0.21.0"]

    def start(self, folder, own, scratch):
        http, grpc = compare.free_ports(2)
        settings = [folder / "bin/python", ROOT / "tools/peers/mlserver_onnx.py", scratch, http, grpc, f"own={own.path}"]
        subprocess.run([str(word) for word in settings], check=True)
        return compare.Server(self.name, http, grpc, [folder / "bin/mlserver", "start", "."], folder=scratch, PYTHONPATH=str(ROOT / "tools/peers"))


class PyTriton(OfPackages):
    """Triton as pip installs it: with its backend for Python."""

    name = "Triton (PyTriton)"
    packages = ["nvidia-pytriton==0.7.0", ONNXRUNTIME]

    def start(self, folder, own, scratch):
        ports = compare.free_ports(3)
        command = [folder / "bin/python", ROOT / "tools/peers/pytriton_onnx.py", *ports, f"own={own.path}"]
        return compare.Server(self.name, ports[0], ports[1], command, folder=scratch)


class Furnace:
    """furnace-server with ONNX Runtime, which a user builds: the sizes are those of the program and of the library's wheel."""

    name = "furnace-server"

    def __init__(self, args):
        self.program = args.furnace

    def fetch(self, house):
        return download(house, ["--no-deps", ONNXRUNTIME]) + size(self.program)

    def install(self, folder, house):
        folder.mkdir()
        shutil.copy(self.program, folder / "furnace-onnx")
        (wheel,) = house.glob("onnxruntime-*.whl")
        shutil.unpack_archive(wheel, folder / "unpacked", "zip")
        (library,) = (folder / "unpacked/onnxruntime/capi").glob("libonnxruntime.so.*")
        library.rename(folder / "libonnxruntime.so")
        shutil.rmtree(folder / "unpacked")

    def start(self, folder, own, scratch):
        http, grpc = compare.free_ports(2)
        return compare.Server(self.name, http, grpc, [folder / "furnace-onnx", http, grpc, f"own={own.path}"], folder=scratch,
                              ORT_DYLIB_PATH=str(folder / "libonnxruntime.so"))


def first_answer(server, own, begin):
    """Sends the request until there is an answer; seconds from `begin` to the model's readiness, and to the answer."""
    url = f"http://127.0.0.1:{server.http}/v2"
    request = urllib.request.Request(f"{url}/models/own/infer", own.request, {"Content-Type": "application/json"})
    ready = None
    while time.monotonic() - begin < START_TIMEOUT_S and server.child.poll() is None:
        if ready is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/models/own/ready", timeout=10).close()
                ready = time.monotonic() - begin
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(request, timeout=10) as reply:
                if own.is_right(json.load(reply)):
                    answered = time.monotonic() - begin
                    return ready or answered, answered
                raise SystemExit(f"{server.name}: the answer is wrong")
        time.sleep(0.01)
    server.log.seek(0)
    raise SystemExit(f"{server.name}: no answer\n{server.log.read()[-4000:].decode(errors='replace')}")


def turn(way, house, own):
    """Installs and starts a way once. Returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "scratch").mkdir()
        begin = time.monotonic()
        way.install(folder / "installed", house)
        installed = time.monotonic()
        server = way.start(folder / "installed", own, folder / "scratch")
        try:
            started = time.monotonic()
            ready, answered = first_answer(server, own, started)
            resident = server.resident_mb()
        finally:
            server.stop()
        return {"installed": size(folder / "installed") / 1e6, "install_s": installed - begin, "ready_s": ready, "answer_s": answered,
                "total_s": started - begin + answered, "resident": resident}


def chosen_ways(args):
    ways = [(args.wheel, Wheel), (args.archive, Archive), ("pytriton" in args.peers, PyTriton), ("mlserver" in args.peers, MlServer), (args.furnace, Furnace)]
    return [way(args) for given, way in ways if given]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=pathlib.Path, help="downbeat_server-….whl of target/packages")
    parser.add_argument("--archive", type=pathlib.Path, help="downbeat-…-linux.tar.gz of target/packages")
    parser.add_argument("--peers", nargs="*", default=[], choices=["mlserver", "pytriton"], help="other servers that pip fetches")
    parser.add_argument("--furnace", type=pathlib.Path, help="binary of tools/peers/furnace")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "examples/models/mlp/1/model.onnx", help="the model file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="fail if a median is above Downbeat's goal")
    args = parser.parse_args()
    own, ways, figures = OwnModel(args.model), chosen_ways(args), {}
    if not ways:
        parser.error("nothing to measure: give --wheel, --archive, --peers or --furnace")
    with tempfile.TemporaryDirectory() as folder:
        downloads = {way.name: way.fetch(pathlib.Path(folder) / type(way).__name__) / 1e6 for way in ways}
        for _ in range(args.turns):
            for way in ways:
                figures.setdefault(way.name, []).append(turn(way, pathlib.Path(folder) / type(way).__name__, own))
    head = ["", "download, MB", "installed, MB", "install, s", "start to ready, s", "start to answer, s", "install to answer, s", "resident, MB"]
    fields = [("installed", 0), ("install_s", 1), ("ready_s", 2), ("answer_s", 2), ("total_s", 1), ("resident", 0)]
    compare.print_table(head, [
        [way.name, f"{downloads[way.name]:,.0f}", *(compare.spread([t[field] for t in figures[way.name]], digits) for field, digits in fields)]
        for way in ways])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians of {args.turns}")
    missed = [name for name, goal in GOALS_S.items() if name in figures and statistics.median(t["total_s"] for t in figures[name]) > goal]
    if args.check and missed:
        sys.exit(f"above the goal: {', '.join(missed)}")


if __name__ == "__main__":
    main()
