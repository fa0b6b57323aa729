"""Runs the Python examples of Triton's clients, unchanged, against a server, and prints a table.

    git clone https://github.com/triton-inference-server/client
    DOWNBEAT_BIN=target/release/downbeat python tests/clients/client_examples.py client/src/python/examples

The models that the examples ask for are made here: from ONNX where an operator does the work, otherwise in Python. On Linux, root runs the examples in a
network of their own, as one of them knows no other ports than 8000 and 8001.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
from onnx import TensorProto
from PIL import Image

import models
import serving
from graph import Graph
from test_python_models import config, write

# Needs a GPU on both sides.
CUDA = {"simple_grpc_cudashm_client.py", "simple_http_cudashm_client.py"}
# The server loads no model by itself for these, and another repository has the number of models that each expects.
CONTROL = {"simple_http_model_control.py": 7, "simple_grpc_model_control.py": 8}
LABELS = 1000
TIMEOUT_S = 120

SUM_OF_STRINGS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.one(*(tensor.as_numpy() for tensor in request.inputs())) for request in requests]

        def one(self, a, b):
            a, b = a.astype(np.int64), b.astype(np.int64)
            outputs = [pb_utils.Tensor(f"OUTPUT{i}", y.astype(np.bytes_).astype(np.object_)) for i, y in enumerate((a + b, a - b))]
            return pb_utils.InferenceResponse(outputs)
"""
IDENTITY = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""
# Triton's simple_sequence adds 1 to the first input of a sequence.
SEQUENCE = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self.one(r, r.inputs()[0].as_numpy()))]) for r in requests]

        def one(self, request, value):
            return value + (request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
"""
REPEAT = """
    import threading, time
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                values, delays, wait = (tensor.as_numpy() for tensor in request.inputs())
                threading.Thread(target=self.send, args=(request.get_response_sender(), values.copy(), delays.copy())).start()
                time.sleep(int(wait[0]) / 1000)

        def send(self, sender, values, delays):
            for value, delay in zip(values, delays):
                time.sleep(int(delay) / 1000)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value.reshape(1))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PREPROCESS = """
    import io
    import numpy as np
    import triton_python_backend_utils as pb_utils
    from PIL import Image

    class TritonPythonModel:
        def execute(self, requests):
            return [self.one(request.inputs()[0].as_numpy()) for request in requests]

        def one(self, files):
            pictures = [Image.open(io.BytesIO(file)).convert("RGB").resize((224, 224)) for file in files.ravel()]
            array = np.stack([np.asarray(picture, np.float32).transpose(2, 0, 1) for picture in pictures])
            return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", array)])
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ %d ] label_filename: "labels.txt" } ]
ensemble_scheduling { step [
  { model_name: "preprocess" model_version: -1
    input_map { key: "FILE" value: "INPUT" } output_map { key: "PIXELS" value: "pixels" } },
  { model_name: "inception" model_version: -1
    input_map { key: "x" value: "pixels" } output_map { key: "y" value: "OUTPUT" } } ] }
""" % LABELS


def classifier(folder, name, batched, x, y, more):
    """A small classifier of pictures: the mean of each of 3 channels, times weights."""
    rows = ["N"] if batched else [1]
    graph = Graph(name)
    pixels = graph.input(x, TensorProto.FLOAT, [*rows, 3, 224, 224])
    mean = graph.node("Flatten", graph.node("GlobalAveragePool", pixels))
    scores = graph.node("MatMul", mean, graph.constant(np.random.default_rng(7).normal(size=(3, LABELS)).astype(np.float32)))
    if not batched:
        scores = graph.node("Reshape", scores, graph.constant(np.array([1, LABELS, 1, 1], np.int64)))
    graph.output(scores, y, TensorProto.FLOAT, [*rows, LABELS] if batched else [1, LABELS, 1, 1])
    models.write(folder, name, graph, more)
    (folder / name / "labels.txt").write_text("".join(f"LABEL {i}\n" for i in range(LABELS)))


def numbers(folder, name, elem_type):
    graph = Graph(name)
    a, b = (graph.input(f"INPUT{i}", elem_type, ["N", 16]) for i in range(2))
    for i, operator in enumerate(("Add", "Sub")):
        graph.output(graph.node(operator, a, b), f"OUTPUT{i}", elem_type, ["N", 16])
    models.write(folder, name, graph, "max_batch_size: 8")


def strings(folder):
    sixteen = [[f"{side}{i}" for i in range(2)] for side in ("INPUT", "OUTPUT")]
    write(folder, "simple_string", SUM_OF_STRINGS,
          config(*([(name, "STRING", [16]) for name in side] for side in sixteen), "max_batch_size: 8"))
    write(folder, "simple_identity", IDENTITY, config([("INPUT0", "STRING", [-1])], [("OUTPUT0", "STRING", [-1])], "max_batch_size: 8"))


