#!/usr/bin/env python3
"""Compares what Downbeat says of a graph's rows with what ONNX Runtime computes.

    cargo build -p downbeat-engine --example rows && python tools/check_rows.py [--graphs N] [--seed S] [--keep FOLDER]
    python tools/check_rows.py --nodes

Random graphs of a few operators are written to a folder, and the program `rows` gives its verdict on each. Then ONNX Runtime
runs each graph with several rows together and with each row alone. A graph that is called independent must give the same
answers. The program fails if one does not. It also counts verdicts of `mixed` whose answers were the same.

With --nodes, the graphs are the backend node cases of the `onnx` package whose inputs all have an axis. The first dimension of
every input and output is declared open.
"""
import argparse
import collections
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPSET = 17
# Rows together, and rows for which a node must work to be taken into a graph.
TOGETHER, TRIED = 3, (1, 3, 4)
UNARY = ["Relu", "Neg", "Abs", "Exp", "Sigmoid", "Tanh", "Identity", "Floor", "Softplus"]
BINARY = ["Add", "Sub", "Mul", "Max", "Min"]
REDUCTIONS = ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceSumSquare"]
INT, FLOAT = np.dtype(np.int64), np.dtype(np.float32)


class Builder:
    """A random graph. `values` has every value's arrays, one for each number of rows that is tried."""

    def __init__(self, random):
        self.random = random
        self.nodes, self.initializers, self.values, self.inputs = [], [], {}, []
        self.count = 0
        rest = [int(n) for n in random.choice([2, 3, 4], size=random.integers(1, 4))]
        for index in range(random.integers(1, 3)):
            name = f"x{index}"
            # The second input may have the shape of the first, so that they can be added.
            shape = rest if random.random() < 0.6 else [int(n) for n in random.choice([2, 3, 4], size=random.integers(0, 3))]
            self.inputs.append((name, shape))
            self.values[name] = [self.rows(rows, shape) for rows in TRIED]

    def rows(self, rows, shape):
        values = self.random.standard_normal([rows, *shape]).astype(np.float32)
        scales = np.resize([1, 30, 5], rows).reshape([rows] + [1] * len(shape))
        return values * scales.astype(np.float32)

    def constant(self, array):
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        self.values[name] = [np.asarray(array)] * len(TRIED)
        return name

    def some(self, kind=FLOAT):
        """A value of a datatype, preferably one of the last."""
        names = [n for n, arrays in self.values.items() if arrays[0].dtype == kind and not n.startswith("c")]
        if not names:
            return None
        return names[-1 - min(int(self.random.exponential(1.5)), len(names) - 1)]

    def try_node(self):
        operator, inputs, outputs, attributes = self.drawn()
        if operator is None or any(name is None for name in inputs):
            return
        if [] in attributes.values():
            return
        names = [f"v{self.count + i}" for i in range(outputs)]
        node = helper.make_node(operator, inputs, names, **attributes)
        arrays = []
        for at in range(len(TRIED)):
            feeds = {name: self.values[name][at] for name in inputs if name}
            infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
            ends = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in names]
            graph = helper.make_graph([node], "g", infos, ends)
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
            try:
                with np.errstate(all="ignore"):
                    made = ReferenceEvaluator(model).run(None, feeds)
            except Exception:
                return
            if any(not isinstance(a, np.ndarray) and not np.isscalar(a) for a in made):
                return
            made = [np.asarray(a) for a in made]
            if any(a.size == 0 or a.size > 5000 or a.ndim > 5 for a in made):
                return
            arrays.append(made)
        self.count += outputs
        self.nodes.append(node)
        for index, name in enumerate(names):
            self.values[name] = [made[index] for made in arrays]

    def axis(self, name, more=0):
        """An axis of a value, which seldom is the first: most graphs would be mixed otherwise."""
        rank = self.values[name][0].ndim + more
        axis = int(self.random.integers(-rank, rank)) if rank else 0
        return axis if rank < 2 or axis % rank or self.random.random() < 0.2 else axis + 1

    def drawn(self):
        random, x = self.random, self.some()
        rank = self.values[x][0].ndim
        shape = self.values[x][1].shape
        kind = random.choice(KINDS)
        if kind == "unary":
            return random.choice(UNARY), [x], 1, {}
        if kind == "binary":
            if random.random() < 0.4:
                sizes = [int(n) if random.random() < 0.6 else 1 for n in shape[1:] or [1]]
                return random.choice(BINARY), [x, self.constant(random.standard_normal(sizes).astype(np.float32))], 1, {}
            return random.choice(BINARY), [x, self.some()], 1, {}
        if kind == "where":
            return "Where", [self.some(np.dtype(bool)), x, self.some()], 1, {}
        if kind == "compare":
            return random.choice(["Greater", "Less", "Equal"]), [x, self.some()], 1, {}
        if kind == "transpose":
            return "Transpose", [x], 1, {"perm": [int(n) for n in random.permutation(rank)]}
        if kind == "reshape":
            sizes = [0, -1, 1, 2, 3, 4, 6, 8, 9, 12]
            target = [int(random.choice(sizes)) for _ in range(random.integers(1, 4))]
            return "Reshape", [x, self.constant(np.array(target, np.int64))], 1, {}
        if kind == "reshape_by_shape":
            return "Reshape", [x, self.some(INT)], 1, {}
        if kind == "flatten":
            return "Flatten", [x], 1, {"axis": int(random.integers(0, rank + 1))}
        if kind == "unsqueeze":
            return "Unsqueeze", [x, self.constant(np.array([self.axis(x, 1)], np.int64))], 1, {}
        if kind == "squeeze":
            axes = [] if random.random() < 0.2 else [self.constant(np.array([self.axis(x)], np.int64))]
            return "Squeeze", [x, *axes], 1, {}
        if kind == "softmax":
            return random.choice(["Softmax", "LogSoftmax", "Hardmax"]), [x], 1, {"axis": self.axis(x)}
        if kind == "reduce":
            axes = sorted({self.axis(x) % max(rank, 1) for _ in range(random.integers(1, 3))})
            return random.choice(REDUCTIONS), [x], 1, {"axes": axes, "keepdims": int(random.integers(0, 2))}
        if kind == "reduce_sum":
            axes = self.constant(np.array([self.axis(x)], np.int64))
            return "ReduceSum", [x, axes], 1, {"keepdims": int(random.integers(0, 2))}
        if kind == "arg":
            return "ArgMax", [x], 1, {"axis": self.axis(x), "keepdims": int(random.integers(0, 2))}
        if kind == "cumsum":
            return "CumSum", [x, self.constant(np.array(self.axis(x), np.int64))], 1, {}
        if kind == "topk":
            axis = self.axis(x)
            k = int(random.integers(1, 3))
            return "TopK", [x, self.constant(np.array([k], np.int64))], 2, {"axis": axis}
        if kind == "matmul":
            if random.random() < 0.5 and rank:
                return "MatMul", [x, self.constant(random.standard_normal([shape[-1], 3]).astype(np.float32))], 1, {}
            if random.random() < 0.3 and rank > 1:
                return "MatMul", [self.constant(random.standard_normal([3, shape[-2]]).astype(np.float32)), x], 1, {}
            return "MatMul", [x, self.some()], 1, {}
        if kind == "gemm":
            turns = {"transA": int(random.integers(0, 2)), "transB": int(random.integers(0, 2))}
            if random.random() < 0.6 and rank:
                inner = shape[0 if turns["transA"] else -1]
                sizes = [3, inner] if turns["transB"] else [inner, 3]
                return "Gemm", [x, self.constant(random.standard_normal(sizes).astype(np.float32))], 1, turns
            return "Gemm", [x, self.some()], 1, turns
        if kind == "einsum":
            equation = random.choice(["ab,cb->ac", "ab,ab->a", "ab->ba", "abc,ac->ab", "abc,adc->abd", "ab->a", "ab,bc->ac", "...a,...a->..."])
            names = [x] + [self.some() for _ in range(equation.count(","))]
            return "Einsum", names, 1, {"equation": str(equation)}
        if kind == "concat":
            return "Concat", [x, self.some()], 1, {"axis": self.axis(x)}
        if kind == "split":
            return "Split", [x], 2, {"axis": self.axis(x)}
        if kind == "slice":
            axis = self.axis(x)
            start, end = int(random.integers(-2, 2)), int(random.choice([1, 2, -1, 2**31]))
            step = int(random.choice([1, 1, 1, 2, -1]))
            ints = [self.constant(np.array([n], np.int64)) for n in (start, end, axis, step)]
            return "Slice", [x, *ints], 1, {}
        if kind == "gather":
            indices = random.integers(0, 2, size=random.integers(0, 3) and [int(n) for n in random.integers(1, 3, size=1)])
            return "Gather", [x, self.constant(np.asarray(indices, np.int64))], 1, {"axis": self.axis(x)}
        if kind == "gather_rows":
            table = self.constant(random.standard_normal([64, 2]).astype(np.float32))
            return "Gather", [table, self.some(INT)], 1, {"axis": 0}
        if kind == "gather_elements":
            return "GatherElements", [x, self.some(INT)], 1, {"axis": self.axis(x)}
        if kind == "shape":
            return "Shape", [x], 1, {}
        if kind == "ints":
            other = self.some(INT)
            how = random.choice(["Gather", "Concat", "Slice", "Add", "Mul"])
            if how == "Gather":
                return "Gather", [other, self.constant(np.array([random.integers(0, 2)], np.int64))], 1, {"axis": 0}
            if how == "Slice":
                return "Slice", [other, self.constant(np.array([1], np.int64)), self.constant(np.array([2], np.int64))], 1, {}
            if how == "Concat":
                more = self.constant(np.array([random.choice([-1, 1, 2])], np.int64))
                return "Concat", [other, more] if random.random() < 0.5 else [more, other], 1, {"axis": 0}
            return how, [other, self.constant(np.array([2], np.int64))], 1, {}
        if kind == "cast":
            return "Cast", [self.some(INT)], 1, {"to": TensorProto.FLOAT}
        if kind == "expand":
            return "Expand", [x if random.random() < 0.5 else self.constant(np.ones([1], np.float32)), self.some(INT)], 1, {}
        if kind == "range":
            zero, one = self.constant(np.array(0, np.int64)), self.constant(np.array(1, np.int64))
            size = self.some(INT)
            if size is None or self.values[size][0].ndim:
                return "Squeeze", [size], 1, {}
            return "Range", [zero, size, one], 1, {}
        if kind == "tile":
            repeats = random.integers(1, 3, size=rank)
            return "Tile", [x, self.constant(np.asarray(repeats, np.int64))], 1, {}
        if kind == "pad":
            pads = random.integers(0, 2, size=2 * rank) * (random.random(2 * rank) < 0.4)
            return "Pad", [x, self.constant(np.asarray(pads, np.int64))], 1, {}
        if kind == "layer_norm":
            axis = self.axis(x)
            scale = self.constant(np.ones(shape[axis:] if axis % max(rank, 1) else [1], np.float32))
            return "LayerNormalization", [x, scale], 1, {"axis": axis}
        if kind == "lp_norm":
            return "LpNormalization", [x], 1, {"axis": self.axis(x)}
        if kind == "mvn":
            return "MeanVarianceNormalization", [x], 1, {"axes": [self.axis(x) % max(rank, 1)]}
        if kind == "batch_norm" and rank >= 2:
            parts = [self.constant(np.full([shape[1]], n, np.float32)) for n in (1, 0, 0.5, 2)]
            return "BatchNormalization", [x, *parts], 1, {}
        if kind == "instance_norm" and rank >= 3:
            parts = [self.constant(np.full([shape[1]], n, np.float32)) for n in (1, 0.5)]
            return "InstanceNormalization", [x, *parts], 1, {}
        if kind == "conv" and rank >= 3:
            weight = self.constant(random.standard_normal([2, shape[1]] + [1] * (rank - 2)).astype(np.float32))
            return "Conv", [x, weight], 1, {}
        if kind == "pool" and rank >= 3:
            return random.choice(["GlobalAveragePool", "GlobalMaxPool"]), [x], 1, {}
        if kind == "one_hot":
            depth, values = self.constant(np.array(3, np.int64)), self.constant(np.array([0, 1], np.float32))
            return "OneHot", [self.some(INT), depth, values], 1, {"axis": int(random.integers(-1, 2))}
        if kind == "quantize":
            return "DynamicQuantizeLinear", [x], 3, {}
        if kind == "parts_by_shape":
            end = self.some(INT)
            zero, axis = self.constant(np.array([0], np.int64)), self.constant(np.array([self.axis(x)], np.int64))
            return "Slice", [x, zero, end, axis], 1, {}
        if kind == "tile_by_shape":
            return "Tile", [x if random.random() < 0.5 else self.constant(np.ones([1, 2], np.float32)), self.some(INT)], 1, {}
        if kind == "ints_of_ints":
            return random.choice(["Mod", "Div", "Min", "Sub"]), [self.some(INT), self.constant(np.array([2], np.int64))], 1, {}
        if kind == "gather_nd":
            indices = random.integers(0, 2, size=[int(n) for n in random.integers(1, 3, size=2)])
            return "GatherND", [x, self.constant(indices.astype(np.int64))], 1, {"batch_dims": int(random.integers(0, 2))}
        if kind == "scatter_nd" and rank >= 2:
            index = self.constant(np.zeros([1, 1], np.int64))
            return "ScatterND", [x, index, self.constant(random.standard_normal([1, *shape[1:]]).astype(np.float32))], 1, {}
        if kind == "scatter":
            return "ScatterElements", [x, self.some(INT), self.some()], 1, {"axis": self.axis(x)}
        if kind == "compress":
            keep = self.constant(np.array([True, False, True]))
            return "Compress", [x, keep], 1, {"axis": self.axis(x)} if random.random() < 0.8 else {}
        if kind == "loop":
            count, go_on = self.constant(np.array(2, np.int64)), self.constant(np.array(True))
            inner = self.inner("v", "w", rank)
            body = [helper.make_node("Identity", ["c"], ["d"]), inner, helper.make_node("Neg", ["w"], ["u"])]
            infos = [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("c", TensorProto.BOOL, []),
                     helper.make_tensor_value_info("v", TensorProto.FLOAT, None)]
            ends = [helper.make_tensor_value_info("d", TensorProto.BOOL, [])]
            ends += [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "wu"]
            return "Loop", [count, go_on, x], 2, {"body": helper.make_graph(body, "body", infos, ends)}
        if kind == "scan":
            state = self.constant(np.zeros([2], np.float32))
            adds = random.random() < 0.5
            body = [helper.make_node("Add" if adds else "Identity", ["s", "s"] if adds else ["s"], ["t"]),
                    helper.make_node("Softmax", ["e"], ["u"], axis=-1)]
            if random.random() < 0.3:
                body = [helper.make_node("ReduceSum", ["e"], ["r"], keepdims=0), helper.make_node("Add", ["s", "r"], ["t"]),
                        helper.make_node("Neg", ["e"], ["u"])]
            infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "se"]
            ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "tu"]
            axes = {"scan_input_axes": [self.axis(x) % max(rank, 1)], "scan_output_axes": [int(random.integers(0, max(rank, 1)))]}
            return "Scan", [state, x], 2, {"num_scan_inputs": 1, "body": helper.make_graph(body, "body", infos, ends), **axes}
        if kind == "nonzero":
            return "NonZero", [x], 1, {}
        if kind == "trilu" and rank >= 2:
            return "Trilu", [x], 1, {"upper": int(random.integers(0, 2))}
        if kind == "reverse" and rank >= 2:
            batch = int(random.integers(0, 2))
            lengths = self.constant(np.ones([shape[batch]], np.int64))
            return "ReverseSequence", [x, lengths], 1, {"batch_axis": batch, "time_axis": 1 - batch}
        if kind == "lstm" and rank == 3:
            w = self.constant(random.standard_normal([1, 8, shape[2]]).astype(np.float32))
            r = self.constant(random.standard_normal([1, 8, 2]).astype(np.float32))
            return "LSTM", [x, w, r], 2, {"hidden_size": 2}
        return None, [], 0, {}

    def inner(self, source, target, rank):
        """An operator of one input for a body."""
        if self.random.random() < 0.4:
            axis = int(self.random.integers(0, max(rank, 1)))
            return helper.make_node("Softmax", [source], [target], axis=axis)
        return helper.make_node(str(self.random.choice(["Relu", "Tanh", "Abs"])), [source], [target])

    def model(self):
        """The graph with some of its last values as outputs; `None` if they would depend on no input."""
        names = [n for n in self.values if n.startswith("v")]
        usable = [n for n in names[-4:] if self.values[n][0].ndim and self.values[n][0].dtype in (FLOAT, INT, np.dtype(bool))]
        if not usable:
            return None
        chosen = usable[-int(self.random.integers(1, 3)):]
        # Nothing that no output needs: an engine may stop at it.
        needed, nodes = set(chosen), []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                nodes.insert(0, node)
                needed.update(node.input)
        kinds = {n: helper.np_dtype_to_tensor_dtype(self.values[n][0].dtype) for n in chosen}
        outputs = [helper.make_tensor_value_info(n, kinds[n], [None] * self.values[n][0].ndim) for n in chosen]
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, *shape]) for n, shape in self.inputs]
        inputs = [info for info in inputs if info.name in needed]
        constants = [constant for constant in self.initializers if constant.name in needed]
        graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        return model if inputs else None


