"""The Helm chart, rendered by Helm itself with several sets of values: its objects against the published schemas of four
versions of Kubernetes, and against the program."""
import contextlib
import functools
import json
import re
import shutil
import subprocess
import time

import kubernetes_validate
import pydantic
import pytest
import requests
import yaml
from cloudcoil.models.cert_manager.v1 import Certificate
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from helm_python import HelmRenderError, HelmValuesError, lint

from authority import Authority
from chart import CHART, check_command, cluster_port, container, default, objects, of_helm, role_of, workloads
from serving import EXAMPLES, ROOT, START_TIMEOUT_S, environment, free_ports

# The oldest that the chart allows, and the last three.
KUBERNETES = ["1.32", "1.35", "1.36", "1.37"]
GUIDE = ROOT / "docs" / "guide" / "kubernetes.md"
# Everything of a cluster at once.
ALL = {
    "mode": "cluster", "subClusters": 2, "apiKeys": {"secret": "keys"},
    "etcd": {"endpoints": ["https://etcd-0.etcd:2379", "https://etcd-1.etcd:2379"], "caSecret": "etcd-ca", "certificateSecret": "etcd-client", "user": "downbeat", "passwordSecret": "etcd-login"},
    "tls": {"issuer": {"name": "ours", "kind": "ClusterIssuer"}, "clientCaSecret": "downbeat-tls"},
    "podMonitor": {
        "enabled": True, "labels": {"release": "prometheus"}, "authorization": {"credentials": {"name": "scraper", "key": "key"}},
        "tlsConfig": {"ca": {"secret": {"name": "downbeat-tls", "key": "ca.crt"}}, "cert": {"secret": {"name": "scraper", "key": "tls.crt"}}, "keySecret": {"name": "scraper", "key": "tls.key"}, "serverName": "downbeat-frontend"},
    },
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "shop"}}}], "monitors": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "backend": {"autoscaling": {"kind": "keda"}}, "gpu": {"enabled": True, "count": 4}, "config": "[models.digits]\nslo_ms = 50\n",
    "podAnnotations": {"a": "b"}, "podLabels": {"team": "a"}, "priorityClassName": "high", "scheduler": {"replicas": 3},
    "models": {"claim": {"storageClassName": "nfs", "accessModes": ["ReadWriteMany"], "size": "100Gi"}}, "volumes": [{"name": "more", "emptyDir": {}}], "volumeMounts": [{"name": "more", "mountPath": "/more"}],
}
# What is set beside the chart's own values.
VALUES = {
    "single": {},
    "single-download": {
        "models": {"url": "s3://models/digits", "secret": "s3"}, "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}},
        "env": [{"name": "AWS_REGION", "value": "eu-central-1"}], "envFrom": [{"secretRef": {"name": "more"}}],
    },
    "single-many": {
        "serve": {"args": ["--slo-ms=digits=50"], "autoscaling": {"enabled": True, "minReplicas": 2}, "nodeSelector": {"pool": "models"}, "affinity": {"nodeAffinity": {}}},
        "gpu": {"enabled": True}, "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "shop"}}}]}, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "image": {"repository": "images/downbeat", "tag": "1", "pullSecrets": [{"name": "registry"}]}, "models": {"claim": {"name": "shared", "create": False}},
    },
    "single-tls": {"tls": {"issuer": {"name": "ours"}, "dnsNames": ["models.example.com"]}, "podMonitor": {"enabled": True}},
    "single-bare": {"serviceAccount": {"create": False}, "networkPolicy": {"enabled": False}, "podMonitor": {"enabled": True}},
    "cluster": {"mode": "cluster"},
    "cluster-gpu": {"mode": "cluster", "gpu": {"enabled": True}},
    "cluster-tls": {"mode": "cluster", "tls": {"secret": "mine", "clientCaSecret": "roots"}, "etcd": {"endpoints": ["http://etcd:2379"], "prefix": "a"}},
    "cluster-hpa": {"mode": "cluster", "backend": {"autoscaling": {"kind": "hpa"}}, "podMonitor": {"enabled": True}, "scheduler": {"replicas": 3}, "frontend": {"autoscaling": {"enabled": False}, "replicas": 3}},
    "cluster-all": ALL,
}
CLUSTERS = [name for name in VALUES if name.startswith("cluster")]
# The flags of the ports of HTTP, gRPC and metrics, by the port's name. `--help` has their defaults,
# and those of the cluster's ports.
OWN_PORTS = {"http": "--http-port", "grpc": "--grpc-port", "metrics": "--metrics-port"}
# Objects of others, by the models of Python packages.
MODELS = {"ScaledObject": ScaledObject, "PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule, "Certificate": Certificate}


def rendered(name):
    return objects(VALUES[name])


def of_kind(documents, kind):
    return [document for document in documents if document["kind"] == kind]


@functools.cache
def check_text(text, version):
    document = json.loads(text)
    if document["kind"] in MODELS:
        MODELS[document["kind"]].model_validate(document, extra="forbid")
    else:
        kubernetes_validate.validate(document, version, strict=True)


def check_schema(document, version):
    """Checks an object, whose unknown fields are errors. The same object of another set is not checked again."""
    check_text(json.dumps(document, sort_keys=True), version)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", VALUES)
def test_all_that_is_rendered_follows_the_published_schemas(name, version):
    documents = rendered(name)
    assert workloads(documents)
    for document in documents:
        check_schema(document, version)


def test_an_unknown_field_fails_in_each_schema():
    found = {document["kind"]: document for name in VALUES for document in rendered(name)}
    assert {"Deployment", "StatefulSet", "Service", "PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "HorizontalPodAutoscaler", *MODELS} <= set(found)
    for kind, document in found.items():
        check_schema(document, KUBERNETES[-1])
        place = "data" if kind == "ConfigMap" else "metadata" if kind == "ServiceAccount" else "spec"
        wrong = document | {place: document[place] | {"unknownField": {}}}
        with pytest.raises((pydantic.ValidationError, kubernetes_validate.ValidationError)):
            check_schema(wrong, KUBERNETES[-1])


@pytest.mark.parametrize("name", VALUES)
def test_commands_ports_and_ends_are_those_of_the_program(name, helps):
    for workload in workloads(rendered(name)):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        role, text = role_of(workload), helps[role_of(workload)]
        models = VALUES[name].get("models", {}).get("url", "/models")
        check_command(its["args"], helps, [variable["name"] for variable in its.get("env", [])], models)
        assert pod["enableServiceLinks"] is False, "variables of services would be read as options"
        assert "--host=0.0.0.0" in its["args"], "the default is the loopback interface"
        own = {name: int(default(text, flag)) for name, flag in OWN_PORTS.items() if f"{flag}=off" not in its["args"]}
        peers = {"scheduler": "schedulers", "frontend": "backends"}
        own |= {peers[role]: cluster_port(text, role)} if role in peers else {}
        own["health"], = [int(argument.partition("=")[2]) for argument in its["args"] if argument.startswith("--health-port=")]
        assert {port["name"]: port["containerPort"] for port in its["ports"]} == own, role
        if role != "scheduler":
            assert pod["terminationGracePeriodSeconds"] > int(default(text, "--drain-timeout")), role


def files_of(workload):
    """The files and folders that the container finds, by their paths. Secrets whose keys are the user's are folders."""
    volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
    for mount in container(workload)["volumeMounts"]:
        volume, path = volumes[mount["name"]], mount["mountPath"]
        yield path
        for source in volume.get("projected", {}).get("sources", []):
            yield from (f"{path}/{item['path']}" for item in source["secret"]["items"])
        if "configMap" in volume:
            yield f"{path}/downbeat.toml"


@pytest.mark.parametrize("name", VALUES)
def test_each_file_of_a_command_is_mounted(name):
    for workload in workloads(rendered(name)):
        files = list(files_of(workload))
        for argument in container(workload)["args"]:
            flag, _, path = argument.rpartition("=")
            if path.startswith("/"):
                # The keys of these two Secrets are in the chart's values.
                path = {"/cluster/secret": "/cluster", "/keys/keys.toml": "/keys"}.get(path, path)
                assert path in files, (flag, path)


@pytest.mark.parametrize("name", VALUES)
def test_pods_may_do_nothing_more_than_they_need(name):
    for workload in workloads(rendered(name)):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        assert pod["automountServiceAccountToken"] is False
        assert its["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert its["resources"]["requests"] and its["resources"]["limits"]["memory"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            secret = volume.get("secret", volume.get("projected"))
            assert secret is None or secret["defaultMode"] == 0o440, volume
        for mount in its["volumeMounts"]:
            assert mount["name"] in volumes
            assert mount.get("readOnly") or "emptyDir" in volumes[mount["name"]], mount


@pytest.mark.parametrize("name", VALUES)
def test_selectors_find_their_pods_and_drains_end(name):
    documents = rendered(name)
    pods = {workload["metadata"]["name"]: workload for workload in workloads(documents)}
    # By autoscalers: fewest pods.
    fewest = {pod: workload["spec"].get("replicas", 1) for pod, workload in pods.items()}
    for scaler in of_kind(documents, "HorizontalPodAutoscaler") + of_kind(documents, "ScaledObject"):
        target, spec = scaler["spec"]["scaleTargetRef"]["name"], scaler["spec"]
        assert "replicas" not in pods[target]["spec"], f"applying {target} would set back what its autoscaler has set"
        fewest[target] = spec["minReplicas"] if "minReplicas" in spec else spec["minReplicaCount"]

    def labels_of(pod):
        return pods[pod]["spec"]["template"]["metadata"]["labels"].items()

    def matched(labels):
        found = [pod for pod in pods if labels.items() <= labels_of(pod)]
        assert len(found) == 1, (labels, found)
        return found[0]

    guarded, monitored = set(), bool(of_kind(documents, "PodMonitor"))
    for document in documents:
        own, kind, spec = document["metadata"]["name"], document["kind"], document.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            assert matched(spec["selector"]["matchLabels"]) == own
        if kind == "StatefulSet":
            assert any(service["metadata"]["name"] == spec["serviceName"] and service["spec"]["clusterIP"] == "None" for service in of_kind(documents, "Service"))
        if kind == "Service":
            ports = {port["name"]: port["containerPort"] for port in container(pods[matched(spec["selector"])])["ports"]}
            assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"]), own
        if kind == "PodMonitor":
            assert all(spec["selector"]["matchLabels"].items() <= labels_of(pod) for pod in pods)
            assert all(endpoint["port"] in [port["name"] for port in container(pod)["ports"]] for pod in pods.values() for endpoint in spec["podMetricsEndpoints"])
        if kind == "PodDisruptionBudget":
            guarded.add(target := matched(spec["selector"]["matchLabels"]))
            assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
            assert isinstance(spec["maxUnavailable"], int) and 1 <= spec["maxUnavailable"] < fewest[target], f"{own}: a drain blocks, or takes all"
    assert guarded == {pod for pod in pods if fewest[pod] > 1}, "one process of its own has nothing to be kept by"
    for workload in pods.values():
        annotations = workload["spec"]["template"]["metadata"].get("annotations", {})
        has_tls = any(argument.startswith("--tls-certificate=") for argument in container(workload)["args"])
        scraped = None if monitored else "true"
        assert (annotations.get("prometheus.io/scrape"), annotations.get("prometheus.io/scheme")) == (scraped, "https" if scraped and has_tls else None)


def reached(name):
    """By role: which peers reach which port. A peer is `*`, the list of the values, or a role."""
    documents = rendered(name)
    pods = {role_of(workload): workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(documents)}
    known = {json.dumps(peers): key for key, peers in VALUES[name].get("networkPolicy", {}).items() if key != "enabled"}
    found = {}
    for policy in of_kind(documents, "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        role, = [role for role, labels in pods.items() if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()]
        ports = found.setdefault(role, {})
        for rule in policy["spec"]["ingress"]:
            peers = rule.get("from")
            if peers is None:
                who = {"*"}
            elif json.dumps(peers) in known:
                who = {known[json.dumps(peers)]}
            else:
                (selector,) = [peer["podSelector"] for peer in peers]
                (expression,) = selector["matchExpressions"]
                assert expression["operator"] == "In"
                who = {role for role, labels in pods.items() if selector["matchLabels"].items() <= labels.items() and labels[expression["key"]] in expression["values"]}
            for port in rule["ports"]:
                ports.setdefault(port["port"], set()).update(who)
    return found


def test_ports_are_open_to_those_who_need_them():
    everyone, roles = {"*"}, {"frontend", "scheduler", "backend"}
    assert reached("single-bare") == {}
    assert reached("single") == {"serve": dict.fromkeys(["health", "metrics", "http", "grpc"], everyone)}
    assert reached("single-many") == {"serve": {"health": everyone, "metrics": everyone, "http": {"clients"}, "grpc": {"clients"}}}
    own = {"schedulers": roles}, {"backends": {"backend"}}, {"http": roles}
    assert reached("cluster") == {
        "scheduler": {"health": everyone, "metrics": everyone, "http": everyone, **own[0]},
        "frontend": {"health": everyone, "metrics": everyone, "http": everyone, "grpc": everyone, **own[1]},
        "backend": {"health": everyone, "metrics": everyone, **own[2]},
    }
    assert reached("cluster-all") == {
        "scheduler": {"health": everyone, "metrics": {"monitors"}, "http": {"monitors"}, **own[0]},
        "frontend": {"health": everyone, "metrics": {"monitors"}, "http": {"clients"}, "grpc": {"clients"}, **own[1]},
        "backend": {"health": everyone, "metrics": {"monitors"}, **own[2]},
    }
    for name in VALUES:
        opened = {role_of(workload): {port["name"] for port in container(workload)["ports"]} for workload in workloads(rendered(name))}
        assert name == "single-bare" or {role: set(ports) for role, ports in reached(name).items()} == opened


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_are_told_the_schedulers_that_there_are(name, helps):
    """By a list of all replicas, or by an etcd, where a scheduler takes the lowest free rank."""
    documents, etcd = workloads(rendered(name)), VALUES[name].get("etcd")
    schedulers, = [workload for workload in documents if workload["kind"] == "StatefulSet"]
    own, service, port = schedulers["metadata"]["name"], schedulers["spec"]["serviceName"], cluster_port(helps["scheduler"], "scheduler")
    assert schedulers["spec"]["replicas"] >= 2
    wanted = {"--schedulers=" + ",".join(f"{own}-{rank}.{service}:{port}" for rank in range(schedulers["spec"]["replicas"]))}
    if etcd:
        wanted = {"--etcd=" + ",".join(etcd["endpoints"]), f"--etcd-prefix={etcd.get('prefix', 'models/downbeat')}"}
    for workload in documents:
        given = container(workload)["args"]
        assert wanted == {argument for argument in given if argument.startswith(("--schedulers=", "--etcd=", "--etcd-prefix="))}, role_of(workload)
        assert (["DOWNBEAT_RANK"] if workload is schedulers and not etcd else []) == [variable["name"] for variable in container(workload).get("env", [])]
    gpu = VALUES[name].get("gpu")
    gpus = [container(workload)["resources"]["limits"].get("nvidia.com/gpu") for workload in documents if role_of(workload) == "backend"]
    assert gpus == [gpu.get("count", 1) if gpu else None]


def test_sub_clusters_are_the_schedulers_to_fill():
    given = {role_of(workload): container(workload)["args"] for workload in workloads(rendered("cluster-all"))}
    assert "--sub-clusters=2" in given["scheduler"] and "--model-control-mode=explicit" in given["backend"]
    for name in CLUSTERS:
        flags = " ".join(argument for workload in workloads(rendered(name)) for argument in container(workload)["args"])
        assert ("sub-clusters" in flags, "model-control-mode" in flags) == (("subClusters" in VALUES[name],) * 2)


@pytest.mark.parametrize("name", VALUES)
def test_all_of_a_cluster_prove_one_secret(name):
    """The secret is the user's: no object has it."""
    documents = rendered(name)
    assert not of_kind(documents, "Secret")
    for workload in workloads(documents):
        its, pod = container(workload), workload["spec"]["template"]["spec"]
        secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if volume["name"] == "cluster"]
        given = [argument for argument in its["args"] if argument.startswith("--cluster-secret")]
        in_cluster = its["args"][0] != "serve"
        assert (secrets, given) == ((["downbeat-cluster"], ["--cluster-secret=/cluster/secret"]) if in_cluster else ([], []))
    if name in CLUSTERS:
        text, notes = of_helm(VALUES[name] | {"clusterSecret": "mine-too"}, "shop")
        assert text.count("secretName: mine-too") == 3 and "create secret generic mine-too " in notes
        assert "create secret generic shop-downbeat-cluster " in of_helm(VALUES[name], "shop")[1]


def test_a_certificate_has_the_names_by_which_the_pods_are_asked():
    certificate, = of_kind(rendered("cluster-all"), "Certificate")
    services = {service["metadata"]["name"] for service in of_kind(rendered("cluster-all"), "Service")}
    assert {f"{service}{domain}" for service in services for domain in ("", ".models", ".models.svc")} == set(certificate["spec"]["dnsNames"])
    assert certificate["spec"]["issuerRef"] == {"name": "ours", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    single, = of_kind(rendered("single-tls"), "Certificate")
    assert single["spec"]["dnsNames"] == ["models.example.com"] and single["spec"]["issuerRef"]["kind"] == "Issuer"
    # Prometheus asks pods by address, and for this name.
    monitor, = of_kind(rendered("single-tls"), "PodMonitor")
    endpoint, = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"] == {"ca": {"secret": {"name": "downbeat-tls", "key": "ca.crt"}}, "serverName": "models.example.com"}
    # One's own Secret needs no cert-manager.
    assert not of_kind(rendered("cluster-tls"), "Certificate")
    for name, secrets in {"cluster-tls": ["mine", "roots"], "cluster-all": ["downbeat-tls"] * 2, "single-tls": ["downbeat-tls"]}.items():
        for workload in workloads(rendered(name)):
            volume, = [volume for volume in workload["spec"]["template"]["spec"]["volumes"] if volume["name"] == "tls"]
            assert [source["secret"]["name"] for source in volume["projected"]["sources"]] == secrets


def test_images_are_of_this_version_and_of_no_registry():
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    images = {container(workload)["image"] for name in VALUES if name != "single-many" for workload in workloads(rendered(name))}
    assert images == {f"downbeat:{version}", f"downbeat:{version}-cuda"}


def test_the_chart_has_no_fault_by_helms_own_lint():
    for values in VALUES.values():
        report = lint(CHART, values, strict=True)
        assert not report["errors"] and not [message for message in report["messages"] if message["severity"] >= 2], report


CLUSTER = {"mode": "cluster"}


@pytest.mark.parametrize(("values", "said"), [
    ({"mode": "both"}, "mode"), ({"replicas": 2}, "replicas"), ({"serve": {"replica": 2}}, "replica"), ({"serve": {"replicas": 0}}, "replicas"),
    ({"models": {"url": "ftp://host/model"}}, "url"), ({"models": {"claim": {"size": "much"}}}, "size"), ({"gpu": {"count": "2"}}, "count"),
    ({"serve": {"args": ["slo-ms=50"]}}, "args"), ({"backend": {"autoscaling": {"kind": "vpa"}}}, "kind"), ({"podMonitor": {"interval": "15"}}, "interval"),
    (CLUSTER | {"models": {"url": "s3://models"}}, "models.claim"),
    (CLUSTER | {"scheduler": {"replicas": 65}}, "replicas"), (CLUSTER | {"subClusters": -1}, "subClusters"),
    (CLUSTER | {"etcd": {"endpoints": ["etcd:2379"]}}, "endpoints"), (CLUSTER | {"etcd": {"endpoints": ["http://etcd"]}}, "endpoints"),
    (CLUSTER | {"etcd": {"endpoints": "http://etcd:2379"}}, "endpoints"),
    (CLUSTER | {"etcd": {"prefix": "a"}}, "name the servers"),
    (CLUSTER | {"etcd": {"endpoints": ["https://a:1"], "user": "a"}}, "set both or neither"),
    (CLUSTER | {"etcd": {"endpoints": ["http://a:1"], "caSecret": "a"}}, "has http://a:1"),
    ({"etcd": {"endpoints": ["http://etcd:2379"]}}, "one process needs neither"), ({"subClusters": 2}, "one process needs neither"),
    ({"tls": {"clientCaSecret": "roots"}}, "set tls.issuer.name"), ({"tls": {"dnsNames": ["a"]}}, "set tls.issuer.name"),
    ({"tls": {"issuer": {"name": "Ours!"}}}, "name"), ({"tls": {"issuer": {"name": "a"}, "duration": "90d"}}, "duration"),
    ({"tls": {"secret": "a", "clientCaSecret": "b"}, "podMonitor": {"enabled": True}}, "podMonitor.tlsConfig"),
    ({"apiKeys": {"secret": "a"}, "podMonitor": {"enabled": True}}, "podMonitor.authorization"),
    ({"serve": {"autoscaling": {"enabled": True, "minReplicas": 5}}}, "more than maxReplicas, which is 4"),
    (CLUSTER | {"backend": {"autoscaling": {"kind": "hpa", "minReplicas": 17}}}, "more than maxReplicas, which is 16"),
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


def test_the_values_of_the_guide_are_rendered():
    """Each block ```yaml of the page, and each `--set NAME=VALUE` alone with those that it needs."""
    text = GUIDE.read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        documents = objects(yaml.safe_load(block))
        assert workloads(documents), block
        for document in documents:
            check_schema(document, KUBERNETES[-1])
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in re.findall(r"(?:--set |`)'?([a-z][A-Za-z]+(?:\.[A-Za-z]+)*)=", text):
        functools.reduce(lambda values, key: values[key], name.split("."), known)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("release", ["downbeat", "shop"])
def test_the_notes_name_objects_that_there_are(name, release):
    text, notes = of_helm(VALUES[name], release)
    there = {f"{document['kind'].lower()}/{document['metadata']['name']}" for document in yaml.safe_load_all(text) if document}
    named = set(re.findall(r"(?:deployment|service|certificate)/[\w-]+", notes))
    assert len(named) > 1 and named <= there, notes
    assert "\n\n\n" not in notes and "{{" not in notes


def test_two_releases_in_a_namespace_do_not_meet():
    names, labels = [], []
    for release in ("one", "two"):
        documents = [document for document in yaml.safe_load_all(of_helm(VALUES["cluster"], release)[0]) if document]
        names.append({(document["kind"], document["metadata"]["name"]) for document in documents})
        labels.append([workload["spec"]["selector"]["matchLabels"] for workload in workloads(documents)])
        for workload in workloads(documents):
            schedulers, = [argument for argument in container(workload)["args"] if argument.startswith("--schedulers=")]
            assert schedulers.partition("=")[2].startswith(f"{release}-downbeat-scheduler-0.")
        etcd = of_helm(CLUSTER | {"etcd": {"endpoints": ["http://etcd:2379"]}}, release)[0]
        assert etcd.count(f"--etcd-prefix=models/{release}-downbeat\n") == 3
    assert not names[0] & names[1] and not [label for label in labels[0] if label in labels[1]]


# The number of pods with one device each: of a tenth more than there are, so that Kubernetes does not ignore the difference.
WANTED = re.compile(r'^\(floor\(1\.1 \* max\(downbeat_devices(\{[^}]*\})\)\) \+ 1 > max\(downbeat_autoscale_devices\1\) and max\(downbeat_autoscale_devices\1\) > max\(downbeat_devices\1\)\) or max\(downbeat_autoscale_devices\1\) > 0$')


def test_autoscalers_ask_for_metrics_of_the_leading_scheduler():
    scaled, = [document["spec"] for document in of_kind(rendered("cluster-all"), "ScaledObject")]
    trigger, = scaled["triggers"]
    # A pod has four devices there.
    assert (trigger["type"], trigger["metricType"], trigger["metadata"]["threshold"]) == ("prometheus", "AverageValue", "4")
    rule, = of_kind(rendered("cluster-hpa"), "PrometheusRule")
    record, = rule["spec"]["groups"][0]["rules"]
    for query in (trigger["metadata"]["query"], record["expr"]):
        assert WANTED.match(query).group(1) == '{namespace="models",pod=~"downbeat-scheduler-.*"}', query
    hpa, = [document["spec"] for document in of_kind(rendered("cluster-hpa"), "HorizontalPodAutoscaler")]
    metric, = [metric["external"] for metric in hpa["metrics"]]
    assert metric["metric"]["name"].replace("_", ":", 1) == record["record"] and metric["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert hpa["behavior"] == scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == {"scaleDown": {"stabilizationWindowSeconds": 120}}
    source = "".join(path.read_text() for path in (ROOT / "crates").glob("*/src/**/*.rs"))
    for name in ("downbeat_devices", "downbeat_autoscale_devices"):
        assert f'"{name}"' in source, name


def test_a_secret_of_models_reaches_only_the_pods_that_run_them():
    workload, = workloads(rendered("single-download"))
    its = container(workload)
    assert its["args"][-2:] == ["--model-cache=/models", "s3://models/digits"]
    # The ports open after the download.
    assert its["startupProbe"]["failureThreshold"] * its["startupProbe"]["periodSeconds"] == 1800
    assert its["envFrom"] == [{"secretRef": {"name": "s3"}}, {"secretRef": {"name": "more"}}] and its["env"][0]["name"] == "AWS_REGION"
    assert not of_kind(rendered("single-download"), "PersistentVolumeClaim")
    documents = workloads(objects({"mode": "cluster", "models": {"secret": "s3"}}))
    assert {role_of(workload): "envFrom" in container(workload) for workload in documents} == {"frontend": False, "scheduler": False, "backend": True}


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool on the path (Debian: prometheus)")
def test_prometheus_itself_evaluates_the_rule(tmp_path):
    """The leader's number counts, and nothing is said while no scheduler has one. One device more than ten is more than a tenth more: 12."""
    rule, = [document["spec"] for document in of_kind(rendered("cluster-hpa"), "PrometheusRule")]
    (tmp_path / "chart.yaml").write_text(yaml.safe_dump(rule))
    advice = {"downbeat-scheduler-0": "NaN NaN 5 5 11 14 8", "downbeat-scheduler-1": "NaN NaN NaN NaN NaN NaN NaN", "downbeat-backend-abc": "9 9 9 9 99 99 99"}
    devices = {"downbeat-scheduler-0": "0 0 4 4 10 10 10", "downbeat-scheduler-1": "0 0 0 0 0 0 0", "downbeat-backend-abc": "1 1 1 1 1 1 1"}
    wanted = {"15s": [], **{at: [{"labels": "downbeat:devices_wanted", "value": value}] for at, value in {"45s": 5, "60s": 12, "75s": 14, "90s": 8}.items()}}
    case = {
        "interval": "15s",
        "input_series": [{"series": f'{name}{{namespace="models",pod="{pod}"}}', "values": values}
                         for name, series in {"downbeat_autoscale_devices": advice, "downbeat_devices": devices}.items() for pod, values in series.items()],
        "promql_expr_test": [{"expr": "downbeat:devices_wanted", "eval_time": at, "exp_samples": samples} for at, samples in wanted.items()],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["chart.yaml"], "evaluation_interval": "15s", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


class Cluster:
    """A scheduler, a backend and a frontend on the loopback interface. `given`: what stands for the chart's files and addresses,
    by flag. All else is as in the chart's objects."""

    def __init__(self, binary, folder, documents, given, stack):
        self.ports, self.running, listen = {}, {}, free_ports(1)[0]
        given |= {"schedulers": f"127.0.0.1:{listen}"}
        for workload in documents:
            its, role, (http, metrics, health, peers) = container(workload), role_of(workload), free_ports(4)
            self.ports[role] = {"http": http, "metrics": metrics, "health": health}
            own = {"host": "127.0.0.1", "http-port": http, "grpc-port": "off", "metrics-port": metrics, "health-port": health}
            own |= {} if role == "backend" else {"listen": f"127.0.0.1:{listen if role == 'scheduler' else peers}"}
            flags = [argument[2:].partition("=") for argument in its["args"] if argument.startswith("--")]
            flags = {flag: (given | own).get(flag, value) for flag, _, value in flags} | own
            command = [binary, role, *(f"--{flag}={value}" for flag, value in flags.items())]
            command += [str(EXAMPLES / "models")] if "/models" in its["args"] else []
            env = environment(folder, "rten") | {variable["name"]: "0" for variable in its.get("env", [])}
            log = folder / f"{role}.log"
            process = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=stack.enter_context(open(log, "wb")), stderr=subprocess.STDOUT)
            self.running[role] = process, its, log
            stack.callback(process.wait)
            stack.callback(process.kill)

    def said(self):
        return "\n".join(f"{role}: {log.read_text()}" for role, (_, _, log) in self.running.items())

    def wait(self, role, url, **options):
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.running[role][0].poll() is None and time.monotonic() < until, f"{role}, {url}:\n{self.said()}"
            with contextlib.suppress(requests.ConnectionError):
                answer = requests.get(url, timeout=10, **options)
                if answer.status_code == 200:
                    return answer
            time.sleep(0.05)

    def check(self, scheme, **options):
        """Waits until all probes say yes, and has requests of clients, monitors and Prometheus answered."""
        for role, (_, its, _) in self.running.items():
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert its[kind]["httpGet"]["port"] == "health"
                self.wait(role, f"http://127.0.0.1:{self.ports[role]['health']}{its[kind]['httpGet']['path']}")
        # A frontend is ready with the first model that it hears of.
        url = f"{scheme}://127.0.0.1:{self.ports['frontend']['http']}"
        self.wait("frontend", f"{url}/v2/models/digits/ready", **options)
        answer = requests.post(f"{url}/v2/models/digits/infer", data=(EXAMPLES / "digit.json").read_bytes(), timeout=60, **options)
        assert answer.status_code == 200 and answer.json()["outputs"], answer.text
        cluster = self.state(scheme, **options)
        assert cluster["leader"] == 0
        for role in self.running:
            assert "downbeat_cluster_peers" in self.wait(role, f"{scheme}://127.0.0.1:{self.ports[role]['metrics']}/metrics", **options).text

    def state(self, scheme, **options):
        return self.wait("scheduler", f"{scheme}://127.0.0.1:{self.ports['scheduler']['http']}/v2/cluster", **options).json()

    def end(self):
        for role in ("frontend", "backend", "scheduler"):
            process = self.running[role][0]
            process.terminate()
            assert process.wait(60) == 0, f"{role}:\n{self.said()}"


@pytest.fixture
def secret(binary, tmp_path):
    subprocess.run([binary, "key", "secret", tmp_path / "cluster.secret"], check=True, capture_output=True, timeout=60)
    return tmp_path / "cluster.secret"


def test_a_small_cluster_serves_with_its_own_arguments(binary, tmp_path, secret):
    with contextlib.ExitStack() as stack:
        cluster = Cluster(binary, tmp_path, workloads(rendered("cluster")), {"cluster-secret": secret}, stack)
        cluster.check("http")
        cluster.end()


@pytest.mark.skipif(not shutil.which("etcd"), reason="needs etcd on the path (Debian: etcd-server)")
def test_a_cluster_with_all_on_serves_with_its_own_arguments(binary, tmp_path, secret):
    """With etcd, TLS, certificates of clients, keys and sub-clusters."""
    values = {key: ALL[key] for key in ("mode", "apiKeys", "tls")} | {"subClusters": 1, "etcd": {"endpoints": ["http://etcd:2379"]}}
    authority = Authority(tmp_path, "root")
    (certificate, key), client = authority.certificate("server"), authority.certificate("client")
    keys = tmp_path / "keys.toml"
    made = subprocess.run([binary, "key", "add", keys, "all", "--scope", "infer", "--scope", "read"], capture_output=True, text=True, check=True, timeout=60)
    with contextlib.ExitStack() as stack:
        clients, peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        command = ["etcd", "--data-dir", tmp_path / "etcd", "--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        etcd = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        stack.callback(etcd.wait)
        stack.callback(etcd.kill)
        given = {"cluster-secret": secret, "etcd": clients, "tls-certificate": certificate, "tls-key": key, "tls-client-ca": authority.file, "api-keys": keys}
        cluster = Cluster(binary, tmp_path, workloads(objects(values)), given, stack)
        options = {"verify": str(authority.file), "cert": tuple(client), "headers": {"Authorization": f"Bearer {made.stdout.strip()}"}}
        cluster.check("https", **options)
        # The scheduler reports these once a second.
        until = time.monotonic() + START_TIMEOUT_S
        while len((state := cluster.state("https", **options)).get("sub_clusters", [])) != 1:
            assert time.monotonic() < until, state
            time.sleep(0.05)
        assert state["etcd_answers"]
        cluster.end()
