"""A small builder for ONNX graphs, shared by make_examples.py and zoo.py.

Weights that are not trained are drawn from one seeded generator, so a generator script writes the same file every time.
"""
import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Plain operators that the embedded engine and ONNX Runtime both have (LayerNormalization came with 17).
OPSET = 17
# The operators of classical models have a domain of their own.
OPSETS = {"": OPSET, "ai.onnx.ml": 3}
IR_VERSION = 8


class Graph:
    """An ONNX graph under construction. Every method that adds a node returns the name of its output."""

    def __init__(self, name, seed=0):
        self.name = name
        self.random = np.random.default_rng(seed)
        self.nodes, self.initializers, self.inputs, self.outputs = [], [], [], []

    # -- ends

    def input(self, name, elem_type, shape):
        """Adds an input; a string in `shape` is a dynamic dimension."""
        self.inputs.append(helper.make_tensor_value_info(name, elem_type, shape))
        return name

    def output(self, value, name, elem_type, shape):
        """Names `value` as an output of the graph."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"output_{name}"))
        self.outputs.append(helper.make_tensor_value_info(name, elem_type, shape))

    def save(self, path, metadata=None):
        """Checks the graph, removes the Identity nodes that only name outputs, and writes it."""
        self._rename_outputs()
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        domains = sorted({"", *(node.domain for node in self.nodes)})
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, OPSETS[domain]) for domain in domains],
                                  ir_version=IR_VERSION, producer_name="downbeat")
        helper.set_model_props(model, metadata or {})
        onnx.checker.check_model(model, full_check=True)
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.SerializeToString(deterministic=True))

    def _rename_outputs(self):
        for identity in [n for n in self.nodes if n.name.startswith("output_")]:
            source, target = identity.input[0], identity.output[0]
            self.nodes.remove(identity)
            for node in self.nodes:
                node.output[:] = [target if value == source else value for value in node.output]
                node.input[:] = [target if value == source else value for value in node.input]

    # -- nodes

    def node(self, operator, *inputs, outputs=1, **attributes):
        """Adds a node of any operator."""
        name = f"{operator.lower()}_{len(self.nodes)}"
        names = [name] if outputs == 1 else [f"{name}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=name, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value, name=None):
        """Adds a constant tensor."""
        name = name or f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(self, *shape, fan_in=None):
        """Adds random weights that keep the variance of the values that pass through (He et al.
        2015)."""
        fan_in = fan_in or int(np.prod(shape[1:]))
        values = self.random.standard_normal(shape, dtype=np.float32) * np.float32(np.sqrt(2.0 / fan_in))
        return self.constant(values, f"weight_{len(self.initializers)}")

    # -- layers

    def dense(self, value, inputs, outputs, activation=None):
        """A fully connected layer over [N, inputs]."""
        value = self.node("Gemm", value, self.weight(inputs, outputs, fan_in=inputs),
                          self.constant(np.zeros(outputs, np.float32)))
        return self.node(activation, value) if activation else value

    def project(self, value, inputs, outputs):
        """A linear map of the last dimension of a tensor of any rank."""
        weights = self.random.standard_normal((inputs, outputs), dtype=np.float32) / np.float32(np.sqrt(inputs))
        value = self.node("MatMul", value, self.constant(weights, f"weight_{len(self.initializers)}"))
        return self.node("Add", value, self.constant(np.zeros(outputs, np.float32)))

    def convolution(self, value, inputs, outputs, kernel, stride=1, groups=1, activation="Relu", scale=1.0):
        """A convolution with folded batch normalisation; `Clip` stands for ReLU6."""
        fan_in = inputs // groups * kernel * kernel
        weights = self.random.standard_normal((outputs, inputs // groups, kernel, kernel), dtype=np.float32)
        weights *= np.float32(scale * np.sqrt(2.0 / fan_in))
        value = self.node("Conv", value, self.constant(weights, f"weight_{len(self.initializers)}"),
                          self.constant(np.zeros(outputs, np.float32)), kernel_shape=[kernel, kernel],
                          strides=[stride, stride], pads=[kernel // 2] * 4, group=groups)
        if activation == "Clip":
            return self.node("Clip", value, self.constant(np.float32(0)), self.constant(np.float32(6)))
        return self.node(activation, value) if activation else value

    def layer_norm(self, value, size):
        """Layer normalisation of the last dimension."""
        return self.node("LayerNormalization", value, self.constant(np.ones(size, np.float32)),
                         self.constant(np.zeros(size, np.float32)), axis=-1, epsilon=1e-5)

    def gelu(self, value):
        """GELU by the error function, as exporters of opset 17 write it."""
        half = self.node("Mul", value, self.constant(np.float32(0.5)))
        erf = self.node("Erf", self.node("Div", value, self.constant(np.float32(np.sqrt(2.0)))))
        return self.node("Mul", half, self.node("Add", erf, self.constant(np.float32(1.0))))

    def attention(self, value, mask, width, heads, as_pytorch=False):
        """Multi-head self-attention over [N, T, width]; `mask` is added to the scores and broadcasts to [N, 1, 1, T]."""
        size = width // heads

        def heads_of(name_axes):
            projected = self.project(value, width, width)
            split = self.node("Reshape", projected, self.constant(np.array([0, 0, heads, size], np.int64)))
            return self.node("Transpose", split, perm=name_axes)

        query, key, content = heads_of([0, 2, 1, 3]), heads_of([0, 2, 3, 1]), heads_of([0, 2, 1, 3])
        scores = self.node("MatMul", query, key)
        if as_pytorch:
            scores = self.node("Div", scores, self.constant(np.float32(np.sqrt(size))))
        else:
            scores = self.node("Mul", scores, self.constant(np.float32(1.0 / np.sqrt(size))))
        weights = self.node("Softmax", self.node("Add", scores, mask), axis=-1)
        mixed = self.node("Transpose", self.node("MatMul", weights, content), perm=[0, 2, 1, 3])
        mixed = self.node("Reshape", mixed, self.constant(np.array([0, 0, width], np.int64)))
        return self.project(mixed, width, width)

    def encoder(self, ids, mask, vocabulary, positions, width, heads, inner, layers, as_pytorch=False):
        """A BERT-like encoder: INT64 token ids and 0/1 mask, both [N, T], to FP32 [N, T, width]. `as_pytorch`: attention in the form that PyTorch exports, which
        onnxruntime.transformers.optimizer fuses."""
        tokens = self.node("Gather", self.random_table(vocabulary, width), ids, axis=0)
        length = self.node("Slice", self.node("Shape", ids), self.constant(np.array([1], np.int64)),
                           self.constant(np.array([2], np.int64)))
        place = self.node("Slice", self.random_table(positions, width), self.constant(np.array([0], np.int64)),
                          length, self.constant(np.array([0], np.int64)))
        value = self.layer_norm(self.node("Add", tokens, place), width)

        # 1 -> 0, 0 -> -10000: a masked position gets no weight in the softmax.
        if as_pytorch:
            real = self.node("Unsqueeze", mask, self.constant(np.array([1], np.int64)))
            real = self.node("Cast", self.node("Unsqueeze", real, self.constant(np.array([2], np.int64))), to=TensorProto.FLOAT)
            bias = self.node("Mul", self.node("Sub", self.constant(np.float32(1.0)), real), self.constant(np.float32(-1e4)))
        else:
            real = self.node("Cast", mask, to=TensorProto.FLOAT)
            real = self.node("Unsqueeze", real, self.constant(np.array([1, 2], np.int64)))
            bias = self.node("Mul", self.node("Sub", real, self.constant(np.float32(1.0))), self.constant(np.float32(1e4)))

        for _ in range(layers):
            attended = self.attention(value, bias, width, heads, as_pytorch)
            value = self.layer_norm(self.node("Add", value, attended), width)
            inner_value = self.project(self.gelu(self.project(value, width, inner)), inner, width)
            value = self.layer_norm(self.node("Add", value, inner_value), width)
        return value

    def trees(self, value, features, trees, depth):
        """The sum of so many full binary trees of this depth over [N, features], to [N, 1]: what gradient boosting makes."""
        inner, count = 2 ** depth - 1, 2 ** (depth + 1) - 1
        nodes = np.arange(count)
        is_inner = nodes < inner
        features = self.random.integers(0, features, (trees, count))
        values = self.random.standard_normal((trees, count)).astype(np.float32)
        leaves = nodes[inner:]
        return self.node(
            "TreeEnsembleRegressor", value, domain="ai.onnx.ml", n_targets=1,
            nodes_treeids=np.repeat(np.arange(trees), count).tolist(),
            nodes_nodeids=np.tile(nodes, trees).tolist(),
            nodes_featureids=np.where(is_inner, features, 0).ravel().tolist(),
            nodes_values=np.where(is_inner, values, 0).ravel().tolist(),
            nodes_modes=["BRANCH_LEQ" if branches else "LEAF" for branches in is_inner] * trees,
            nodes_truenodeids=np.tile(np.where(is_inner, 2 * nodes + 1, 0), trees).tolist(),
            nodes_falsenodeids=np.tile(np.where(is_inner, 2 * nodes + 2, 0), trees).tolist(),
            target_treeids=np.repeat(np.arange(trees), len(leaves)).tolist(),
            target_nodeids=np.tile(leaves, trees).tolist(),
            target_ids=[0] * (trees * len(leaves)),
            target_weights=(0.1 * values[:, inner:]).ravel().tolist())

    def random_table(self, rows, width):
        """A table of embeddings."""
        values = self.random.standard_normal((rows, width), dtype=np.float32) * np.float32(0.5)
        return self.constant(values, f"table_{len(self.initializers)}")