KINDS = """unary unary binary binary binary where compare transpose transpose reshape reshape reshape_by_shape flatten unsqueeze
squeeze softmax reduce reduce_sum arg cumsum topk matmul matmul gemm einsum concat split slice gather gather_rows gather_elements shape shape
ints ints ints cast expand expand range tile pad layer_norm lp_norm mvn batch_norm instance_norm conv pool one_hot quantize nonzero
trilu reverse lstm lstm parts_by_shape parts_by_shape tile_by_shape tile_by_shape ints_of_ints ints_of_ints gather_nd scatter_nd scatter
compress loop loop scan scan""".split()


def session(model):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def is_apart(run, feeds):
    """True if the answers of rows together equal the answers of each row alone, else the reason."""
    rows = len(next(iter(feeds.values())))
    each = [run({name: array[row:row + 1] for name, array in feeds.items()}) for row in range(rows)]
    try:
        together = run(feeds)
    except Exception as error:
        return f"rows run alone and not together: {error}"[:120]
    for row, alone in enumerate(each):
        for a, b in zip(together, alone):
            if a.ndim == 0 or len(a) != rows or a.shape[1:] != b.shape[1:] or len(b) != 1:
                return f"shapes {a.shape} together, {b.shape} alone"
            part = a[row:row + 1]
            if part.dtype.kind == "f":
                if not np.allclose(part, b, rtol=1e-3, atol=1e-4, equal_nan=True):
                    return f"row {row}: {part.ravel()[:4]} together, {b.ravel()[:4]} alone"
            elif not np.array_equal(part, b):
                return f"row {row}: {part.ravel()[:4]} together, {b.ravel()[:4]} alone"
    return None


