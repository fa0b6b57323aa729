"""The actor that keeps an app as it is wanted."""
import os
import threading
import time
import traceback

import ray

from . import members
from .advice import Advice
from .commands import KINDS, host_port
from .settings import ROLES

LOOKS_EVERY_S = 0.25


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=8)
class Controller:
    """One thread compares the members with what is wanted, and takes the next steps. The methods only say what is wanted.

    Ray starts this actor again after its end. It then finds the members by their names."""

    def __init__(self, settings):
        self.settings, self.lock = settings, threading.Lock()
        self.records, self.wanted, self.is_ending = {}, settings.backends, False
        self.advice, self.error, self.version = Advice(settings), "", None
        found = members.existing(settings.name)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.wanted = sum(name.startswith("backend-") for name in found) or settings.backends
        for name in found:
            role, index = name.rsplit("-", 1)
            self.records[name] = members.make(settings, role, int(index))
        threading.Thread(target=self._work, daemon=True).start()

    def scale(self, backends):
        with self.lock:
            self.wanted = backends

    def end(self):
        with self.lock:
            self.is_ending = True

    def status(self):
        with self.lock:
            return {
                "name": self.settings.name, "controller_pid": os.getpid(), "error": self.error, "is_ending": self.is_ending,
                "backends_wanted": self.wanted,
                "advice": self.advice.last, "schedulers_from": self.settings.store or "the list that each process was started with",
                "members": [self._member_status(record) for record in self._in_order()],
            }

    def log(self, name, lines):
        with self.lock:
            record = self.records.get(name)
        if record is None:
            return None
        return ray.get(record.actor.log.remote(lines), timeout=10)

    def _in_order(self):
        return sorted(self.records.values(), key=lambda record: (ROLES.index(record.role), record.index))

    def _of(self, role, also_leaving=False):
        return [record for record in self._in_order() if record.role == role and (also_leaving or not record.is_leaving)]

    def _member_status(self, record):
        seen = record.seen or {}
        ports, address = seen.get("ports") or {}, seen.get("address")
        state = "leaving" if record.is_leaving else "ready" if record.is_ready else "starting"
        reason = seen.get("reason", "") if record.seen else members.waits_for(self.settings, record)
        return {
            "name": record.name, "role": record.role, "state": state, "reason": "" if record.is_ready else reason,
            "node": seen.get("node"), "pid": seen.get("pid"), "actor_pid": seen.get("actor_pid"),
            "starts": seen.get("starts", 0), "fails": seen.get("fails", 0), "is_refused": seen.get("is_refused", False),
            "is_outdated": bool(seen.get("version")) and record.role != "scheduler" and seen["version"] != self.version,
            **{kind: host_port(address, ports[kind]) for kind in ("http", "grpc", "metrics") if kind in ports},
        }

    def _work(self):
        while True:
            began = time.monotonic()
            try:
                self._tick()
                self.error = ""
            except Exception:
                # Ray itself may be away for a while, as after the loss of a node.
                self.error = traceback.format_exc(limit=4)
            time.sleep(max(0.05, LOOKS_EVERY_S - (time.monotonic() - began)))

    def _tick(self):
        wished = None if self.is_ending else self.advice.ask(self._metrics_addresses(), len(self._of("backend")))
        with self.lock:
            self.wanted = wished or self.wanted
            for record in self.records.values():
                members.look(record)
                record.is_leaving |= bool(record.seen and not record.seen["is_wanted"])
            if self.is_ending:
                self._leave_all()
            else:
                self._have_members()
                self._give_ports()
                self._run()
                self._replace_outdated()
            self._remove_ended()

    def _metrics_addresses(self):
        with self.lock:
            return [self._member_status(record)["metrics"] for record in self._of("scheduler") if record.is_ready]

    def _have_members(self):
        """Makes the members that lack, and sends away the youngest backends that are too many."""
        for role in ("scheduler", "frontend"):
            for index in range(getattr(self.settings, f"{role}s")):
                self._have(role, index)
        backends = self._of("backend")
        for _ in range(self.wanted - len(backends)):
            self._have("backend", 1 + max((record.index for record in self._of("backend", also_leaving=True)), default=-1))
        for record in backends[self.wanted:]:
            self._leave(record)

    def _have(self, role, index):
        name = f"{role}-{index}"
        if name not in self.records:
            self.records[name] = members.make(self.settings, role, index)

    def _leave(self, record):
        record.is_leaving = True
        record.actor.stop.remote()

    def _leave_all(self):
        """Frontends first, since they need the others for their last requests; schedulers last."""
        for role in ("frontend", "backend", "scheduler"):
            left = self._of(role, also_leaving=True)
            for record in left:
                self._leave(record)
            if left:
                return

    def _remove_ended(self):
        for record in list(self.records.values()):
            # A member without a node has no process either.
            if record.is_leaving and (record.seen["has_ended"] if record.seen else True):
                members.remove(record)
                del self.records[record.name]

    def _give_ports(self):
        """Tells schedulers and frontends their ports: those that they had, if they are on the same machine as before."""
        for record in self._of("scheduler") + self._of("frontend"):
            if not record.seen:
                continue
            address = record.seen["address"]
            if record.seen["ports"]:
                record.place = {"address": address, "ports": record.seen["ports"]}
            else:
                had = record.place["ports"] if record.place.get("address") == address else self._wishes(record, address)
                record.actor.take_ports.remote(had)
                # One at a time: the next wish depends on what this member got.
                record.place = {"address": address, "ports": had}

    def _wishes(self, record, address):
        """The ports that the user wants, for one frontend of a machine; any free ones for others."""
        wishes = dict.fromkeys(KINDS[record.role], 0)
        others = [other for other in self._of("frontend") if other is not record and other.place.get("address") == address]
        if record.role == "frontend":
            for kind in ("http", "grpc", "metrics"):
                port = getattr(self.settings, f"{kind}_port")
                wishes[kind] = 0 if any(other.place["ports"].get(kind) == port for other in others) else port
        return wishes

    def _schedulers(self):
        """The addresses of schedulers in the order of their ranks, or None while one never had an address."""
        places = [record.place for record in self._of("scheduler")]
        if not all(place.get("ports", {}).get("listen") for place in places):
            return None
        return [host_port(place["address"], place["ports"]["listen"]) for place in places]

    def _spec(self, record, schedulers):
        """All that a process is started with. Processes whose `version` differs know other schedulers."""
        version = self.settings.store or ",".join(schedulers)
        return {"settings": self.settings, "secret": self.settings.secret, "role": record.role, "name": record.name, "index": record.index,
                "schedulers": schedulers, "version": version}

    def _run(self):
        schedulers = self._schedulers()
        if not schedulers:
            return
        self.version = self._spec(next(iter(self.records.values())), schedulers)["version"]
        for record in self.records.values():
            has_ports = record.role == "backend" or (record.seen and record.seen["ports"])
            if record.seen and has_ports and not record.is_leaving and record.seen["told"] != self.version:
                record.actor.run.remote(self._spec(record, schedulers))

    def _replace_outdated(self):
        """Starts frontends and backends anew that do not know a scheduler's new address: one at a time, while the others serve."""
        for role in ("backend", "frontend"):
            records = self._of(role)
            if any(record.seen and record.seen["is_replacing"] for record in records):
                return
            outdated = [record for record in records if record.is_ready and record.seen["version"] != self.version]
            if outdated and all(record.is_ready for record in records):
                # A frontend's ports are taken until it has ended. A backend that is alone must not leave its models without a device.
                is_alone = role == "backend" and len(records) == 1
                outdated[0].seen["is_replacing"] = True
                outdated[0].actor.replace.remote("overlap" if is_alone else "drain")
                return
