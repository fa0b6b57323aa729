"""What a request costs a server that was built before the counting benches: counted from outside, so that any commit can be counted.

    python tools/count_binary.py instructions BINARY [--by file,function,inclusive,calls] [--connections 32]
    python tools/count_binary.py system BINARY [--connections 32]

`instructions` runs the server under callgrind, sends N and then 2N equal requests, and subtracts: start-up falls out.
`system` counts system calls, futex calls and context switches in the same way, by strace and by /proc.

Both want valgrind, strace and a build with debug = "line-tables-only" or more. The engine is the built-in one unless --flags say
otherwise. The server is told what batches take (--batch-us, --row-us), so that it decides as it does without callgrind.
"""

import argparse
import collections
import ctypes
import json
import os
import re
import selectors
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

START_WITHIN_S = 600
COUNTS = ("file", "function", "inclusive", "calls")
ALLOCATIONS = ("mi_malloc", "mi_malloc_aligned", "mi_zalloc", "mi_zalloc_aligned", "mi_realloc", "mi_realloc_aligned")


def counts_as_path(thread):
    """Whether a thread works for requests. The others work by the time that passes, of which valgrind makes much."""
    return thread.startswith(("frontend", "lane", "alarm", "tokio", "downbeat", "new_", "rten"))


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports


def refuse_real_auxv():
    """Has the kernel refuse PR_GET_AUXV: it names the kernel's vDSO, which valgrind has unmapped. Programs then read /proc/self/auxv.

    The process ends with its parent.
    """
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    prctl, get_auxv, refused, allowed = 157, 0x41555856, 0x50000 | 22, 0x7FFF0000
    load, equal, give = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 0), (equal, 0, 3, prctl), (load, 0, 0, 16), (equal, 0, 1, get_auxv), (give, 0, 0, refused)]
    code = b"".join(struct.pack("HBBI", *step) for step in [*steps, (give, 0, 0, allowed)])
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(steps) + 1, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    end_with_parent, kill = 1, 9
    if libc.prctl(end_with_parent, kill, 0, 0, 0) or libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filter_mode, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class Server:
    """A server of one model on free ports, with or without a tool."""

    def __init__(self, binary, repository, cache, flags, header=None, under=()):
        self.header = header
        self.http, grpc, metrics = free_ports(3)
        self.log = tempfile.TemporaryFile("w+")
        command = [*under, binary, "serve", "--model-repository", repository, "--host", "127.0.0.1"]
        command += ["--http-port", str(self.http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        command += ["--profile-cache", cache, *flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, preexec_fn=refuse_real_auxv if under else None)
        until = time.monotonic() + START_WITHIN_S
        while not self.is_ready():
            if time.monotonic() > until or self.process.poll() is not None:
                self.log.seek(0)
                raise SystemExit(f"the server did not start:\n{self.log.read()[-3000:]}")
            time.sleep(0.1)

    def is_ready(self):
        try:
            return self.get("/v2/health/ready") is not None
        except OSError:
            return False

    def get(self, path):
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", headers=dict([self.header] if self.header else []))
        return urllib.request.urlopen(request, timeout=30).read()

    def stop(self):
        self.process.terminate()
        self.process.wait()


def inference(server, model):
    """The bytes of an inference request with binary tensors, by the metadata of the model."""
    described = json.loads(server.get(f"/v2/models/{model}"))
    inputs, tensors = [], b""
    for tensor in described["inputs"]:
        shape = [1 if size < 0 else size for size in tensor["shape"]]
        bytes_of = {"FP32": 4, "INT64": 8, "INT32": 4, "FP64": 8, "UINT8": 1}[tensor["datatype"]]
        size = bytes_of
        for length in shape:
            size *= length
        parameters = {"binary_data_size": size}
        inputs.append({"name": tensor["name"], "shape": shape, "datatype": tensor["datatype"], "parameters": parameters})
        tensors += bytes(size)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}, separators=(",", ":")).encode()
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "host: localhost", "content-type: application/octet-stream"]
    lines += [": ".join(server.header)] if server.header else []
    lines += [f"inference-header-content-length: {len(head)}", f"content-length: {len(head) + len(tensors)}", "", ""]
    return "\r\n".join(lines).encode() + head + tensors