def random_graphs(args, folder):
    """Yields a file, its model, and inputs for rows together."""
    for number in range(args.graphs):
        random = np.random.default_rng([args.seed, number])
        builder = Builder(random)
        wanted = int(random.integers(2, 9))
        for _ in range(60):
            if len(builder.nodes) >= wanted:
                break
            builder.try_node()
        model = builder.model()
        if model is None:
            continue
        path = folder / f"{number}.onnx"
        path.write_bytes(model.SerializeToString())
        names = {info.name for info in model.graph.input}
        yield path, model, {name: builder.rows(TOGETHER, shape) for name, shape in builder.inputs if name in names}


def open_first(info):
    dims = info.type.tensor_type.shape.dim
    if dims:
        dims[0].Clear()


def node_cases(_args, folder):
    """Yields the same of the backend node cases. Inputs are rows of the case's own, taken in turns."""
    from onnx.backend.test.loader import load_model_tests
    for case in load_model_tests(kind="node"):
        source = pathlib.Path(case.model_dir) / "model.onnx"
        model = onnx.load(source)
        tensors = [i for i in model.graph.input if i.type.HasField("tensor_type") and len(i.type.tensor_type.shape.dim)]
        if not tensors or len(tensors) != len(model.graph.input):
            continue
        feeds = {}
        for index, info in enumerate(model.graph.input):
            data = source.parent / "test_data_set_0" / f"input_{index}.pb"
            array = np.asarray(numpy_helper.to_array(onnx.TensorProto.FromString(data.read_bytes())))
            if array.ndim and len(array):
                feeds[info.name] = array[np.arange(TOGETHER) % len(array)]
        for info in [*model.graph.input, *model.graph.output]:
            open_first(info)
        path = folder / f"{case.name}.onnx"
        path.write_bytes(model.SerializeToString())
        yield path, model, feeds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the graphs")
    parser.add_argument("--program", default=ROOT / "target/debug/examples/rows")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    args = parser.parse_args()
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        cases = list((node_cases if args.nodes else random_graphs)(args, folder))
        files = "\n".join(str(path) for path, _, _ in cases)
        answer = subprocess.run([args.program], input=files, capture_output=True, text=True, check=True).stdout
        counts, operators, wrong = collections.Counter(), collections.Counter(), 0
        for (path, model, feeds), line in zip(cases, answer.splitlines(), strict=True):
            _, verdict, operator, node, reason, *_ = line.split("\t") + [""] * 3
            try:
                run = session(model)
                difference = is_apart(lambda feeds: run.run(None, feeds), feeds)
                found = "same" if difference is None else "different"
            except Exception as error:
                found, difference = "not run", str(error).splitlines()[0][:100]
            counts[verdict, found] += 1
            if verdict == "unknown":
                operators[operator] += 1
            if verdict == "independent" and found == "different":
                wrong += 1
                print(f"WRONG {path.stem}: {difference}: {' '.join(n.op_type for n in model.graph.node)}")
            elif args.verbose or (verdict == "mixed" and found == "same"):
                print(f"{path.stem}\t{verdict}\t{found}\t{operator}\t{node}\t{reason}\t{difference or ''}")
        for (verdict, found), count in sorted(counts.items()):
            print(f"{verdict:12} {found:10} {count}")
        print("unknown by operator:", ", ".join(f"{name} {count}" for name, count in operators.most_common(40)))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
