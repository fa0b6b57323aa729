"""Models of the other modules in 8-bit integers and in half precision, by the packages that people use for that,
and saved anew with the newest `onnx`. These read the models that the other modules have made."""

import json
import pathlib
import tempfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter
from onnxconverter_common import float16
from onnxruntime import quantization

from .export import SEED, Export, Group

GROUP = Group()
# The folder of the models that were made before; `exporters.py` sets it.
FOLDER = pathlib.Path()
INT8 = (0.02, 0.02)
INT8_BECAUSE = "8-bit integers in place of single precision"
# Few wide sums of drawn weights and drawn inputs: errors do not cancel.
INT8_MLP = (0.1, 0.1)
FP16 = (5e-3, 1e-3)
FP16_BECAUSE = "half precision has 11 bits"


def read(name):
    """The inputs, outputs and framework of a model made before."""
    folder = FOLDER / name
    about = json.loads((folder / "about.json").read_text())
    return folder / "model.onnx", dict(np.load(folder / "inputs.npz")), dict(np.load(folder / "outputs.npz")), about


def made(name, model, inputs, outputs, about, exporter, packages, how, **more):
    return Export(about["framework"], exporter, packages, model, inputs, outputs, f"{how} of {name}: {about['how']}", **more)


def quantised(name, quantise, how, tolerance=INT8):
    """A model with 8-bit integers, which has to answer nearly as the framework does in single precision."""
    path, inputs, outputs, about = read(name)
    folder = pathlib.Path(tempfile.mkdtemp())
    quantise(path, folder / "model.onnx", inputs)
    return made(name, folder, inputs, outputs, about, "onnxruntime.quantization", ("onnxruntime", "onnx", "numpy"), how, tolerance=tolerance,
                because=INT8_BECAUSE)


def dynamic(path, target, _inputs):
    quantization.quantize_dynamic(path, target)


def static(form):
    """Static quantisation in one of its two forms, calibrated with the model's own inputs."""
    class Reader(quantization.CalibrationDataReader):
        def __init__(self, inputs):
            self.left = [inputs]

        def get_next(self):
            return self.left.pop() if self.left else None

    def quantise(path, target, inputs):
        # One file, since the preparation does not find weights in another.
        whole, ready = target.parent / "whole.onnx", target.parent / "ready.onnx"
        onnx.save(onnx.load(path), whole)
        quantization.shape_inference.quant_pre_process(whole, ready, skip_symbolic_shape=True)
        quantization.quantize_static(ready, target, Reader(inputs), quant_format=form)
        whole.unlink()
        ready.unlink()

    return quantise


for base in ("torch_lstm_torchscript", "transformers_classification_torchscript", "transformers_embeddings_dynamo"):
    GROUP[f"int8_dynamic_{base}"] = lambda base=base: quantised(base, dynamic, "quantize_dynamic")
for base in ("torch_mlp_torchscript", "keras_mlp"):
    GROUP[f"int8_dynamic_{base}"] = lambda base=base: quantised(base, dynamic, "quantize_dynamic", INT8_MLP)
for base in ("torch_cnn_torchscript", "torch_cnn_dynamo", "keras_cnn", "transformers_classification_dynamo"):
    GROUP[f"int8_qdq_{base}"] = lambda base=base: quantised(base, static(quantization.QuantFormat.QDQ), "quantize_static(QDQ)")
GROUP["int8_operators_torch_cnn_torchscript"] = lambda: quantised(
    "torch_cnn_torchscript", static(quantization.QuantFormat.QOperator), "quantize_static(QOperator)")


def halved(name, keep):
    """A model in half precision, with its inputs and outputs as they were or halved too."""
    path, inputs, outputs, about = read(name)
    model = float16.convert_float_to_float16(onnx.load(path), keep_io_types=keep)
    if not keep:
        inputs, outputs = ({key: array.astype(np.float16) if array.dtype == np.float32 else array for key, array in arrays.items()}
                           for arrays in (inputs, outputs))
    return made(name, model, inputs, outputs, about, "onnxconverter_common.float16", ("onnxconverter-common", "onnx", "numpy"),
                f"convert_float_to_float16(keep_io_types={keep})", tolerance=FP16, because=FP16_BECAUSE)


for base in ("torch_cnn_torchscript", "torch_lstm_torchscript", "transformers_classification_torchscript", "keras_cnn"):
    GROUP[f"fp16_{base}"] = lambda base=base: halved(base, True)
for base in ("torch_cnn_dynamo", "torch_mlp_torchscript"):
    GROUP[f"fp16_io_{base}"] = lambda base=base: halved(base, False)


@GROUP.model
def onnx_newest():
    """Made by hand with the `onnx` package's defaults: its newest opset and IR."""
    random = np.random.default_rng(SEED)
    weights, bias = random.normal(size=(4, 3)).astype(np.float32), random.normal(size=3).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["scores"]), helper.make_node("Softmax", ["scores"], ["y"])], "newest",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(bias, "b")])
    x = random.normal(size=(6, 4)).astype(np.float32)
    scores = np.exp(x @ weights + bias)
    return Export("NumPy", "onnx.helper", ("onnx", "numpy"), helper.make_model(graph), {"x": x}, {"y": scores / scores.sum(1, keepdims=True)},
                  "onnx.helper.make_model(graph), nothing else said")


def newest(name):
    """A model brought to the newest opset and IR by the `onnx` package itself."""
    path, inputs, outputs, about = read(name)
    model = version_converter.convert_version(onnx.load(path), onnx.defs.onnx_opset_version())
    model.ir_version = onnx.IR_VERSION
    return made(name, model, inputs, outputs, about, "onnx.version_converter", ("onnx", "numpy"),
                f"convert_version(model, {onnx.defs.onnx_opset_version()}), IR {onnx.IR_VERSION}")


for base in ("torch_cnn_torchscript", "torch_encoder_torchscript", "sklearn_ridge"):
    GROUP[f"newest_{base}"] = lambda base=base: newest(base)
