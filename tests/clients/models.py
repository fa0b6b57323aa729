"""Model repositories made for a test."""
import pathlib
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from serving import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from graph import Graph  # noqa: E402

# Protocol name: (ONNX type, numpy type). BF16 has no numpy type; tritonclient takes and gives FP32
# in its place.
DATATYPES = {
    "BOOL": (TensorProto.BOOL, np.bool_),
    "UINT8": (TensorProto.UINT8, np.uint8),
    "UINT16": (TensorProto.UINT16, np.uint16),
    "UINT32": (TensorProto.UINT32, np.uint32),
    "UINT64": (TensorProto.UINT64, np.uint64),
    "INT8": (TensorProto.INT8, np.int8),
    "INT16": (TensorProto.INT16, np.int16),
    "INT32": (TensorProto.INT32, np.int32),
    "INT64": (TensorProto.INT64, np.int64),
    "FP16": (TensorProto.FLOAT16, np.float16),
    "FP32": (TensorProto.FLOAT, np.float32),
    "FP64": (TensorProto.DOUBLE, np.float64),
    "BYTES": (TensorProto.STRING, np.object_),
    "BF16": (TensorProto.BFLOAT16, np.float32),
}


def write(repository, name, graph, config="", version=1):
    """Puts a graph into a repository."""
    folder = pathlib.Path(repository) / name
    graph.save(folder / str(version) / "model.onnx")
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder


def identity(repository, datatype, name=None):
    """`INPUT0` [N, M] of a datatype, given back as `OUTPUT0`."""
    elem_type = DATATYPES[datatype][0]
    graph = Graph("identity")
    value = graph.input("INPUT0", elem_type, ["N", "M"])
    graph.nodes.append(helper.make_node("Identity", [value], ["OUTPUT0"], name="identity"))
    graph.outputs.append(helper.make_tensor_value_info("OUTPUT0", elem_type, ["N", "M"]))
    return write(repository, name or f"identity_{datatype.lower()}", graph)


def add_sub(repository, name="simple", config=""):
    """The `simple` model of Triton's client examples: INT32 [N, 16] twice, to the sum and the difference."""
    graph = Graph(name)
    a, b = (graph.input(f"INPUT{i}", TensorProto.INT32, ["N", 16]) for i in range(2))
    graph.output(graph.node("Add", a, b), "OUTPUT0", TensorProto.INT32, ["N", 16])
    graph.output(graph.node("Sub", a, b), "OUTPUT1", TensorProto.INT32, ["N", 16])
    return write(repository, name, graph, config)


def add(repository, name, constant, version=1, config=""):
    """`x` FP32 [N, 4] to `y` = `x` + constant: which version answered can be told from the answer."""
    graph = Graph(name)
    x = graph.input("x", TensorProto.FLOAT, ["N", 4])
    graph.output(graph.node("Add", x, graph.constant(np.float32(constant))), "y", TensorProto.FLOAT, ["N", 4])
    return write(repository, name, graph, config, version)


SLOW_CONFIG = """
max_batch_size: 1
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{dynamic_batching}
"""


def slow(repository, name="slow", products=40, dynamic_batching="dynamic_batching { }"):
    """`x` FP32 [N, 1] to `y` = `x`, by way of `products` matrix products of 512 x 512: some tens of milliseconds, batch size 1."""
    size = 512
    graph = Graph(name)
    x = graph.input("x", TensorProto.FLOAT, ["N", 1])
    square = graph.node("Mul", graph.node("Reshape", x, graph.constant(np.array([-1, 1, 1], np.int64))),
                        graph.constant(np.ones((1, size, size), np.float32)))
    # A permutation and not the identity, which an optimiser might see through.
    rotate = graph.constant(np.roll(np.eye(size, dtype=np.float32), 1, axis=0), "rotate")
    for _ in range(products):
        square = graph.node("MatMul", square, rotate)
    mean = graph.node("ReduceMean", square, axes=[2], keepdims=0)
    graph.output(graph.node("ReduceMean", mean, axes=[1], keepdims=1), "y", TensorProto.FLOAT, ["N", 1])
    return write(repository, name, graph, SLOW_CONFIG.format(dynamic_batching=dynamic_batching))