class Client:
    """Connections that each send the request again once they have its answer."""

    def __init__(self, server, request, connections):
        self.request = request
        self.selector = selectors.DefaultSelector()
        self.sockets = [socket.create_connection(("127.0.0.1", server.http)) for _ in range(connections)]
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.selector.register(each, selectors.EVENT_READ)

    def send(self, requests):
        """Sends so many requests in all, and reads their answers."""
        left, open_now, pending = requests, 0, dict.fromkeys(self.sockets, b"")
        for each in self.sockets[:left]:
            each.sendall(self.request)
            left, open_now = left - 1, open_now + 1
        while open_now > 0:
            for key, _ in self.selector.select():
                each = key.fileobj
                got = each.recv(1 << 16)
                if not got:
                    raise SystemExit("the server closed a connection")
                pending[each] += got
                if not is_whole(pending[each]):
                    continue
                if not pending[each].startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"the server refused a request:\n{pending[each][:500].decode(errors='replace')}")
                pending[each], open_now = b"", open_now - 1
                if left > 0:
                    each.sendall(self.request)
                    left, open_now = left - 1, open_now + 1


def is_whole(answer):
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return bool(end) and length is not None and len(body) >= int(length[1])


def read_callgrind(path):
    """Reads one dump: the cost of lines of each file, the cost of each function alone and with its
    callees, and the number of its calls."""
    names, found = {}, {key: collections.Counter() for key in COUNTS}

    def name(kind, text):
        number, named = re.match(r"(?:\((\d+)\))? ?(.*)", text).groups()
        if number and named:
            names[kind, number] = named
        return names[kind, number] if number else named

    file, function, callee, follows_call = "", "", "", False
    for line in Path(path).read_text(errors="replace").splitlines():
        key, sign, value = line.partition("=")
        if sign and key in ("fl", "fi", "fe"):
            file = name("file", value)
        elif sign and key == "fn":
            function = name("function", value)
        elif sign and key == "cfn":
            callee = name("function", value)
        elif sign and key in ("cfl", "cfi"):
            name("file", value)
        elif sign and key in ("ob", "cob"):
            name("object", value)
        elif sign and key == "calls":
            found["calls"][callee] += int(value.split()[0])
            follows_call = True
        elif line[:1].isdigit() or line[:1] in "+-*":
            fields = line.split()
            # The line after `calls=` has what the callee cost.
            cost = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0
            found["inclusive"][function] += cost
            if not follows_call:
                found["file"][file] += cost
                found["function"][function] += cost
            follows_call = False
    return found


def short(name):
    name = re.sub(r".*/registry/src/[^/]*/", "", name)
    name = re.sub(r".*/rustc/[0-9a-f]+/", "rust/", name)
    return re.sub(r"^.*?(crates/)", r"\1", name)


def start_counted(given, repository, cache, under):
    # Under the tool, batches take longer, which would change the server's decisions. So the server
    # gets the times without the tool.
    Server(given.binary, repository, cache, given.flags, given.header, under).stop()
    for path in Path(cache).iterdir():
        profile = json.loads(path.read_text())
        for measured in profile["measurements"]:
            took = 1000 * (given.batch_us + given.row_us * measured["batch"])
            measured.update({key: took for key in measured if key.endswith("_ns")})
        path.write_text(json.dumps({**profile, **({"settled": True} if "settled" in profile else {})}))
    server = Server(given.binary, repository, cache, given.flags, given.header, under)
    client = Client(server, inference(server, given.model), given.connections)
    return server, client


