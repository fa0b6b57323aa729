"""The objects of the Helm chart, rendered by Helm itself, and the program's own account of its options."""
import functools
import json
import re

import yaml
from helm_python import Chart

from serving import ROOT

CHART = ROOT / "deploy" / "helm" / "downbeat"


def of_helm(values, name="downbeat"):
    """The text of the objects that `helm install` would apply, and the notes that it would print."""
    files = Chart.load(CHART).render(values, name=name, namespace="models")
    notes, = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    return "\n---\n".join(text for path, text in files.items() if path.endswith(".yaml")), notes


@functools.cache
def _text(values):
    return of_helm(json.loads(values))[0]


def objects(values):
    """The objects of the chart with these values."""
    return [document for document in yaml.safe_load_all(_text(json.dumps(values))) if document]


def workloads(documents):
    return [document for document in documents if document["kind"] in ("Deployment", "StatefulSet")]


def container(workload):
    one, = workload["spec"]["template"]["spec"]["containers"]
    return one


def role_of(workload):
    return container(workload)["args"][0]


def check_command(arguments, helps, variables=(), models="/models"):
    """Checks that the role has all flags and variables, and that each flag has its value in the
    same argument."""
    role, *rest = arguments
    assert role in helps, f"there is no role {role}"
    known = set(re.findall(r"^\s+(?:-\w, )?(--[a-z0-9-]+)", helps[role], re.MULTILINE))
    flags = [argument.partition("=")[0] for argument in rest if argument.startswith("-")]
    assert set(flags) <= known, (role, set(flags) - known)
    for name in variables:
        assert not name.startswith("DOWNBEAT_") or f"[env: {name}=]" in helps[role], (role, name)
    places = [argument for argument in rest if not argument.startswith("-")]
    assert places == ([models] if role in ("backend", "serve") else []), arguments
    for argument in rest:
        if argument.startswith("--devices="):
            assert int(argument.partition("=")[2]) == 1, "autoscaling counts pods as devices"


def default(text, flag):
    """The default of a flag, by the `--help` of a role."""
    return re.search(rf"{flag} <.*?\[default: (.*?)\]\n", text, re.DOTALL).group(1)


def cluster_port(text, role):
    """The port at which a role listens for the rest of the cluster, by its `--help`."""
    return int(re.search({"scheduler": r"port (\d+) of --host", "frontend": r"frontend: port (\d+)"}[role], default(text, "--listen")).group(1))
