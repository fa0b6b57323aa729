"""Manifests for Kubernetes, the Helm chart, compose.yaml and the Dockerfile: against published schemas, and against the
program."""
import contextlib
import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time

import check_jsonschema
import jsonschema
import kubernetes_validate
import pydantic
import pytest
import requests
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from helm_python import Chart, HelmRenderError, HelmValuesError, lint

from serving import EXAMPLES, ROOT, START_TIMEOUT_S, environment, free_ports

HERE = pathlib.Path(__file__).parent
DEPLOY = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "downbeat"
# The oldest that the chart allows, and the last three.
KUBERNETES = ["1.32", "1.35", "1.36", "1.37"]
FOLDERS = ["base", "gpu", "single"]
# What is set beside the chart's own values.
VALUES = {
    "helm-single": {},
    "helm-single-download": {
        "models": {"url": "s3://models/digits", "secret": "s3"}, "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}},
        "env": [{"name": "AWS_REGION", "value": "eu-central-1"}], "envFrom": [{"secretRef": {"name": "more"}}],
    },
    "helm-single-many": {
        "serve": {"args": ["--slo-ms=digits=50"], "autoscaling": {"enabled": True, "minReplicas": 2}, "nodeSelector": {"pool": "models"}, "affinity": {"nodeAffinity": {}}},
        "gpu": {"enabled": True}, "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "shop"}}}]}, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "image": {"repository": "images/downbeat", "tag": "1", "pullSecrets": [{"name": "registry"}]}, "models": {"claim": {"name": "shared", "create": False}},
    },
    "helm-single-bare": {"serviceAccount": {"create": False}, "networkPolicy": {"enabled": False}, "podMonitor": {"enabled": True}},
    "helm-cluster": {"mode": "cluster"},
    "helm-cluster-gpu": {"mode": "cluster", "gpu": {"enabled": True}},
    "helm-cluster-keda": {
        "mode": "cluster", "backend": {"autoscaling": {"kind": "keda"}}, "gpu": {"enabled": True, "count": 4}, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "config": "[models.digits]\nslo_ms = 50\n", "podAnnotations": {"a": "b"}, "podLabels": {"team": "a"}, "priorityClassName": "high",
        "models": {"claim": {"storageClassName": "nfs", "accessModes": ["ReadWriteMany"], "size": "100Gi"}}, "volumes": [{"name": "more", "emptyDir": {}}], "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "helm-cluster-hpa": {"mode": "cluster", "backend": {"autoscaling": {"kind": "hpa"}}, "podMonitor": {"enabled": True}, "scheduler": {"replicas": 3}, "frontend": {"autoscaling": {"enabled": False}, "replicas": 3}},
}
SETS = [*FOLDERS, *VALUES]
# What one means in the other: the chart's values, and the folder for kustomize.
SAME = [("helm-single", "single"), ("helm-cluster", "base"), ("helm-cluster-gpu", "gpu")]
ROLES = ["frontend", "scheduler", "backend", "serve"]
# The flags of the ports of HTTP, gRPC and metrics, by the port's name. `--help` has their defaults,
# and those of the cluster's ports.
OWN_PORTS = {"http": "--http-port", "grpc": "--grpc-port", "metrics": "--metrics-port"}


def of_kustomize(folder):
    """The text of the objects that `kubectl apply -k` would apply."""
    kubectl = pathlib.Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", DEPLOY / folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_helm(values, name="downbeat"):
    """The text of the objects that `helm install` would apply, and the notes that it would print."""
    files = Chart.load(CHART).render(values, name=name, namespace="models")
    notes, = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    return "\n---\n".join(text for path, text in files.items() if path.endswith(".yaml")), notes


@functools.cache
def text_of(name):
    return of_helm(VALUES[name])[0] if name in VALUES else of_kustomize(name)


def rendered(name):
    """The objects of a folder for kustomize, or of the chart with some values."""
    return [document for document in yaml.safe_load_all(text_of(name)) if document]


def of_file(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


# Objects of others, by the models of Python packages.
MODELS = {"ScaledObject": ScaledObject, "PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule}


@functools.cache
def check_text(text, version):
    document = json.loads(text)
    if document["apiVersion"].partition("/")[0] in ("keda.sh", "monitoring.coreos.com"):
        MODELS[document["kind"]].model_validate(document, extra="forbid")
    else:
        kubernetes_validate.validate(document, version, strict=True)


def check_schema(document, version):
    """Checks an object, whose unknown fields are errors. The same object of another set is not checked again."""
    check_text(json.dumps(document, sort_keys=True), version)


def check_kserve(documents):
    """Checks objects of KServe, in a process of its own."""
    return subprocess.run([sys.executable, HERE / "kserve_schema.py"], input=json.dumps(documents), capture_output=True, text=True, timeout=120)


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
    return re.search(rf"{flag} <.*?\[default: (.*?)\]\n", text, re.DOTALL).group(1)


def cluster_port(text, role):
    return int(re.search({"scheduler": r"port (\d+) of --host", "frontend": r"frontend: port (\d+)"}[role], default(text, "--listen")).group(1))


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", SETS)
def test_all_that_is_rendered_follows_the_published_schemas(name, version):
    documents = rendered(name)
    assert workloads(documents)
    for document in documents:
        check_schema(document, version)


def test_an_unknown_field_fails_in_each_schema():
    objects = {document["kind"]: document for name in SETS for document in rendered(name)} | {"PodMonitor": of_file(DEPLOY / "monitor" / "podmonitor.yaml")[0]}
    assert {"Deployment", "StatefulSet", "Service", "PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "HorizontalPodAutoscaler", *MODELS} <= set(objects)
    for kind, document in objects.items():
        check_schema(document, KUBERNETES[-1])
        place = "data" if kind == "ConfigMap" else "metadata" if kind == "ServiceAccount" else "spec"
        wrong = document | {place: document[place] | {"unknownField": {}}}
        with pytest.raises((pydantic.ValidationError, kubernetes_validate.ValidationError)):
            check_schema(wrong, KUBERNETES[-1])


def test_each_file_follows_its_schema_and_is_used():
    patches, rules = {DEPLOY / "gpu" / "backend.yaml"}, DEPLOY / "autoscale" / "rules.yaml"
    for path in sorted(DEPLOY.rglob("*.yaml")):
        if path.name == "kustomization.yaml" or path in patches or path == rules or path.parent.name == "kserve":
            continue
        for document in of_file(path):
            check_schema(document, KUBERNETES[0])
    for folder in FOLDERS:
        said = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())
        named = {*said["resources"], *(patch["path"] for patch in said.get("patches", []))}
        assert {path.name for path in (DEPLOY / folder).glob("*.yaml")} - {"kustomization.yaml"} == named - {"../base"}, folder


def test_objects_for_kserve_follow_its_models():
    runtimes, services = of_file(DEPLOY / "kserve" / "runtime.yaml"), of_file(DEPLOY / "kserve" / "digits.yaml")
    assert runtimes == [document for document in yaml.safe_load_all(of_kustomize("kserve")) if document]
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
    for runtime in of_file(DEPLOY / "kserve" / "runtime.yaml"):
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
            assert port.split(":")[1] in [default(helps[arguments[0]], flag) for flag in OWN_PORTS.values()], port
    assert sorted(roles) == ["backend", "backend", "frontend", "scheduler", "scheduler"]
    assert ranks == [0, 1]
    assert compose["secrets"] == {"cluster": {"file": "./secret/cluster"}}
    port = cluster_port(helps["scheduler"], "scheduler")
    assert lists == {f"scheduler-0:{port},scheduler-1:{port}"} and {"scheduler-0", "scheduler-1"} <= set(compose["services"])


@pytest.mark.parametrize("name", SETS)
def test_commands_ports_and_ends_are_those_of_the_program(name, helps):
    for workload in workloads(rendered(name)):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        role, text = its["args"][0], helps[its["args"][0]]
        models = VALUES.get(name, {}).get("models", {}).get("url", "/models")
        check_command(its["args"], helps, [variable["name"] for variable in its.get("env", [])], models)
        assert pod["enableServiceLinks"] is False, "variables of services would be read as options"
        own = {name: int(default(text, flag)) for name, flag in OWN_PORTS.items() if f"{flag}=off" not in its["args"]}
        peers = {"scheduler": "schedulers", "frontend": "backends"}
        own |= {peers[role]: cluster_port(text, role)} if role in peers else {}
        own["health"], = [int(argument.partition("=")[2]) for argument in its["args"] if argument.startswith("--health-port=")]
        assert {port["name"]: port["containerPort"] for port in its["ports"]} == own, role
        if role != "scheduler":
            assert pod["terminationGracePeriodSeconds"] > int(default(text, "--drain-timeout")), role


@pytest.mark.parametrize("name", SETS)
def test_pods_may_do_nothing_more_than_they_need(name):
    for workload in workloads(rendered(name)):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        assert its["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert its["resources"]["requests"] and its["resources"]["limits"]["memory"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in its["volumeMounts"]:
            assert mount["name"] in volumes
            assert mount.get("readOnly") or "emptyDir" in volumes[mount["name"]], mount


@pytest.mark.parametrize("name", SETS)
def test_selectors_find_their_pods_and_drains_end(name):
    documents = rendered(name)
    pods = {workload["metadata"]["name"]: workload for workload in workloads(documents)}
    # By autoscalers: fewest pods.
    fewest = {pod: workload["spec"].get("replicas", 1) for pod, workload in pods.items()}
    scalers = [document for document in documents if document["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    for scaler in scalers:
        target, spec = scaler["spec"]["scaleTargetRef"]["name"], scaler["spec"]
        assert "replicas" not in pods[target]["spec"], f"applying {target} would set back what its autoscaler has set"
        fewest[target] = spec["minReplicas"] if "minReplicas" in spec else spec["minReplicaCount"]
    for scaler in [document for one in ("hpa", "keda") if name in ("base", "gpu") for document in of_file(DEPLOY / "autoscale" / f"{one}.yaml")]:
        assert scaler["spec"]["scaleTargetRef"]["name"] in pods

    def matched(labels):
        found = [name for name, pod in pods.items() if labels.items() <= pod["spec"]["template"]["metadata"]["labels"].items()]
        assert len(found) == 1, (labels, found)
        return found[0]

    guarded, closed, monitored = set(), set(), False
    for document in documents:
        own, kind, spec = document["metadata"]["name"], document["kind"], document.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            assert matched(spec["selector"]["matchLabels"]) == own
        if kind == "StatefulSet":
            assert any(d["kind"] == "Service" and d["metadata"]["name"] == spec["serviceName"] and d["spec"]["clusterIP"] == "None" for d in documents)
        if kind == "Service":
            ports = {port["name"]: port["containerPort"] for port in container(pods[matched(spec["selector"])])["ports"]}
            assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"]), own
        if kind == "NetworkPolicy":
            ports = {port["name"] for port in container(pods[matched(spec["podSelector"]["matchLabels"])])["ports"]}
            closed |= {matched(spec["podSelector"]["matchLabels"])}
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == ports, own
            for peer in [peer for rule in spec["ingress"] for peer in rule.get("from", []) if "podSelector" in peer]:
                assert all(peer["podSelector"]["matchLabels"].items() <= pod["spec"]["template"]["metadata"]["labels"].items() for pod in pods.values()), own
        if kind == "PodMonitor":
            monitored = True
            assert all(spec["selector"]["matchLabels"].items() <= pod["spec"]["template"]["metadata"]["labels"].items() for pod in pods.values())
            assert all(endpoint["port"] in [port["name"] for port in container(pod)["ports"]] for pod in pods.values() for endpoint in spec["podMetricsEndpoints"])
        if kind == "PodDisruptionBudget":
            guarded.add(target := matched(spec["selector"]["matchLabels"]))
            assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
            assert isinstance(spec["maxUnavailable"], int) and 1 <= spec["maxUnavailable"] < fewest[target], f"{own}: a drain blocks, or takes all"
    assert guarded == {pod for pod in pods if fewest[pod] > 1}, "one process of its own has nothing to be kept by"
    assert closed == (set() if name in ("single", "helm-single-bare") else set(pods)), "who may reach the others' ports?"
    for workload in pods.values():
        scraped = workload["spec"]["template"]["metadata"].get("annotations", {}).get("prometheus.io/scrape")
        assert scraped == (None if monitored else "true")


@pytest.mark.parametrize("set_name", [name for name in SETS if "single" not in name])
def test_all_are_told_the_schedulers_that_there_are(set_name, helps):
    documents = workloads(rendered(set_name))
    schedulers, = [workload for workload in documents if workload["kind"] == "StatefulSet"]
    name, service, port = schedulers["metadata"]["name"], schedulers["spec"]["serviceName"], cluster_port(helps["scheduler"], "scheduler")
    wanted = ",".join(f"{name}-{rank}.{service}:{port}" for rank in range(schedulers["spec"]["replicas"]))
    assert schedulers["spec"]["replicas"] >= 2
    for workload in documents:
        assert f"--schedulers={wanted}" in container(workload)["args"], workload["metadata"]["name"]
    gpus = [container(workload)["resources"]["limits"].get("nvidia.com/gpu") for workload in documents if container(workload)["args"][0] == "backend"]
    assert gpus == [VALUES.get(set_name, {"gpu": {"count": 1}}).get("gpu", {"count": None}).get("count", 1) if set_name != "base" else None]


@pytest.mark.parametrize("name", SETS)
def test_all_of_a_cluster_prove_one_secret(name):
    """The secret is the user's: no manifest has it. The file is for the pod's own group alone."""
    documents = rendered(name)
    assert not [document for document in documents if document["kind"] == "Secret"]
    names = set()
    for workload in workloads(documents):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        mounts = [mount for mount in its["volumeMounts"] if mount["name"] == "cluster"]
        given = [argument for argument in its["args"] if argument.startswith("--cluster-secret")]
        if its["args"][0] == "serve":
            assert not mounts and not given
            continue
        volume, = [volume for volume in pod["volumes"] if volume["name"] == "cluster"]
        assert given == ["--cluster-secret=/cluster/secret"] and mounts == [{"name": "cluster", "mountPath": "/cluster", "readOnly": True}]
        assert volume["secret"]["defaultMode"] == 0o440 and pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        names.add(volume["secret"]["secretName"])
    assert names <= {"downbeat-cluster"}
    if name.startswith("helm-cluster"):
        text, notes = of_helm(VALUES[name] | {"clusterSecret": "mine"}, "shop")
        assert text.count("secretName: mine") == 3 and "create secret generic mine " in notes
        assert "create secret generic shop-downbeat-cluster " in of_helm(VALUES[name], "shop")[1]


def test_all_listen_where_others_reach_them(helps):
    """The default is the loopback interface, which only the container itself reaches."""
    assert default(helps["serve"], "--host") == "127.0.0.1"
    commands = [service["command"] for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()]
    commands += [container(workload)["args"] for name in SETS for workload in workloads(rendered(name))]
    commands += [runtime["spec"]["containers"][0]["args"] for runtime in of_file(DEPLOY / "kserve" / "runtime.yaml")]
    assert len(commands) > 8
    for command in commands:
        assert "--host=0.0.0.0" in command, command
    assert "DOWNBEAT_HOST=0.0.0.0" in (ROOT / "Dockerfile").read_text() and "[env: DOWNBEAT_HOST=]" in helps["serve"]


def test_nothing_names_the_host_of_a_registry():
    images = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    images += [service["image"] for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()]
    images += [container(workload)["image"] for name in SETS if name != "helm-single-many" for workload in workloads(rendered(name))]
    images += [runtime["spec"]["containers"][0]["image"] for runtime in of_file(DEPLOY / "kserve" / "runtime.yaml")]
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


def kept(documents):
    """What a folder and the chart must agree on: all but names, labels and selectors."""
    found = {}
    for document in documents:
        kind, spec = document["kind"], document.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            its, pod = container(document), spec["template"]["spec"]
            role = its["args"][0]
            found[role] = {key: its[key] for key in ("args", "ports", "startupProbe", "livenessProbe", "readinessProbe", "securityContext", "resources", "volumeMounts", "image")}
            found[role] |= {key: pod.get(key) for key in ("securityContext", "enableServiceLinks", "automountServiceAccountToken", "terminationGracePeriodSeconds", "volumes", "tolerations")}
            found[role] |= {"env": its.get("env"), "replicas": spec.get("replicas"), "annotations": spec["template"]["metadata"]["annotations"]}
        elif kind in ("Service", "PersistentVolumeClaim", "HorizontalPodAutoscaler", "PodDisruptionBudget"):
            spec = {key: value for key, value in spec.items() if key not in ("selector", "type")}
            found[kind, document["metadata"]["name"]] = spec
    return found


@pytest.mark.parametrize(("values", "folder"), SAME)
def test_the_chart_and_kustomize_say_the_same(values, folder):
    assert kept(rendered(values)) == kept(rendered(folder))


def test_the_chart_has_no_fault_by_helms_own_lint():
    for values in VALUES.values():
        report = lint(CHART, values, strict=True)
        assert not report["errors"] and not [message for message in report["messages"] if message["severity"] >= 2], report


@pytest.mark.parametrize(("values", "said"), [
    ({"mode": "both"}, "mode"), ({"replicas": 2}, "replicas"), ({"serve": {"replica": 2}}, "replica"), ({"serve": {"replicas": 0}}, "replicas"),
    ({"models": {"url": "ftp://host/model"}}, "url"), ({"models": {"claim": {"size": "much"}}}, "size"), ({"gpu": {"count": "2"}}, "count"),
    ({"serve": {"args": ["slo-ms=50"]}}, "args"), ({"backend": {"autoscaling": {"kind": "vpa"}}}, "kind"), ({"podMonitor": {"interval": "15"}}, "interval"),
    ({"mode": "cluster", "models": {"url": "s3://models"}}, "models.claim"),
])
def test_values_that_cannot_be_meant_are_refused(values, said):
    with pytest.raises((HelmValuesError, HelmRenderError), match=said):
        of_helm(values)


def test_the_schema_has_each_value_and_no_other():
    whole = json.loads((CHART / "values.schema.json").read_text())

    def compare(values, schema, place):
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if values and isinstance(values, dict) and "properties" in schema:
            assert schema["additionalProperties"] is False, place
            assert set(values) == set(schema["properties"]) - {"global"}, place
            for key, value in values.items():
                compare(value, schema["properties"][key], f"{place}.{key}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), whole, "values")


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("release", ["downbeat", "shop"])
def test_the_notes_name_objects_that_there_are(name, release):
    text, notes = of_helm(VALUES[name], release)
    there = {f"{document['kind'].lower()}/{document['metadata']['name']}" for document in yaml.safe_load_all(text) if document}
    named = set(re.findall(r"(?:deployment|service)/[\w-]+", notes))
    assert len(named) > 1 and named <= there, notes
    assert "\n\n\n" not in notes and "{{" not in notes


def test_two_releases_in_a_namespace_do_not_meet():
    texts = [of_helm(VALUES["helm-cluster"], release)[0] for release in ("one", "two")]
    names, labels = [], []
    for text in texts:
        documents = [document for document in yaml.safe_load_all(text) if document]
        names.append({(document["kind"], document["metadata"]["name"]) for document in documents})
        labels.append([workload["spec"]["selector"]["matchLabels"] for workload in workloads(documents)])
        for workload in workloads(documents):
            schedulers, = [argument for argument in container(workload)["args"] if argument.startswith("--schedulers=")]
            assert schedulers.partition("=")[2].startswith(f"{'one' if text is texts[0] else 'two'}-downbeat-scheduler-0.")
    assert not names[0] & names[1] and not [label for label in labels[0] if label in labels[1]]


def test_all_name_the_version_of_the_program():
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    images = {container(workload)["image"] for name in SETS if name != "helm-single-many" for workload in workloads(rendered(name))}
    images |= {runtime["spec"]["containers"][0]["image"] for runtime in of_file(DEPLOY / "kserve" / "runtime.yaml")}
    assert images == {f"downbeat:{version}", f"downbeat:{version}-cuda"}


def test_the_charts_autoscaler_asks_what_the_folders_does():
    def query(text):
        return text.replace('namespace="models",', "")

    expected, = [rule["expr"] for group in yaml.safe_load((DEPLOY / "autoscale/rules.yaml").read_text())["groups"] for rule in group["rules"]]
    scaled, = [document["spec"] for document in rendered("helm-cluster-keda") if document["kind"] == "ScaledObject"]
    theirs, = of_file(DEPLOY / "autoscale" / "keda.yaml")
    assert query(scaled["triggers"][0]["metadata"]["query"]) == expected
    # A pod has four devices there.
    assert scaled["triggers"][0]["metadata"]["threshold"] == "4"
    assert {key: value for key, value in scaled.items() if key != "triggers"} == {key: value for key, value in theirs["spec"].items() if key != "triggers"}
    rule, = [document for document in rendered("helm-cluster-hpa") if document["kind"] == "PrometheusRule"]
    assert query(rule["spec"]["groups"][0]["rules"][0]["expr"]) == expected
    hpa, = [document["spec"] for document in rendered("helm-cluster-hpa") if document["kind"] == "HorizontalPodAutoscaler"]
    assert hpa == of_file(DEPLOY / "autoscale" / "hpa.yaml")[0]["spec"]


def test_a_secret_reaches_only_the_pods_that_run_models():
    workload, = workloads(rendered("helm-single-download"))
    its = container(workload)
    assert its["args"][-2:] == ["--model-cache=/models", "s3://models/digits"]
    # The ports open after the download.
    assert its["startupProbe"]["failureThreshold"] * its["startupProbe"]["periodSeconds"] == 1800
    assert its["envFrom"] == [{"secretRef": {"name": "s3"}}, {"secretRef": {"name": "more"}}] and its["env"][0]["name"] == "AWS_REGION"
    claims = [document for document in rendered("helm-single-download") if document["kind"] == "PersistentVolumeClaim"]
    assert not claims
    documents = [document for document in yaml.safe_load_all(of_helm({"mode": "cluster", "models": {"secret": "s3"}})[0]) if document]
    assert {container(workload)["args"][0]: "envFrom" in container(workload) for workload in workloads(documents)} == {"frontend": False, "scheduler": False, "backend": True}


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool on the path (Debian: prometheus)")
def test_prometheus_itself_evaluates_the_rules(tmp_path):
    """The leader's number counts, and nothing is said while no scheduler has one. One device more than ten is more than a tenth more: 12."""
    chart, = [document["spec"] for document in rendered("helm-cluster-hpa") if document["kind"] == "PrometheusRule"]
    (tmp_path / "folder.yaml").write_text((DEPLOY / "autoscale" / "rules.yaml").read_text())
    (tmp_path / "chart.yaml").write_text(yaml.safe_dump(chart))
    advice = {"downbeat-scheduler-0": "NaN NaN 5 5 11 14 8", "downbeat-scheduler-1": "NaN NaN NaN NaN NaN NaN NaN", "downbeat-backend-abc": "9 9 9 9 99 99 99"}
    devices = {"downbeat-scheduler-0": "0 0 4 4 10 10 10", "downbeat-scheduler-1": "0 0 0 0 0 0 0", "downbeat-backend-abc": "1 1 1 1 1 1 1"}
    wanted = {"15s": [], **{at: [{"labels": "downbeat:devices_wanted", "value": value}] for at, value in {"45s": 5, "60s": 12, "75s": 14, "90s": 8}.items()}}
    for rules in ("folder.yaml", "chart.yaml"):
        case = {
            "interval": "15s",
            "input_series": [{"series": f'{name}{{namespace="models",pod="{pod}"}}', "values": values}
                             for name, series in {"downbeat_autoscale_devices": advice, "downbeat_devices": devices}.items() for pod, values in series.items()],
            "promql_expr_test": [{"expr": "downbeat:devices_wanted", "eval_time": at, "exp_samples": samples} for at, samples in wanted.items()],
        }
        (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "15s", "tests": [case]}))
        done = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_serves_with_its_own_arguments(binary, tmp_path):
    """A scheduler, a backend and a frontend on the loopback interface, all else as in the manifests; each probe is answered."""
    schedulers, ports, running = free_ports(1)[0], {}, []
    logs = {}
    secret = tmp_path / "cluster.secret"
    subprocess.run([binary, "key", "secret", secret], check=True, capture_output=True, timeout=60)
    with contextlib.ExitStack() as stack:
        for workload in workloads(rendered("base")):
            its = container(workload)
            role, (http, metrics, health, listen) = its["args"][0], free_ports(4)
            ports[role] = http, health
            kept = [argument for argument in its["args"][1:] if argument.startswith("--") and not argument.startswith(("--host=", "--schedulers=", "--cluster-secret=", "--grpc-port=", "--health-port="))]
            command = [binary, role, *kept, f"--schedulers=127.0.0.1:{schedulers}", f"--cluster-secret={secret}", "--host=127.0.0.1", f"--http-port={http}", "--grpc-port=off",
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
