"""One process of a role on one node: started, watched, and started again after its end. This module does not know Ray."""
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

from . import launch, ports
from .commands import KINDS, CannotStart, check_repository, command, find_program

LOOKS_EVERY_S = 0.1
# How much of a log is read for its last lines.
LOG_BYTES = 1 << 18
# The pause before the process starts again: the first and the longest. It doubles with each start that was never ready.
PAUSES_S = (0.1, 10)
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclasses.dataclass
class Child:
    """A process that was started."""

    process: subprocess.Popen
    ports: dict
    version: str
    is_ready: bool = False
    was_ready: bool = False
    # When it gets SIGKILL, after SIGTERM.
    kill_at: float = None


class RoleProcess:
    """Keeps one process running. A thread does all the work; the methods only say what is wanted."""

    def __init__(self, name, address):
        self.name, self.address = name, address
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"downbeat-ray-{name}-"))
        self.lock = threading.Lock()
        self.spec = self.ports = self.child = self.successor = None
        # How to replace the child by one of the newest spec: "drain" (old first) or "overlap" (new first).
        self.replaces = None
        self.leaving, self.is_wanted, self.reason, self.is_refused = [], True, "", False
        self.starts = self.fails = 0
        self.not_before = 0
        # The kernel ends the child with the thread that started it, so this thread lives as long as the actor.
        threading.Thread(target=self._watch, daemon=True).start()

    def take_ports(self, wishes):
        """Chooses the ports for all starts to come, once."""
        with self.lock:
            if self.ports:
                return
            try:
                self.ports, self.reason, self.is_refused = ports.take(self.address, wishes), "", False
            except CannotStart as error:
                self._refuse(error)

    def run(self, spec):
        """Sets what runs. A process that runs already goes on as it is."""
        with self.lock:
            self.spec = spec

    def replace(self, how):
        with self.lock:
            self.replaces = how

    def stop(self):
        """The process finishes what it has, and ends; no other starts."""
        with self.lock:
            self.is_wanted = False

    def look(self):
        with self.lock:
            child = self.child
            return {
                "address": self.address, "ports": dict(child.ports if child else self.ports or {}), "pid": child.process.pid if child else None,
                "version": child.version if child else None, "is_ready": bool(child and child.is_ready), "is_wanted": self.is_wanted,
                "has_ended": not self.is_wanted and not self._alive(), "is_replacing": bool(self.replaces or self.successor),
                "starts": self.starts, "fails": self.fails, "reason": self.reason, "is_refused": self.is_refused,
                "told": self.spec["version"] if self.spec else None,
            }

    def log(self, lines, names=("log.before", "log")):
        """The last lines of the process's log, with those of the process before."""
        text = ""
        for name in names:
            with contextlib.suppress(OSError), open(self.folder / name, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                text += file.read().decode(errors="replace")
        return text.splitlines()[-lines:]

    def remove_folder(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def _alive(self):
        return [child for child in (self.child, self.successor, *self.leaving) if child]

    def _watch(self):
        while True:
            try:
                checked = self._check_ready()
                with self.lock:
                    self._step(checked)
            except Exception:
                self.reason = traceback.format_exc(limit=3)
            time.sleep(LOOKS_EVERY_S)

    def _check_ready(self):
        """Asks the children for their readiness, without the lock: an answer may take time."""
        return {id(child): is_ready(self.address, child.ports["health"]) for child in (self.child, self.successor) if child}

    def _step(self, checked):
        self._reap()
        for child in filter(None, (self.child, self.successor)):
            child.is_ready = checked.get(id(child), False)
            child.was_ready |= child.is_ready
        if self.child and self.child.is_ready:
            self.fails, self.reason, self.is_refused = 0, "", False
        if not self.is_wanted:
            self._end("child")
            self._end("successor")
        elif self.spec:
            self._replace()
            # The old process has the ports, and the device's memory.
            if not self.child and not self.leaving and time.monotonic() >= self.not_before:
                self.child = self._start(self.ports)

    def _replace(self):
        if not self.replaces and not self.successor:
            return
        if not self.child or self.child.version == self.spec["version"]:
            self.replaces = None
        elif self.replaces == "drain":
            self._end("child")
            self.replaces = None
        elif not self.successor:
            self.successor = self._start(None) if time.monotonic() >= self.not_before else None
        elif self.successor.is_ready:
            self._end("child")
            self.child, self.successor, self.replaces = self.successor, None, None

    def _start(self, fixed):
        """Starts a process on these ports, or on any free ones."""
        try:
            program = find_program(self.spec["settings"].program)
            if self.spec["role"] == "backend":
                check_repository(self.spec["settings"])
            own = fixed or ports.take(self.address, dict.fromkeys(KINDS[self.spec["role"]], 0))
        except CannotStart as error:
            self._refuse(error)
            self._pause()
            return None
        arguments = command(program, self.spec, self.address, own, self._secret_file())
        with contextlib.suppress(OSError):
            os.replace(self.folder / "log", self.folder / "log.before")
        # Nothing but the node's own Python: a module of the user's must not replace one of the library.
        launcher = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())]
        environment = {**os.environ, "NO_COLOR": "1", **self.spec["settings"].env}
        with open(self.folder / "log", "wb") as log:
            process = subprocess.Popen([*launcher, *arguments], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                       env=environment, cwd=self.folder, start_new_session=True)
        self.starts += 1
        return Child(process, own, self.spec["version"])

    def _secret_file(self):
        """The secret in a file that this user alone can read."""
        path = self.folder / "secret"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self.spec["secret"] + "\n")
        return str(path)

    def _refuse(self, error):
        self.reason, self.is_refused = str(error), True

    def _pause(self):
        self.not_before = time.monotonic() + min(PAUSES_S[1], PAUSES_S[0] * 2 ** min(self.fails, 20))
        self.fails += 1

    def _end(self, which):
        """Sends SIGTERM. The process finishes its work, and is killed if that takes too long."""
        child = getattr(self, which)
        if child:
            child.process.send_signal(signal.SIGTERM)
            child.kill_at = time.monotonic() + self.spec["settings"].stop_timeout_s
            self.leaving.append(child)
            setattr(self, which, None)

    def _reap(self):
        for child in self.leaving:
            if child.process.poll() is None and time.monotonic() > child.kill_at:
                child.process.kill()
        self.leaving = [child for child in self.leaving if child.process.poll() is None]
        if self.successor and self.successor.process.poll() is not None:
            self._note_end(self.successor)
            self.successor = None
        if self.child and self.child.process.poll() is not None:
            self._note_end(self.child)
            self.child, self.successor = self.successor, None

    def _note_end(self, child):
        status = child.process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self.reason = "\n".join([f"the process {how}", *self.log(10, ("log",))])
        self.fails = 0 if child.was_ready else self.fails
        self._pause()


def is_ready(address, port):
    host = f"[{address}]" if ":" in address else address
    try:
        with NO_PROXY.open(f"http://{host}:{port}/v2/health/ready", timeout=2) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False
