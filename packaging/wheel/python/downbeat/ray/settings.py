"""The settings of an app, as `deploy` takes them."""
import dataclasses
import os
import re

# Downbeat allows as many schedulers in a cluster.
MOST_SCHEDULERS = 64
ROLES = ("scheduler", "backend", "frontend")
# Flags that `deploy` gives itself, and the argument that stands for the flag.
OWN_FLAGS = {
    "--host": None, "--schedulers": "schedulers", "--rank": None, "--etcd": "store", "--etcd-prefix": "name", "--cluster-secret": None,
    "--listen": None, "--advertise": None, "--node-name": None, "--health-port": None, "--http-port": "http_port",
    "--grpc-port": "grpc_port", "--metrics-port": "metrics_port", "--insecure-cluster": None,
}


@dataclasses.dataclass
class Settings:
    """What an app is made of. `secret` is not in its text, so that no log has the secret."""

    repository: list
    name: str = "downbeat"
    frontends: int = 1
    schedulers: int = 2
    backends: int = 1
    gpus_per_backend: float = 0
    cpus_per_backend: float = 1
    cpus_per_frontend: float = 1
    cpus_per_scheduler: float = 1
    min_backends: int = None
    max_backends: int = None
    scale_every_s: float = 15
    scale_down_after_s: float = 120
    store: str = None
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    backend_args: list = ()
    frontend_args: list = ()
    scheduler_args: list = ()
    env: dict = dataclasses.field(default_factory=dict, repr=False)
    program: str = None
    stop_timeout_s: float = 40
    secret: str = dataclasses.field(default="", repr=False)

    def __post_init__(self):
        sources = [self.repository] if isinstance(self.repository, (str, os.PathLike)) else list(self.repository)
        self.repository = [source_address(os.fspath(source)) for source in sources]
        self._check_counts()
        self._check_ports()
        for role in ROLES:
            check_args(role, getattr(self, f"{role}_args"))
            setattr(self, f"{role}_args", [str(arg) for arg in getattr(self, f"{role}_args")])
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", self.name):
            raise ValueError(f"the name {self.name!r} is not valid: take letters, digits, '-', '_' and '.', 63 at most")

    def _check_counts(self):
        if not self.repository:
            raise ValueError("deploy needs a model repository, such as deploy('/models')")
        for field in ("frontends", "schedulers", "backends"):
            whole(field, getattr(self, field), 1)
        if self.schedulers > MOST_SCHEDULERS:
            raise ValueError(f"schedulers is {self.schedulers}; a cluster has at most {MOST_SCHEDULERS}")
        for field in ("gpus_per_backend", "cpus_per_backend", "cpus_per_frontend", "cpus_per_scheduler"):
            number(field, getattr(self, field))
        if self.gpus_per_backend > 1 and self.gpus_per_backend != int(self.gpus_per_backend):
            raise ValueError(f"gpus_per_backend is {self.gpus_per_backend}: more than one GPU is a whole number, as in Ray")
        for field in ("scale_every_s", "scale_down_after_s", "stop_timeout_s"):
            number(field, getattr(self, field))
        if self.max_backends is None and self.min_backends is not None:
            raise ValueError("min_backends needs max_backends: both together switch autoscaling on")
        if self.max_backends is not None:
            self.min_backends = 1 if self.min_backends is None else self.min_backends
            whole("min_backends", self.min_backends, 1)
            whole("max_backends", self.max_backends, self.min_backends)
            self.backends = max(self.min_backends, min(self.max_backends, self.backends))

    def _check_ports(self):
        for field in ("http_port", "grpc_port", "metrics_port"):
            whole(field, getattr(self, field), 0)
            if getattr(self, field) > 65535:
                raise ValueError(f"{field} is {getattr(self, field)}; a port is at most 65535, and 0 is any free port")

    @property
    def devices_per_backend(self):
        """The number of devices of one backend, in the scheduler's count."""
        return max(1, int(self.gpus_per_backend))

    def bundle(self, role):
        """What Ray reserves for one process of a role."""
        bundle = {"CPU": getattr(self, f"cpus_per_{role}")}
        if role == "backend":
            bundle["GPU"] = self.gpus_per_backend
        # Ray refuses a bundle without resources.
        return {kind: amount for kind, amount in bundle.items() if amount} or {"CPU": 0.01}


def source_address(source):
    """A path from the root, or an address such as s3://bucket/models as it is."""
    if not source:
        raise ValueError("the model repository is an empty text: give a folder, or an address such as s3://bucket/models")
    return source if "://" in source else os.path.abspath(source)


def whole(field, value, least):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field} is {value!r}; it has to be a whole number, at least {least}")


def number(field, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError(f"{field} is {value!r}; it has to be a number, at least 0")


def check_args(role, args):
    if isinstance(args, str):
        raise ValueError(f"{role}_args is one text: give a list, such as ['--log-level', 'debug']")
    for arg in args:
        flag = str(arg).split("=")[0]
        if flag in OWN_FLAGS:
            instead = OWN_FLAGS[flag]
            raise ValueError(f"{role}_args has {flag}, which deploy gives itself" + (f": use deploy({instead}=...)" if instead else ""))
