"""Models of Keras, by `model.export(format="onnx")`, which calls tf2onnx, and by tf2onnx's own commands."""

import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
import tensorflow
import tf2onnx
from keras import layers

from .export import SEED, Export, Group

GROUP = Group()
PACKAGES = ("keras", "tensorflow-cpu", "tf2onnx", "onnx", "numpy")


def drawn(*shape):
    """Random eighths, which a compressed file holds in few bytes."""
    return (np.random.default_rng(SEED).normal(size=shape) * 8).round().astype(np.float32) / 8


def built(*made):
    """A sequential model with weights that are drawn anew, but alike each time."""
    keras.utils.set_random_seed(SEED)
    return keras.Sequential(list(made))


def keras_export(model, inputs, how):
    """What Keras itself offers."""
    path = pathlib.Path(tempfile.mkdtemp()) / "model.onnx"
    # Keras exports a model only after it was called, as a trained model was.
    model(inputs if len(inputs) > 1 else inputs[0])
    model.export(path, format="onnx", verbose=False)
    return keep(model, path, inputs, f"{how}.export('model.onnx', format='onnx')", "keras (tf2onnx)")


def saved_model(model, inputs, how):
    """By way of a SavedModel and tf2onnx's command."""
    folder = pathlib.Path(tempfile.mkdtemp())
    model.export(folder / "saved", verbose=False)
    path = folder / "onnx" / "model.onnx"
    path.parent.mkdir()
    subprocess.run([sys.executable, "-m", "tf2onnx.convert", "--saved-model", folder / "saved", "--output", path], check=True, capture_output=True)
    return keep(model, path, inputs, f"python -m tf2onnx.convert --saved-model FOLDER of {how}.export(FOLDER)", "tf2onnx --saved-model")


def from_function(model, inputs, how, opset=15):
    signature = [tensorflow.TensorSpec([None, *array.shape[1:]], array.dtype, name=f"in{i}") for i, array in enumerate(inputs)]
    path = pathlib.Path(tempfile.mkdtemp()) / "model.onnx"
    call = tensorflow.function(lambda *x: model(x if len(x) > 1 else x[0]), input_signature=signature)
    tf2onnx.convert.from_function(call, input_signature=signature, opset=opset, output_path=path)
    return keep(model, path, inputs, f"tf2onnx.convert.from_function({how}, opset={opset})", "tf2onnx.from_function")


def keep(model, path, inputs, how, exporter):
    """The file with inputs under its own names, in its order, and what Keras answers."""
    import onnx

    graph = onnx.load(path).graph
    answers = model.predict(list(inputs) if len(inputs) > 1 else inputs[0], verbose=0)
    answers = answers if isinstance(answers, list) else [answers]
    return Export("Keras", exporter, PACKAGES, path.parent, {value.name: array for value, array in zip(graph.input, inputs)},
                  {value.name: array for value, array in zip(graph.output, answers)}, how)


def mlp():
    return built(layers.Input([16]), layers.Dense(32, "relu"), layers.Dropout(0.2), layers.Dense(4, "softmax"))


def cnn():
    return built(layers.Input([16, 16, 3]), layers.Conv2D(8, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(),
                 layers.DepthwiseConv2D(3, padding="same", activation="swish"), layers.Conv2D(16, 3, strides=2), layers.GlobalAveragePooling2D(),
                 layers.Dense(5, "softmax"))


def lstm():
    return built(layers.Input([9, 6]), layers.LSTM(12), layers.Dense(3))


def gru():
    return built(layers.Input([9, 6]), layers.Bidirectional(layers.GRU(8)), layers.Dense(3))


def two_inputs():
    keras.utils.set_random_seed(SEED)
    a, b = keras.Input([8], name="a"), keras.Input([4], name="b")
    joined = layers.Concatenate()([layers.Dense(6, "relu")(a), b])
    return keras.Model([a, b], [layers.Dense(2, name="left")(joined), layers.Dense(1, "sigmoid", name="right")(joined)])


def decoder():
    return built(layers.Input([6, 6, 4]), layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="elu"),
                 layers.UpSampling2D(interpolation="bilinear"), layers.Conv2D(1, 1, activation="sigmoid"))


def attention():
    keras.utils.set_random_seed(SEED)
    ids = keras.Input([10], dtype="int32", name="ids")
    words = layers.Embedding(50, 16)(ids)
    words = layers.LayerNormalization()(words + layers.MultiHeadAttention(2, 8)(words, words))
    return keras.Model(ids, layers.Dense(3)(layers.GlobalAveragePooling1D()(words)))


SAMPLES = {
    mlp: [drawn(5, 16)], cnn: [drawn(4, 16, 16, 3)], lstm: [drawn(5, 9, 6)], gru: [drawn(5, 9, 6)], two_inputs: [drawn(5, 8), drawn(5, 4)],
    decoder: [drawn(3, 6, 6, 4)], attention: [np.random.default_rng(SEED).integers(0, 50, (4, 10)).astype(np.int32)],
}
for make, arrays in SAMPLES.items():
    GROUP[f"keras_{make.__name__}"] = lambda make=make, arrays=arrays: keras_export(make(), arrays, make.__name__)
for make in (mlp, cnn, lstm):
    GROUP[f"tf2onnx_saved_model_{make.__name__}"] = lambda make=make: saved_model(make(), SAMPLES[make], make.__name__)
for make in (cnn, gru):
    GROUP[f"tf2onnx_function_{make.__name__}"] = lambda make=make: from_function(make(), SAMPLES[make], make.__name__)
