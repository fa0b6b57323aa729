"""Writes fuzz/seeds/model_trial: small ONNX models whose operators take sizes, indices or divisors from their inputs.

    target/clients-venv/bin/python tools/trial_seeds.py
"""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).resolve().parents[1] / "fuzz" / "seeds" / "model_trial"
FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


def model(name, nodes, inputs, output, weights=()):
    """One file. Inputs are names with a datatype and dimensions, weights are names with numbers."""
    value = helper.make_tensor_value_info
    initializers = [numpy_helper.from_array(np.asarray(numbers), key) for key, numbers in weights]
    graph = helper.make_graph(
        [helper.make_node(operator, takes, gives, **attributes) for operator, takes, gives, attributes in nodes],
        name,
        [value(key, datatype, dims) for key, datatype, dims in inputs],
        [value("y", output, None)],
        initializers,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (FOLDER / name).write_bytes(made.SerializeToString())


def one(operator, inputs, output=FLOAT, weights=(), **attributes):
    """A model of one operator, whose inputs are `inputs`, then `weights`."""
    names = [key for key, *_ in inputs] + [key for key, _ in weights]
    model(operator.lower(), [(operator, names, ["y"], attributes)], inputs, output, weights)


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    x, n, ids = ("x", FLOAT, ["n", 4]), ("n", INT64, ["n", 2]), ("i", INT64, ["n", 2])
    one("Relu", [x])
    one("Softmax", [x], axis=-1)
    one("MatMul", [x], weights=[("w", np.ones((4, 3), np.float32))])
    one("Div", [("a", INT32, ["n", 2]), ("b", INT32, ["n", 2])], INT32)
    one("Mod", [n, ("b", INT64, ["n", 2])], INT64)
    one("Gather", [("x", FLOAT, [3, 4]), ids])
    one("CumSum", [x], weights=[("axis", np.int64(1))])
    one("Reshape", [x], weights=[("shape", np.array([-1, 2], np.int64))])
    one("Tile", [x], weights=[("repeats", np.array([1, 3], np.int64))])
    one("Expand", [x, ("shape", INT64, [2])])
    one("Slice", [x, ("starts", INT64, [1]), ("ends", INT64, [1])])
    one("Pad", [x, ("pads", INT64, [4])])
    one("Range", [("start", INT64, []), ("limit", INT64, []), ("delta", INT64, [])], INT64)
    one("ConstantOfShape", [("shape", INT64, ["n"])])
    one("OneHot", [ids], weights=[("depth", np.int64(5)), ("values", np.array([0, 1], np.float32))])
    one("Concat", [x, ("z", FLOAT, ["n", 4])], axis=1)
    one("Transpose", [x], perm=[1, 0])
    one("Conv", [("x", FLOAT, ["n", 1, 5, 5])], weights=[("w", np.ones((2, 1, 3, 3), np.float32))], strides=[1, 1])
    one("MaxPool", [("x", FLOAT, ["n", 1, 5, 5])], kernel_shape=[2, 2])
    one("ReduceSum", [x], keepdims=0)
    one("GatherND", [x, ids])
    one("ScatterND", [x, ("i", INT64, [1, 1]), ("u", FLOAT, [1, 4])])
    one("LayerNormalization", [x], weights=[("s", np.ones(4, np.float32))])
    one("Einsum", [x, ("z", FLOAT, ["n", 4])], equation="ij,ij->i")
    model(
        "sum_as_size",
        [("ReduceSum", ["n"], ["s"], {"keepdims": 0}), ("Unsqueeze", ["s", "a"], ["t"], {}), ("ConstantOfShape", ["t"], ["y"], {})],
        [n], FLOAT, [("a", np.array([0], np.int64))],
    )
    model(
        "chain", [("Neg", [f"v{at}"], [f"v{at + 1}"], {}) for at in range(40)] + [("Neg", ["v40"], ["y"], {})],
        [("v0", FLOAT, ["n", 2])], FLOAT,
    )


if __name__ == "__main__":
    main()
