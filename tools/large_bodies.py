"""What sixteen clients with 48 MB of JSON each do to a client with 300 kB, and to health.

    python tools/large_bodies.py target/ci/downbeat [--seconds 10]

Prints, for each binary, the answers per second of the small client and the latencies of health, alone and beside the large
clients. Where the binary has `--health-port`, also those of that port.
"""
import argparse
import json
import multiprocessing
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
LARGE_CLIENTS = 16


def post(path, numbers):
    text = json.dumps({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, numbers], "data": []}]})
    body = text.replace("[]", "[" + "0.123," * (numbers - 1) + "1]").encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def answer(stream):
    words, length = stream.readline().split(), 0
    if len(words) < 2:
        raise ConnectionError("the server closed the connection")
    while line := stream.readline().strip():
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    stream.read(length)


def ask(port, request, until, pause=0.0):
    """Asks again and again: the seconds of each answer."""
    took = []
    with socket.create_connection(("127.0.0.1", port)) as client, client.makefile("rb") as stream:
        while time.monotonic() < until:
            begin = time.monotonic()
            client.sendall(request)
            answer(stream)
            took.append(time.monotonic() - begin)
            time.sleep(pause)
    return took


def flood(port, until, counts):
    request, answered = post("/v2/models/digits/infer", 8 << 20), []

    def client():
        # Refused clients come again.
        while time.monotonic() < until:
            try:
                answered.append(len(ask(port, request, until)))
            except OSError:
                time.sleep(0.01)

    threads = [threading.Thread(target=client) for _ in range(LARGE_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.put(sum(answered))


def p99(took):
    if len(took) < 2:
        return f"{len(took)} answers"
    return f"p50 {statistics.median(took) * 1e3:.2f} ms, p99 {statistics.quantiles(took, n=100)[98] * 1e3:.2f} ms, max {max(took) * 1e3:.1f} ms of {len(took)}"


def measure(pool, ports, seconds):
    until = time.monotonic() + seconds
    small = pool.apply_async(ask, (ports["http"], post("/v2/models/digits/infer", 50_000), until))
    probe = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    probes = {name: pool.apply_async(ask, (port, probe, until, 0.005)) for name, port in ports.items()}
    return small.get(), {name: found.get() for name, found in probes.items()}


def show(title, small, probes, seconds):
    print(f"  {title}: small client {len(small) / seconds:.1f}/s, {p99(small)}")
    for name, took in probes.items():
        print(f"    health at the {name} port: {p99(took)}", flush=True)


def run(binary, seconds):
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Pool(4) as pool:
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        numbers = [one.getsockname()[1] for one in listening]
        for one in listening:
            one.close()
        ports = dict(zip(("http", "metrics", "health"), numbers))
        has_health = b"--health-port" in subprocess.run([binary, "serve", "--help"], capture_output=True).stdout
        flags = ["--health-port", str(ports["health"])] if has_health else []
        if not has_health:
            del ports["health"]
        command = [binary, "serve", ROOT / "examples/models", "--engine", "rten", "--host", "127.0.0.1", "--grpc-port", "off", "--no-profiling",
                   "--http-port", str(ports["http"]), "--metrics-port", str(ports["metrics"]), *flags]
        server = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{ports['http']}/v2/health/ready", timeout=5)
                    break
                except OSError:
                    time.sleep(0.1)
            print(f"{binary}:")
            alone, probes = measure(pool, ports, seconds)
            show("alone", alone, probes, seconds)
            counts = multiprocessing.Queue()
            flooding = multiprocessing.Process(target=flood, args=(ports["http"], time.monotonic() + seconds + 4, counts))
            flooding.start()
            time.sleep(3)
            beside, probes = measure(pool, ports, seconds)
            show("beside sixteen large clients", beside, probes, seconds)
            print(f"  the small client keeps {len(beside) / len(alone):.0%} of its rate; the large ones had {counts.get()} answers")
            flooding.join()
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", nargs="+", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    for each in options.binaries:
        run(each, options.seconds)
    sys.exit(0)
