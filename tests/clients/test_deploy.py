"""Objects for KServe, compose.yaml and the Dockerfile: against published schemas, and against the program."""
import json
import pathlib
import re
import subprocess
import sys

import check_jsonschema
import jsonschema
import yaml

from chart import check_command, cluster_port, default
from serving import ROOT

HERE = pathlib.Path(__file__).parent
KSERVE = ROOT / "deploy" / "kubernetes" / "kserve"
# The flags of the ports of HTTP, gRPC and metrics. `--help` has their defaults.
OWN_PORTS = ["--http-port", "--grpc-port", "--metrics-port"]


def of_file(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def check_kserve(documents):
    """Checks objects of KServe, in a process of its own."""
    return subprocess.run([sys.executable, HERE / "kserve_schema.py"], input=json.dumps(documents), capture_output=True, text=True, timeout=120)


def test_objects_for_kserve_follow_its_models():
    runtimes, services = of_file(KSERVE / "runtime.yaml"), of_file(KSERVE / "digits.yaml")
    # What `kubectl apply -k` applies.
    assert of_file(KSERVE / "kustomization.yaml")[0]["resources"] == ["runtime.yaml"]
    done = check_kserve(runtimes + services)
    assert done.returncode == 0, done.stderr
    wrong = runtimes[0] | {"spec": runtimes[0]["spec"] | {"multimodel": False}}
    assert "has no ['multimodel']" in check_kserve([wrong]).stderr
    for service in services:
        model = service["spec"]["predictor"]["model"]
        chosen, = [runtime["spec"] for runtime in runtimes if runtime["metadata"]["name"] == model["runtime"]]
        assert model["modelFormat"] in [{key: form[key] for key in ("name", "version")} for form in chosen["supportedModelFormats"]]
        assert model["protocolVersion"] in chosen["protocolVersions"]


def test_runtimes_for_kserve_are_those_of_the_program(helps):
    for runtime in of_file(KSERVE / "runtime.yaml"):
        spec = runtime["spec"]
        its, = spec["containers"]
        named = runtime["metadata"]["name"] == "downbeat"
        assert its["name"] == "kserve-container", "KServe looks for this name"
        check_command(its["args"], helps, models="{{.Name}}=/mnt/models" if named else "/mnt/models")
        assert {"--host=0.0.0.0", "--http-port=8080", "--grpc-port=9000"} <= set(its["args"]) and "ports" not in its
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert its[probe]["httpGet"]["port"] == 8080, "Knative probes no other port"
        assert spec["annotations"] == {"prometheus.kserve.io/port": default(helps["serve"], "--metrics-port"), "prometheus.kserve.io/path": "/metrics"}
        guarded = its["securityContext"]
        assert guarded["runAsNonRoot"] and guarded["readOnlyRootFilesystem"] and not guarded["allowPrivilegeEscalation"] and guarded["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in its["volumeMounts"]} == {volume["name"] for volume in spec["volumes"] if volume["emptyDir"] == {}}
        # KServe refuses a runtime whose priority for a format another one has: Triton's has 1.
        chosen = [form for form in spec["supportedModelFormats"] if form.get("autoSelect")]
        assert [form["priority"] for form in chosen] == ([2] if named else [])


def test_compose_follows_its_specification(helps):
    schema = json.loads((next(pathlib.Path(check_jsonschema.__file__).parent.rglob("compose-spec.json"))).read_text())
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    jsonschema.validate(compose, schema)
    roles, ranks, lists = [], [], set()
    for name, service in compose["services"].items():
        arguments = service["command"]
        check_command(arguments, helps)
        roles.append(arguments[0])
        ranks += [int(argument.partition("=")[2]) for argument in arguments if argument.startswith("--rank=")]
        lists |= {argument.partition("=")[2] for argument in arguments if argument.startswith("--schedulers=")}
        seconds = re.fullmatch(r"(\d+)s", service["stop_grace_period"]).group(1)
        assert int(seconds) > int(default(helps[arguments[0]], "--drain-timeout")), name
        assert service["secrets"] == ["cluster"] and "--cluster-secret=/run/secrets/cluster" in arguments, name
        for volume in service.get("volumes", []):
            assert (ROOT / volume.split(":")[0]).is_dir() and volume.endswith(":/models:ro"), volume
        for port in service.get("ports", []):
            assert port.split(":")[1] in [default(helps[arguments[0]], flag) for flag in OWN_PORTS], port
    assert sorted(roles) == ["backend", "backend", "frontend", "scheduler", "scheduler"]
    assert ranks == [0, 1]
    assert compose["secrets"] == {"cluster": {"file": "./secret/cluster"}}
    port = cluster_port(helps["scheduler"], "scheduler")
    assert lists == {f"scheduler-0:{port},scheduler-1:{port}"} and {"scheduler-0", "scheduler-1"} <= set(compose["services"])


def commands():
    """The arguments of all processes of compose.yaml and of KServe's runtimes."""
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return [service["command"] for service in compose["services"].values()] + [runtime["spec"]["containers"][0]["args"] for runtime in of_file(KSERVE / "runtime.yaml")]


def test_all_listen_where_others_reach_them(helps):
    """The default is the loopback interface, which only the container itself reaches."""
    assert default(helps["serve"], "--host") == "127.0.0.1"
    for command in commands():
        assert "--host=0.0.0.0" in command, command
    assert "DOWNBEAT_HOST=0.0.0.0" in (ROOT / "Dockerfile").read_text() and "[env: DOWNBEAT_HOST=]" in helps["serve"]


def test_images_are_of_this_version_and_of_no_registry():
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
    images = {service["image"] for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()}
    images |= {runtime["spec"]["containers"][0]["image"] for runtime in of_file(KSERVE / "runtime.yaml")}
    assert images == {f"downbeat:{version}"}
    for image in re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        # `scratch` is no image: docker builds its stage from nothing.
        assert image == "scratch" or re.fullmatch(r"[a-z]+:[\w.-]+", image), image
