"""The command line of each role."""
import os
import shutil
import sys

KINDS = {"scheduler": ("http", "metrics", "health", "listen"), "frontend": ("http", "grpc", "metrics", "health", "listen"), "backend": ("http", "metrics", "health")}


class CannotStart(Exception):
    """A reason for which a process of this role cannot start on this node. A person has to do something."""


def find_program(given=None):
    """The program `downbeat`: the given one, that of DOWNBEAT_BIN, that of the wheel beside the interpreter, or one on the path."""
    for source, path in (("deploy(program=...)", given), ("DOWNBEAT_BIN", os.environ.get("DOWNBEAT_BIN"))):
        if path:
            if not (os.path.isfile(path) and os.access(path, os.X_OK)):
                raise CannotStart(f"there is no program at {path}, which {source} names")
            return path
    beside = os.path.join(os.path.dirname(sys.executable), "downbeat")
    found = beside if os.access(beside, os.X_OK) else shutil.which("downbeat")
    if not found:
        raise CannotStart(f"the program downbeat is missing: it is not at {beside} and not on the path. Install it on each node: "
                          "pip install 'downbeat-server[ray]'")
    return found


def check_repository(settings):
    """A local path has to be on the node of each backend."""
    for source in settings.repository:
        path = source.split("=", 1)[-1]
        if "://" not in source and not (os.path.exists(source) or os.path.exists(path)):
            raise CannotStart(f"there is no {source}: a local model repository has to be on each node that a backend may run on. "
                              "Mount it there, or give an address such as s3://bucket/models")


def gives(args, flag):
    return any(arg == flag or arg.startswith(f"{flag}=") for arg in args)


def command(program, spec, address, ports, secret_file):
    """The arguments of a process. `spec`: see `Controller._spec`; `address`: the node's IP address."""
    settings, role = spec["settings"], spec["role"]
    own = getattr(settings, f"{role}_args")
    flags = ["--host", address, "--node-name", spec["name"], "--cluster-secret", secret_file,
             "--http-port", str(ports["http"]), "--metrics-port", str(ports["metrics"]), "--health-port", str(ports["health"]),
             "--grpc-port", str(ports.get("grpc", "off"))]
    if settings.store:
        flags += ["--etcd", settings.store, "--etcd-prefix", f"downbeat-ray-{settings.name}"]
    else:
        flags += ["--schedulers", ",".join(spec["schedulers"])]
    if role == "scheduler" and not settings.store:
        flags += ["--rank", str(spec["index"])]
    if "listen" in ports:
        flags += ["--listen", host_port(address, ports["listen"])]
    if role == "frontend":
        flags += ["--advertise", host_port(address, ports["listen"])]
    return [program, role, *flags, *own, *(models(settings) if role == "backend" else ())]


def models(settings):
    """The backend's devices, threads and models."""
    flags, own = [], settings.backend_args
    if settings.gpus_per_backend and not gives(own, "--engine"):
        flags += ["--engine", "cuda"]
    if not settings.gpus_per_backend and not gives(own, "--devices"):
        flags += ["--devices", "1"]
    if settings.cpus_per_backend >= 1 and not gives(own, "--threads"):
        flags += ["--threads", str(int(settings.cpus_per_backend))]
    return [*flags, *settings.repository]


def host_port(address, port):
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
