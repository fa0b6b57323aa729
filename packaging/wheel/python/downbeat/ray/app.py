"""An app on Ray, as its user sees it."""
import contextlib
import secrets
import time

import ray

from .controller import Controller
from .members import NAMESPACE, actor_name
from .settings import Settings, whole

# A process that ended so often without being ready will not become ready.
MOST_FAILS = 4
CONTROLLER = "controller"


class DeployError(Exception):
    """The app did not become ready. The text names the process that lacks, the reason, and the end of its log."""


def deploy(repository, *, ready_timeout_s=300, wait_for_nodes=False, **settings):
    """Starts the roles of a cluster on Ray, waits until all are ready, and returns the `App`.

    `repository`: a folder that is on each node, an address such as s3://bucket/models, or a list of both.
    `wait_for_nodes`: wait for nodes that Ray's autoscaler adds, instead of refusing what no present node can hold.
    Other arguments: see `Settings`, and docs/guide/ray.md. Raises ValueError for a wrong argument, and DeployError."""
    settings = Settings(repository, secret=secrets.token_hex(32), **settings)
    _init()
    if not wait_for_nodes:
        _check_nodes(settings)
    name = actor_name(settings.name, CONTROLLER)
    try:
        controller = Controller.options(name=name, namespace=NAMESPACE, lifetime="detached").remote(settings)
        ray.get(controller.status.remote())
    except ValueError as error:
        raise DeployError(f"an app named {settings.name!r} runs already: use downbeat.ray.connect({settings.name!r}), shut it down, or give deploy(name=...)") from error
    app = App(settings.name, controller)
    try:
        app.wait_ready(ready_timeout_s)
    except BaseException:
        app.shutdown()
        raise
    return app


def connect(name="downbeat"):
    """The app of this name that runs on the Ray cluster."""
    _init("auto")
    try:
        return App(name, ray.get_actor(actor_name(name, CONTROLLER), namespace=NAMESPACE))
    except ValueError as error:
        raise LookupError(f"no app named {name!r} runs on this Ray cluster; running: {', '.join(running()) or 'none'}") from error


def running():
    """The names of all apps on the Ray cluster."""
    _init("auto")
    suffix = actor_name("", CONTROLLER)
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"][: -len(suffix)] for actor in found if actor["namespace"] == NAMESPACE and actor["name"].endswith(suffix))


class App:
    """A running app. It goes on when the program that made this object ends."""

    def __init__(self, name, controller):
        self.name, self._controller = name, controller

    def status(self):
        """What runs where, as a dictionary: `state`, `addresses`, `advice`, and `members` with state, reason, node and addresses."""
        found = ray.get(self._controller.status.remote(), timeout=60)
        found["addresses"] = [member["http"] for member in found["members"] if member["role"] == "frontend" and member["state"] == "ready"]
        found["state"] = _state(found)
        return found

    @property
    def addresses(self):
        """HOST:PORT of each frontend that is ready, for HTTP."""
        return self.status()["addresses"]

    @property
    def address(self):
        """HOST:PORT of the first frontend that is ready, for HTTP."""
        addresses = self.addresses
        if not addresses:
            raise LookupError(f"no frontend of {self.name!r} is ready now")
        return addresses[0]

    @property
    def grpc_addresses(self):
        """HOST:PORT of each frontend that is ready, for gRPC."""
        return [member["grpc"] for member in self.status()["members"] if member["role"] == "frontend" and member["state"] == "ready"]

    def log(self, member, lines=50):
        """The last lines of the log of a member, such as `backend-0`."""
        found = ray.get(self._controller.log.remote(member, lines), timeout=60)
        if found is None:
            raise LookupError(f"there is no {member!r} in {self.name!r}; see status()")
        return "\n".join(found)

    def scale(self, *, backends, timeout_s=300):
        """Sets the number of backends, and waits until they are ready and those that are too many have finished their work."""
        whole("backends", backends, 1)
        ray.get(self._controller.scale.remote(backends), timeout=60)
        self.wait_ready(timeout_s, gives_up=False)

    def wait_ready(self, timeout_s=300, gives_up=True):
        """Waits until each process that should run is ready. Raises DeployError at the limit; with `gives_up` also once a process of a new
        app cannot start. In an app that ran before, such a reason may pass: a port is in use while the process before finishes its work."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status["state"] == "ready":
                return
            hopeless = [member for member in status["members"] if gives_up and (member["is_refused"] or member["fails"] >= MOST_FAILS)]
            if hopeless or time.monotonic() > deadline:
                raise DeployError(self._why(status, hopeless, timeout_s))
            time.sleep(0.2)

    def shutdown(self):
        """Ends the app: frontends finish their requests, then backends and schedulers end."""
        ray.get(self._controller.end.remote(), timeout=60)
        while self.status()["members"]:
            time.sleep(0.2)
        for role in ("frontends", "schedulers"):
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(actor_name(self.name, role)))
        ray.kill(self._controller)

    def _why(self, status, hopeless, timeout_s):
        lacking = hopeless or [member for member in status["members"] if member["state"] != "ready"]
        text = f"{self.name!r} is not ready" + ("" if hopeless else f" after {timeout_s:g} s")
        for member in lacking:
            text += f"\n{member['name']}: {member['reason'] or member['state']}"
        return text + (f"\n{status['error']}" if status["error"] else "")


def _state(found):
    if found["is_ending"]:
        return "ending"
    states = ["outdated" if member["is_outdated"] else member["state"] for member in found["members"]]
    backends = sum(member["role"] == "backend" for member in found["members"])
    all_there = {member["role"] for member in found["members"]} == {"scheduler", "frontend", "backend"}
    return "ready" if all_there and backends == found["backends_wanted"] and set(states) == {"ready"} else "changing"


def _init(address=None):
    """Connects to the Ray cluster. Without an address Ray starts one on this machine if none runs."""
    if not ray.is_initialized():
        ray.init(address, namespace=NAMESPACE, log_to_driver=False)


def _check_nodes(settings):
    """Refuses what no node of the Ray cluster could ever hold."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for role in ("scheduler", "frontend", "backend"):
        bundle = settings.bundle(role)
        if not any(all(node.get(kind, 0) >= amount for kind, amount in bundle.items()) for node in nodes):
            most = ", ".join(f"at most {max(node.get(kind, 0) for node in nodes):g} {kind}" for kind in bundle)
            needs = " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
            raise DeployError(f"a {role} needs {needs}, and the {len(nodes)} nodes of the Ray cluster have {most} each. Add such a node, "
                              f"lower *_per_{role}, or give wait_for_nodes=True if Ray's autoscaler adds nodes")