HELD = """
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])

    def execute(self, requests):
        while (self.folder / "hold").exists():
            (self.folder / "runs").touch()
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())]) for request in requests]
"""


def held(repository, name="held", dynamic_batching="dynamic_batching { }"):
    """`x` FP32 [N, 1] to `y` = `x`, in Python, batch size 1. A run lasts for as long as the model's folder has a file `hold`,
    and makes a file `runs` there."""
    folder = pathlib.Path(repository) / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(HELD)
    (folder / "config.pbtxt").write_text(
        'backend: "python"\ninput [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]\noutput [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
        + SLOW_CONFIG.format(dynamic_batching=dynamic_batching))
    return folder


def loop(repository, name="loop", trips=0, constant=False):
    """`x` FP32 [N, 4] to `y` = `x`, after a loop of as many turns as the largest `x`, plus `trips`.
    2e9 turns take half an hour or more. With `constant`: `trips` turns, of which nothing depends on
    `x`."""
    graph = Graph(name)
    x = graph.input("x", TensorProto.FLOAT, ["N", 4])
    start = graph.constant(np.zeros((1, 4), np.float32)) if constant else x
    asked = graph.node("Cast", graph.node("ReduceMax", start, keepdims=0), to=TensorProto.INT64)
    turns = graph.node("Add", asked, graph.constant(np.int64(trips)))
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Mul", ["v", "one"], ["w"])], "body",
        [helper.make_tensor_value_info("turn", TensorProto.INT64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, [1]),
         helper.make_tensor_value_info("v", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, [1]), helper.make_tensor_value_info("w", TensorProto.FLOAT, None)], [one])
    left = graph.node("Loop", turns, graph.constant(np.bool_(True)), start, body=body)
    graph.output(graph.node("Add", left, x) if constant else left, "y", TensorProto.FLOAT, ["N", 4])
    return write(repository, name, graph)


def slow_to_load(repository, name="slow_to_load", products=60):
    """A model whose constants onnxruntime computes while it loads it: some seconds to a minute."""
    size = 2048
    graph = Graph(name)
    x = graph.input("x", TensorProto.FLOAT, ["N", size])
    product = rotate = graph.constant(np.roll(np.eye(size, dtype=np.float32), 1, axis=0), "rotate")
    for _ in range(products):
        product = graph.node("MatMul", product, rotate)
    graph.output(graph.node("MatMul", x, product), "y", TensorProto.FLOAT, ["N", size])
    return write(repository, name, graph)


def unsupported(repository, name="unsupported"):
    """A model with an operator that no engine has."""
    graph = helper.make_graph(
        [helper.make_node("Teleport", ["x"], ["y"], domain="nowhere.example")], name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("nowhere.example", 1)],
                              ir_version=8)
    path = pathlib.Path(repository) / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(model.SerializeToString())


def outside(repository, name="outside", location="../../secret.bin"):
    """A model whose file puts the weights in a file outside its folder (which exists)."""
    weights = np.arange(4, dtype=np.float32)
    folder = pathlib.Path(repository) / name / "1"
    folder.mkdir(parents=True)
    (folder / location).resolve().write_bytes(weights.tobytes())
    tensor = numpy_helper.from_array(weights, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in [("location", location), ("offset", "0"), ("length", "16")]:
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def random_inputs(session, batch, length, seed):
    """Inputs that fit a model as onnxruntime describes it; ids stay below 1000, masks are 0 or 1, pictures 0 to 255."""
    random = np.random.default_rng(seed)
    feed = {}
    for entry in session.get_inputs():
        shape = [{"N": batch, "T": length}.get(size, size) for size in entry.shape]
        if entry.type == "tensor(float)":
            feed[entry.name] = random.uniform(0, 255 if entry.name == "image" else 1, shape).astype(np.float32)
        elif "mask" in entry.name:
            feed[entry.name] = (np.arange(shape[1]) < random.integers(1, shape[1] + 1, (shape[0], 1))).astype(np.int64)
        else:
            feed[entry.name] = random.integers(0, 1000, shape)
    return feed


__all__ = ["DATATYPES", "add", "add_sub", "held", "identity", "loop", "onnx", "outside", "random_inputs", "slow", "slow_to_load", "unsupported", "write"]
