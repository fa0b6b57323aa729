"""Manifests for Kubernetes, compose.yaml and the Dockerfile: against published schemas, and against the program."""
import contextlib
import json
import pathlib
import re
import subprocess
import sys
import time

import check_jsonschema
import jsonschema
import kubernetes_validate
import pytest
import requests
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject

from serving import EXAMPLES, ROOT, START_TIMEOUT_S, environment, free_ports

DEPLOY = ROOT / "deploy" / "kubernetes"
KUBERNETES = "1.37"
FOLDERS = ["base", "gpu", "single"]
ROLES = ["frontend", "scheduler", "backend", "serve"]
# The flags of the ports of HTTP, gRPC and metrics, by the port's name. `--help` has their defaults,
# and those of the cluster's ports.
OWN_PORTS = {"http": "--http-port", "grpc": "--grpc-port", "metrics": "--metrics-port"}


def rendered(folder):
    """The objects that `kubectl apply -k` would apply."""
    kubectl = pathlib.Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", DEPLOY / folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_file(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def strict(schema):
    """The same schema, by which an unknown field is an error."""
    if isinstance(schema, dict):
        schema = {key: strict(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
    elif isinstance(schema, list):
        schema = [strict(value) for value in schema]
    return schema


def check_schema(document):
    if document["apiVersion"].startswith("keda.sh/"):
        assert document["kind"] == "ScaledObject", document["kind"]
        jsonschema.validate(document, strict(ScaledObject.model_json_schema(by_alias=True)))
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def workloads(documents):
    return [document for document in documents if document["kind"] in ("Deployment", "StatefulSet")]


def container(workload):
    one, = workload["spec"]["template"]["spec"]["containers"]
    return one


@pytest.fixture(scope="module")
def helps(binary):
    """The `--help` of each role."""
    texts = {}
    for role in ROLES:
        done = subprocess.run([binary, role, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"there is no `downbeat {role}`: {done.stderr}"
        texts[role] = done.stdout
    return texts


def check_command(arguments, helps, variables=()):
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
    assert places == (["/models"] if role in ("backend", "serve") else []), arguments
    for argument in rest:
        if argument.startswith("--devices="):
            assert int(argument.partition("=")[2]) == 1, "autoscaling counts pods as devices"


def default(text, flag):
    return re.search(rf"{flag} <.*?\[default: (.*?)\]\n", text, re.DOTALL).group(1)


def cluster_port(text, role):
    return int(re.search({"scheduler": r"port (\d+) of --host", "frontend": r"frontend: port (\d+)"}[role], default(text, "--listen")).group(1))


@pytest.mark.parametrize("folder", FOLDERS)
def test_rendered_folders_follow_the_published_schemas(folder):
    documents = rendered(folder)
    assert workloads(documents)
    for document in documents:
        check_schema(document)


def test_each_file_follows_its_schema_and_is_used():
    patches, rules = {DEPLOY / "gpu" / "backend.yaml"}, DEPLOY / "autoscale" / "rules.yaml"
    for path in sorted(DEPLOY.rglob("*.yaml")):
        if path.name == "kustomization.yaml" or path in patches or path == rules:
            continue
        for document in of_file(path):
            check_schema(document)
    for folder in FOLDERS:
        said = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())
        named = {*said["resources"], *(patch["path"] for patch in said.get("patches", []))}
        assert {path.name for path in (DEPLOY / folder).glob("*.yaml")} - {"kustomization.yaml"} == named - {"../base"}, folder


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
        for volume in service.get("volumes", []):
            assert (ROOT / volume.split(":")[0]).is_dir() and volume.endswith(":/models:ro"), volume
        for port in service.get("ports", []):
            assert port.split(":")[1] in [default(helps[arguments[0]], flag) for flag in OWN_PORTS.values()], port
    assert sorted(roles) == ["backend", "backend", "frontend", "scheduler", "scheduler"]
    assert ranks == [0, 1]
    port = cluster_port(helps["scheduler"], "scheduler")
    assert lists == {f"scheduler-0:{port},scheduler-1:{port}"} and {"scheduler-0", "scheduler-1"} <= set(compose["services"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_commands_ports_and_ends_are_those_of_the_program(folder, helps):
    for workload in workloads(rendered(folder)):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        role, text = its["args"][0], helps[its["args"][0]]
        check_command(its["args"], helps, [variable["name"] for variable in its.get("env", [])])
        assert pod["enableServiceLinks"] is False, "variables of services would be read as options"
        own = {name: int(default(text, flag)) for name, flag in OWN_PORTS.items() if f"{flag}=off" not in its["args"]}
        peers = {"scheduler": "schedulers", "frontend": "backends"}
        own |= {peers[role]: cluster_port(text, role)} if role in peers else {}
        own["health"], = [int(argument.partition("=")[2]) for argument in its["args"] if argument.startswith("--health-port=")]
        assert {port["name"]: port["containerPort"] for port in its["ports"]} == own, role
        if role != "scheduler":
            assert pod["terminationGracePeriodSeconds"] > int(default(text, "--drain-timeout")), role


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_may_do_nothing_more_than_they_need(folder):
    for workload in workloads(rendered(folder)):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        assert its["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert its["resources"]["requests"] and its["resources"]["limits"]["memory"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in its["volumeMounts"]:
            assert mount["name"] in volumes
            assert mount.get("readOnly") or "emptyDir" in volumes[mount["name"]], mount


@pytest.mark.parametrize("folder", FOLDERS)
def test_selectors_find_their_pods_and_drains_end(folder):
    documents = rendered(folder)
    pods = {workload["metadata"]["name"]: workload for workload in workloads(documents)}
    # By autoscalers: fewest pods.
    fewest = {name: workload["spec"].get("replicas", 1) for name, workload in pods.items()}
    scalers = [document for document in documents if document["kind"] == "HorizontalPodAutoscaler"]
    for scaler in scalers + [document for name in ("hpa", "keda") if folder != "single" for document in of_file(DEPLOY / "autoscale" / f"{name}.yaml")]:
        assert scaler["spec"]["scaleTargetRef"]["name"] in pods
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]["name"]
        assert "replicas" not in pods[target]["spec"], f"applying {target} would set back what its autoscaler has set"
        fewest[target] = scaler["spec"]["minReplicas"]

    def matched(labels):
        found = [name for name, pod in pods.items() if labels.items() <= pod["spec"]["template"]["metadata"]["labels"].items()]
        assert len(found) == 1, (labels, found)
        return found[0]

    guarded = set()
    for document in documents:
        name, kind, spec = document["metadata"]["name"], document["kind"], document.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            assert matched(spec["selector"]["matchLabels"]) == name
        if kind == "StatefulSet":
            assert any(d["kind"] == "Service" and d["metadata"]["name"] == spec["serviceName"] and d["spec"]["clusterIP"] == "None" for d in documents)
        if kind == "Service":
            ports = {port["name"]: port["containerPort"] for port in container(pods[matched(spec["selector"])])["ports"]}
            assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"]), name
        if kind == "NetworkPolicy":
            ports = {port["name"] for port in container(pods[matched(spec["podSelector"]["matchLabels"])])["ports"]}
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports, name
        if kind == "PodDisruptionBudget":
            guarded.add(target := matched(spec["selector"]["matchLabels"]))
            assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
            assert isinstance(spec["maxUnavailable"], int) and 1 <= spec["maxUnavailable"] < fewest[target], f"{name}: a drain blocks, or takes all"
    assert guarded == (set(pods) if folder != "single" else set()), "one process of its own has nothing to be kept by"


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_all_are_told_the_schedulers_that_there_are(folder, helps):
    documents = workloads(rendered(folder))
    schedulers, = [workload for workload in documents if workload["kind"] == "StatefulSet"]
    name, service, port = schedulers["metadata"]["name"], schedulers["spec"]["serviceName"], cluster_port(helps["scheduler"], "scheduler")
    wanted = ",".join(f"{name}-{rank}.{service}:{port}" for rank in range(schedulers["spec"]["replicas"]))
    assert schedulers["spec"]["replicas"] >= 2
    for workload in documents:
        assert f"--schedulers={wanted}" in container(workload)["args"], workload["metadata"]["name"]
    gpus = [container(workload)["resources"]["limits"].get("nvidia.com/gpu") for workload in documents if container(workload)["args"][0] == "backend"]
    assert gpus == [1 if folder == "gpu" else None]


def test_all_listen_where_others_reach_them(helps):
    """The default is the loopback interface, which only the container itself reaches."""
    assert default(helps["serve"], "--host") == "127.0.0.1"
    commands = [service["command"] for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()]
    commands += [container(workload)["args"] for folder in FOLDERS for workload in workloads(rendered(folder))]
    assert len(commands) > 8
    for command in commands:
        assert "--host=0.0.0.0" in command, command
    assert "DOWNBEAT_HOST=0.0.0.0" in (ROOT / "Dockerfile").read_text() and "[env: DOWNBEAT_HOST=]" in helps["serve"]


def test_nothing_names_the_host_of_a_registry():
    images = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    images += [service["image"] for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()]
    images += [container(workload)["image"] for folder in FOLDERS for workload in workloads(rendered(folder))]
    assert len(images) > 8
    for image in images:
        # `scratch` is no image: docker builds its stage from nothing.
        assert image == "scratch" or "/" not in image and re.fullmatch(r"[a-z]+:[\w.-]+", image), image


def test_autoscalers_read_recorded_rules_of_known_metrics():
    rules = [rule for group in yaml.safe_load((DEPLOY / "autoscale/rules.yaml").read_text())["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules}
    used = {name for rule in rules for name in re.findall(r"\b(?:downbeat|nv)[_:][a-z_:]+", re.sub(r'"[^"]*"', "", rule["expr"]))}
    scaled, = of_file(DEPLOY / "autoscale" / "keda.yaml")
    hpa, = of_file(DEPLOY / "autoscale" / "hpa.yaml")
    trigger, = scaled["spec"]["triggers"]
    metric, = hpa["spec"]["metrics"]
    assert trigger["metadata"]["query"] in {rule["expr"] for rule in rules} and trigger["metricType"] == "AverageValue" and trigger["metadata"]["threshold"] == "1"
    assert metric["external"]["metric"]["name"].replace("_", ":", 1) in recorded and metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    source = "".join(path.read_text() for path in (ROOT / "crates").glob("*/src/**/*.rs"))
    for name in used - recorded:
        assert f'"{name}"' in source, name


def test_the_base_serves_with_its_own_arguments(binary, tmp_path):
    """A scheduler, a backend and a frontend on the loopback interface, all else as in the manifests; each probe is answered."""
    schedulers, ports, running = free_ports(1)[0], {}, []
    logs = {}
    with contextlib.ExitStack() as stack:
        for workload in workloads(rendered("base")):
            its = container(workload)
            role, (http, metrics, health, listen) = its["args"][0], free_ports(4)
            ports[role] = http, health
            kept = [argument for argument in its["args"][1:] if argument.startswith("--") and not argument.startswith(("--host=", "--schedulers=", "--grpc-port=", "--health-port="))]
            command = [binary, role, *kept, f"--schedulers=127.0.0.1:{schedulers}", "--host=127.0.0.1", f"--http-port={http}", "--grpc-port=off",
                       f"--metrics-port={metrics}", f"--health-port={health}", f"--listen=127.0.0.1:{schedulers if role == 'scheduler' else listen}"]
            command += [str(EXAMPLES / "models")] if "/models" in its["args"] else []
            env = environment(tmp_path, "rten") | {variable["name"]: "0" for variable in its.get("env", [])}
            logs[role] = tmp_path / f"{role}.log"
            process = subprocess.Popen(command, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=stack.enter_context(open(logs[role], "wb")), stderr=subprocess.STDOUT)
            running.append((role, process, its))
            stack.callback(process.wait)
            stack.callback(process.kill)

        def said():
            return "\n".join(f"{role}: {path.read_text()}" for role, path in logs.items())

        def wait(role, process, port, path):
            until = time.monotonic() + START_TIMEOUT_S
            while True:
                assert process.poll() is None and time.monotonic() < until, f"{role}, {path}:\n{said()}"
                with contextlib.suppress(requests.ConnectionError):
                    if requests.get(f"http://127.0.0.1:{port}{path}", timeout=10).status_code == 200:
                        return
                time.sleep(0.05)

        for role, process, its in running:
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert its[kind]["httpGet"]["port"] == "health"
                wait(role, process, ports[role][1], its[kind]["httpGet"]["path"])
        # A frontend is ready with the first model that it hears of.
        frontend, = [process for role, process, _ in running if role == "frontend"]
        wait("frontend", frontend, ports["frontend"][0], "/v2/models/digits/ready")
        answer = requests.post(f"http://127.0.0.1:{ports['frontend'][0]}/v2/models/digits/infer", data=(EXAMPLES / "digit.json").read_bytes(), timeout=60)
        assert answer.status_code == 200 and answer.json()["outputs"], answer.text
        for role, process, _ in sorted(running, key=lambda one: ["frontend", "backend", "scheduler"].index(one[0])):
            process.terminate()
            assert process.wait(60) == 0, f"{role}:\n{said()}"