def repository(folder):
    numbers(folder, "simple", TensorProto.INT32)
    numbers(folder, "simple_int8", TensorProto.INT8)
    strings(folder)
    write(folder, "simple_sequence", SEQUENCE, config([("INPUT", "INT32", [1])], [("OUTPUT", "INT32", [1])], "max_batch_size: 8"))
    write(folder, "repeat_int32", REPEAT, config(
        [("IN", "INT32", [-1]), ("DELAY", "UINT32", [-1]), ("WAIT", "UINT32", [1])], [("OUT", "INT32", [1])],
        "model_transaction_policy { decoupled: true }"))
    write(folder, "custom_identity_int32", IDENTITY,
          config([("INPUT0", "INT32", [-1])], [("OUTPUT0", "INT32", [-1])], "max_batch_size: 8"))
    classifier(folder, "densenet_onnx", False, "data_0", "fc6_1", textwrap.dedent("""\
        max_batch_size: 0
        input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] reshape { shape: [ 1, 3, 224, 224 ] } } ]
        output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] } label_filename: "labels.txt" } ]
    """))
    classifier(folder, "inception", True, "x", "y", "max_batch_size: 8")
    write(folder, "preprocess", PREPROCESS, config([("FILE", "STRING", [1])], [("PIXELS", "FP32", [3, 224, 224])], "max_batch_size: 8"))
    (folder / "preprocess_inception_ensemble" / "1").mkdir(parents=True)
    (folder / "preprocess_inception_ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    (folder / "preprocess_inception_ensemble" / "labels.txt").write_text((folder / "inception" / "labels.txt").read_text())


def runs(name, server, picture):
    """The arguments of each run of an example, as NVIDIA's own tests have them."""
    grpc, picture = server.grpc, str(picture)
    if name in ("image_client.py", "grpc_image_client.py"):
        base = ["-m", "densenet_onnx", "-s", "INCEPTION", "-c", "1", "-b", "1"]
        over = [["-i", "grpc", "-u", grpc], ["-i", "http", "-u", server.http]] if name == "image_client.py" else [["-u", grpc]]
        plain = [base + more + protocol + [picture] for protocol in over for more in ([], ["-a"])]
        return plain + [base + ["-a", "--streaming"] + over[0] + [picture]]
    if name == "ensemble_image_client.py":
        return [["-c", "1", "-i", "grpc", "-u", grpc, picture], ["-c", "1", "-i", "http", "-u", server.http, picture]]
    if name == "reuse_infer_objects_client.py":
        return [["-i", "grpc", "-u", grpc], ["-i", "http", "-u", server.http]]
    if name == "memory_growth_test.py":
        return [["-i", "grpc"], ["-i", "http"]]
    return [["-u", server.http if "http" in name else grpc]]


def outcome(example, arguments):
    """None: the example passes; otherwise its last words."""
    try:
        ran = subprocess.run([sys.executable, str(example), *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=example.parent)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s"
    said = ran.stdout + ran.stderr
    # Some examples tell success by their exit status alone.
    if ran.returncode == 0 and ("PASS" in said or "PASS" not in example.read_text()):
        return None
    return f"exit status {ran.returncode}: " + " ".join(said.split())[-300:]


def alone_in_a_network():
    """Whether this process has a network of its own, which it enters as root."""
    if "CLIENT_EXAMPLES_ALONE" in os.environ:
        return True
    if os.geteuid() == 0 and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0:
        command = 'ip link set lo up && exec "$0" "$@"'
        os.environ["CLIENT_EXAMPLES_ALONE"] = "1"
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", command, sys.executable, *sys.argv])
    return False


def started(binary, folder, work, alone, *flags):
    if alone:
        # The ports that an example knows.
        serving.free_ports = lambda count: [8000, 8001, 8002][:count]
    return serving.Server(binary, folder, work, "--python", sys.executable, "--server-name", "triton", "--shared-memory", *flags)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=pathlib.Path)
    parser.add_argument("names", nargs="*", help="these examples alone")
    given, alone = parser.parse_args(), alone_in_a_network()
    binary = pathlib.Path(os.environ["DOWNBEAT_BIN"]).resolve()
    examples = sorted(path for path in given.examples.resolve().glob("*.py") if not given.names or path.name in given.names)
    failed = {}
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        picture = work / "picture.png"
        Image.fromarray(np.random.default_rng(3).integers(0, 255, (300, 200, 3), np.uint8)).save(picture)
        whole = work / "models"
        repository(whole)
        with started(binary, whole, work, alone) as server:
            for example in examples:
                if example.name in CUDA or example.name in CONTROL:
                    continue
                reasons = [reason for arguments in runs(example.name, server, picture) if (reason := outcome(example, arguments))]
                failed[example.name] = reasons
                print(f"{example.name:55} {'failed: ' + reasons[0] if reasons else 'passed'}", flush=True)
        for example in examples:
            if example.name not in CONTROL:
                continue
            few = work / example.stem
            few.mkdir()
            for name in ["simple", *sorted(path.name for path in whole.iterdir() if path.name != "simple")][: CONTROL[example.name]]:
                (few / name).symlink_to(whole / name)
            with started(binary, few, work, alone, "--model-control-mode", "explicit", "--follow-symlinks") as server:
                reason = outcome(example, runs(example.name, server, picture)[0])
            failed[example.name] = [reason] if reason else []
            print(f"{example.name:55} {'failed: ' + reason if reason else 'passed'}", flush=True)
    passed = sum(not reasons for reasons in failed.values())
    print(f"{passed} of {len(failed)} passed; {len(CUDA)} need a GPU's shared memory and were not run")
    return passed != len(failed)


if __name__ == "__main__":
    sys.exit(main())