def threads_of(pid):
    """By valgrind's number of each thread of a process: its name."""
    said = subprocess.run(["vgdb", f"--pid={pid}", "v.info", "scheduler"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Thread (\d+): status = \S+ .*\(lwpid (\d+)\)", said)
    comm = {number: Path(f"/proc/{pid}/task/{task}/comm") for number, task in found}
    return {int(number): path.read_text().strip() if path.exists() else "ended" for number, path in comm.items()}


def read_dump(folder, dump, names):
    """The work of each thread between two dumps, by the thread's name."""
    threads = collections.defaultdict(lambda: {key: collections.Counter() for key in COUNTS})
    for path in Path(folder).glob(f"out.{dump}-*"):
        for key, counts in read_callgrind(path).items():
            threads[names.get(int(path.name.rpartition("-")[2]), "ended")][key].update(counts)
    return threads


def instructions(given, repository, cache, folder):
    under = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
    server, client = start_counted(given, repository, cache, [*under, "--fair-sched=yes", "--separate-threads=yes"])
    pid = str(server.process.pid)

    def control(*what):
        subprocess.run(["callgrind_control", *what, pid], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    control("-i", "on")
    client.send(given.requests)
    control("-z")
    client.send(given.requests)
    control("-d")
    client.send(2 * given.requests)
    control("-d")
    names = threads_of(pid)
    server.stop()
    once, twice = (read_dump(folder, dump, names) for dump in (1, 2))
    if given.keep:
        shutil.copytree(folder, given.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("models"))
    more = {key: collections.Counter() for key in COUNTS}
    print("instructions a request, by thread:")
    for thread in sorted(twice):
        cost = {key: collections.Counter(twice[thread][key]) for key in more}
        for key, counts in cost.items():
            counts.subtract(once[thread][key])
        own = sum(cost["file"].values()) / given.requests
        if abs(own) > 1:
            print(f"{own:10.0f}  {thread}{'' if counts_as_path(thread) else ' (not counted below)'}")
        for key in more if counts_as_path(thread) else ():
            more[key].update(cost[key])
    print(f"{sum(more['file'].values()) / given.requests:.0f} instructions a request")
    for allocation in ALLOCATIONS:
        if more["calls"][allocation]:
            print(f"{more['calls'][allocation] / given.requests:10.2f}  calls of {allocation}")
    for by in given.by.split(","):
        print(f"by {by}:")
        for name, cost in more[by].most_common(given.rows):
            print(f"{cost / given.requests:10.1f}  {short(name)}")


def switches(pid):
    found = collections.Counter()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        text = status.read_text()
        name = re.search(r"Name:\s*(\S*)", text)[1]
        found[name] += sum(int(count) for count in re.findall(r"voluntary_ctxt_switches:\s*(\d+)", text))
    return found


def cpu_us(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")


def system(given, repository, cache, folder):
    server, client = start_counted(given, repository, cache, ())
    pid = server.process.pid
    client.send(given.requests)
    before, cpu, begin = switches(pid), cpu_us(pid), time.monotonic()
    client.send(given.requests)
    took, cpu, after = time.monotonic() - begin, cpu_us(pid) - cpu, switches(pid)
    print(f"{took * 1e6 / given.requests:.1f} us and {cpu / given.requests:.1f} us of CPU a request, with this client")
    print("context switches a request, by thread:")
    for name in sorted(after, key=lambda name: before[name] - after[name]):
        if after[name] - before[name] > given.requests / 100:
            print(f"{(after[name] - before[name]) / given.requests:10.3f}  {name}")
    found = []
    for requests in (given.requests, 2 * given.requests):
        traced = subprocess.Popen(["strace", "-f", "-qq", "-o", f"{folder}/strace", "-p", str(pid)], stderr=subprocess.DEVNULL)
        time.sleep(1)
        client.send(requests)
        traced.terminate()
        traced.wait()
        calls = collections.Counter()
        for line in Path(f"{folder}/strace").read_text().splitlines():
            call = re.match(r"\d+ +(\w+)\((?:\w+, (FUTEX_\w+))?", line)
            if call:
                calls[" ".join(part for part in call.groups() if part).replace("_PRIVATE", "")] += 1
        found.append(calls)
    server.stop()
    print("system calls a request:")
    rows = {name: (found[1][name] - found[0][name]) / given.requests for name in found[1]}
    for name, count in sorted(rows.items(), key=lambda row: -row[1]):
        if count > 0.005:
            print(f"{count:10.2f}  {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["instructions", "system"])
    parser.add_argument("binary")
    parser.add_argument("--models", default="examples/models")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--by", default="file,function")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--keep", help="where the second dump of callgrind goes, for callgrind_annotate")
    parser.add_argument("--flags", default="--engine rten", type=str.split)
    parser.add_argument("--header", type=lambda text: text.split(": ", 1), help="of each request, such as 'authorization: Bearer KEY' for a server with --api-keys")
    parser.add_argument("--batch-us", type=int, default=10, help="what the server is told that a batch takes, in microseconds")
    parser.add_argument("--row-us", type=int, default=2, help="and each item of it")
    given = parser.parse_args()
    given.binary = str(Path(given.binary).resolve())
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        repository = Path(folder) / "models"
        shutil.copytree(Path(given.models) / given.model, repository / given.model)
        # Under a tool a request may take longer than its SLO.
        config = repository / given.model / "config.pbtxt"
        config.write_text(re.sub(r'(slo_ms"\s*value \{ string_value: ")\d+', r"\g<1>60000", config.read_text()))
        figure = instructions if given.figure == "instructions" else system
        figure(given, str(repository), cache, folder)


if __name__ == "__main__":
    main()
