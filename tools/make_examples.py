#!/usr/bin/env python3
"""Writes the models, the picture and the request under examples/.

    pip install -r tools/requirements.txt && python tools/make_examples.py [FOLDER]

- `digits`: a classifier of 8x8 pictures of handwritten digits, trained here on three quarters of scikit-learn's bundled
  set. Input `image`, FP32 [N, 8, 8]: brightness 0 (paper) to 255 (ink), as an 8-bit grayscale PNG holds it; the model
  scales by itself. Output `probabilities`, FP32 [N, 10].
- `mlp`: 784-128-10 with random weights: so cheap to run that what remains is the server's own cost.
- `encoder`: a two-layer transformer encoder with random weights. Inputs `input_ids` and `attention_mask`, INT64 [N, T]
  (ids below 1000, T up to 256). Outputs `hidden`, FP32 [N, T, 64], and `pooled`, FP32 [N, 64]: the mean over what the mask
  lets through.
- `exits` (in a repository of its own, exits/models): the digits again, with two exits. Input `image` as for `digits`; outputs `early`, the
  probabilities that a linear classifier gives from the first hidden layer, and `late`, those at the end of four hidden layers, FP32 [N, 10].

- `photo` and `sentence` (preprocess/models): models that take what users have, by the steps in preprocess/downbeat.toml. `photo` says which colour
  a picture mostly has, of pixels FP32 [N, 3, 32, 32], normalised; `sentence` whether a text is kind, by a tiny tokenizer.json.

Every seed is fixed. Training goes through the local BLAS, so the weights of `digits` may differ in the last bits
between machines; the accuracy printed at the end does not.
"""
import io
import json
import pathlib
import struct
import sys
import warnings
import zlib

import numpy as np
import onnxruntime
from onnx import TensorProto
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from graph import Graph

SEED = 0
LABELS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VOCABULARY, POSITIONS, WIDTH = 1000, 256, 64


def digits_split():
    """Pictures (FP32 [N, 8, 8], 0 to 255) and classes: training pictures, training classes, held-out pictures, held-out classes."""
    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.float32)
    train, held_out, train_class, held_out_class = train_test_split(
        images, data.target, test_size=0.25, random_state=SEED, stratify=data.target)
    return train, train_class, held_out, held_out_class


def shifted(images, classes):
    """The pictures, and each moved by one pixel in the four directions: the digit stays the same."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    copies = [padded[:, 1 + y:9 + y, 1 + x:9 + x] for y, x in [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]]
    return np.concatenate(copies), np.tile(classes, len(copies))


def make_digits(path):
    train, train_class, held_out, held_out_class = digits_split()
    images, classes = shifted(train, train_class)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        trained = MLPClassifier((128,), random_state=SEED, max_iter=60).fit(images.reshape(-1, 64) / 255, classes)
    accuracy = trained.score(held_out.reshape(-1, 64) / 255, held_out_class)

    graph = Graph("digits")
    value = graph.input("image", TensorProto.FLOAT, ["N", 8, 8])
    value = graph.node("Flatten", graph.node("Div", value, graph.constant(np.float32(255), "brightest")), axis=1)
    for layer, (weights, bias) in enumerate(zip(trained.coefs_, trained.intercepts_)):
        if layer > 0:
            value = graph.node("Relu", value)
        value = graph.node("Gemm", value, graph.constant(weights.astype(np.float32), f"weight_{layer}"),
                           graph.constant(bias.astype(np.float32), f"bias_{layer}"))
    graph.output(graph.node("Softmax", value, axis=-1), "probabilities", TensorProto.FLOAT, ["N", 10])
    graph.save(path, {"test_accuracy": f"{accuracy:.4f}"})
    return accuracy


def make_exits(path):
    train, train_class, held_out, held_out_class = digits_split()
    images, classes = shifted(train, train_class)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        late = MLPClassifier((64, 96, 96, 64), random_state=SEED, max_iter=40).fit(images.reshape(-1, 64) / 255, classes)
        first = lambda pictures: np.maximum(pictures.reshape(-1, 64) / 255 @ late.coefs_[0] + late.intercepts_[0], 0)
        early = MLPClassifier((), random_state=SEED, max_iter=60).fit(first(images), classes)

    graph = Graph("exits")
    value = graph.input("image", TensorProto.FLOAT, ["N", 8, 8])
    value = graph.node("Flatten", graph.node("Div", value, graph.constant(np.float32(255), "brightest")), axis=1)

    def dense(value, weights, bias, name):
        return graph.node("Gemm", value, graph.constant(weights.astype(np.float32), f"weight_{name}"),
                          graph.constant(bias.astype(np.float32), f"bias_{name}"))

    layers = list(zip(late.coefs_, late.intercepts_))
    value = graph.node("Relu", dense(value, *layers[0], "0"))
    sure = graph.node("Softmax", dense(value, early.coefs_[0], early.intercepts_[0], "early"), axis=-1)
    graph.output(sure, "early", TensorProto.FLOAT, ["N", 10])
    for number, layer in enumerate(layers[1:], 1):
        if number > 1:
            value = graph.node("Relu", value)
        value = dense(value, *layer, str(number))
    graph.output(graph.node("Softmax", value, axis=-1), "late", TensorProto.FLOAT, ["N", 10])
    graph.save(path)
    confident = early.predict_proba(first(held_out)).max(axis=1) >= 0.9
    right = early.predict(first(held_out))[confident] == held_out_class[confident]
    print(f"exits: early {early.score(first(held_out), held_out_class):.1%}, late {late.score(held_out.reshape(-1, 64) / 255, held_out_class):.1%} right; "
          f"{confident.mean():.1%} leave early, {right.mean():.1%} of them right")


def make_mlp(path):
    graph = Graph("mlp", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 784])
    value = graph.dense(value, 784, 128, "Relu")
    graph.output(graph.dense(value, 128, 10), "output", TensorProto.FLOAT, ["N", 10])
    graph.save(path)


def make_encoder(path):
    graph = Graph("encoder", SEED)
    ids = graph.input("input_ids", TensorProto.INT64, ["N", "T"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["N", "T"])
    hidden = graph.encoder(ids, mask, VOCABULARY, POSITIONS, WIDTH, heads=4, inner=128, layers=2)
    real = graph.node("Unsqueeze", graph.node("Cast", mask, to=TensorProto.FLOAT), graph.constant(np.array([2], np.int64)))
    axis = graph.constant(np.array([1], np.int64))
    total = graph.node("ReduceSum", graph.node("Mul", hidden, real), axis, keepdims=0)
    # At least one, so that an empty mask gives zeros and not NaN.
    count = graph.node("Max", graph.node("ReduceSum", real, axis, keepdims=0), graph.constant(np.float32(1)))
    graph.output(hidden, "hidden", TensorProto.FLOAT, ["N", "T", WIDTH])
    graph.output(graph.node("Div", total, count), "pooled", TensorProto.FLOAT, ["N", WIDTH])
    graph.save(path)


def make_photo(folder):
    graph = Graph("photo")
    pixels = graph.input("pixels", TensorProto.FLOAT, ["N", 3, 32, 32])
    mean = graph.node("ReduceMean", pixels, axes=[2, 3], keepdims=0)
    graph.output(graph.node("Softmax", graph.node("Mul", mean, graph.constant(np.float32(4))), axis=-1), "colour", TensorProto.FLOAT, ["N", 3])
    graph.output(graph.node("Identity", pixels), "as_seen", TensorProto.FLOAT, ["N", 3, 32, 32])
    graph.save(folder / "photo/1/model.onnx")
    (folder / "photo/labels.txt").write_text("red\ngreen\nblue\n")
    (folder / "photo/config.pbtxt").write_text("""max_batch_size: 16
output [ { name: "colour" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" },
         { name: "as_seen" data_type: TYPE_FP32 dims: [ 3, 32, 32 ] } ]
""")


WORDS = {"good": 1, "kind": 1, "fine": 1, "love": 1, "bad": -1, "awful": -1, "hate": -1, "sad": -1}
FILLERS = ["the", "a", "is", "was", "it", "this", "i", "so", "very", "day", "film", ".", ",", "!"]


def make_sentence(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *FILLERS]
    vocabulary = {word: number for number, word in enumerate(words)}
    special = [{"id": vocabulary[word], "content": word, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for word in words[:4]]
    piece = lambda word: {"SpecialToken": {"id": word, "type_id": 0}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [piece("[CLS]"), {"Sequence": {"id": "A", "type_id": 0}}, piece("[SEP]")], "pair": [
                {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {word: {"id": word, "ids": [vocabulary[word]], "tokens": [word]} for word in ["[CLS]", "[SEP]"]}},
        "decoder": None, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    graph = Graph("sentence")
    ids = graph.input("input_ids", TensorProto.INT64, ["N", "T"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["N", "T"])
    score = np.array([[-WORDS.get(word, 0), WORDS.get(word, 0)] for word in words], np.float32)
    each = graph.node("Gather", graph.constant(score), ids)
    real = graph.node("Unsqueeze", graph.node("Cast", mask, to=TensorProto.FLOAT), graph.constant(np.array([2], np.int64)))
    total = graph.node("ReduceSum", graph.node("Mul", each, real), graph.constant(np.array([1], np.int64)), keepdims=0)
    graph.output(graph.node("Softmax", total, axis=-1), "tone", TensorProto.FLOAT, ["N", 2])
    graph.save(folder / "sentence/1/model.onnx")
    (folder / "sentence/tokenizer.json").write_text(json.dumps(tokenizer, indent=1) + "\n")
    (folder / "sentence/labels.txt").write_text("unkind\nkind\n")
    (folder / "sentence/config.pbtxt").write_text("""max_batch_size: 16
output [ { name: "tone" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
""")


def photograph():
    """A picture of 320 x 240 pixels that is mostly blue, as JPEG."""
    y, x = np.mgrid[0:240, 0:320]
    waves = 40 * np.sin(x / 17) * np.cos(y / 11)
    rgb = np.stack([60 + waves, 90 + 0.2 * y, 190 - 0.1 * x], axis=2)
    file = io.BytesIO()
    Image.fromarray(rgb.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def png(image):
    """An 8-bit grayscale PNG of a [height, width] array of 0 to 255."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.tobytes() for row in image.astype(np.uint8))
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def main(folder):
    models = folder / "models"
    accuracy = make_digits(models / "digits/1/model.onnx")
    make_mlp(models / "mlp/1/model.onnx")
    make_encoder(models / "encoder/1/model.onnx")
    make_photo(folder / "preprocess/models")
    make_sentence(folder / "preprocess/models")
    (folder / "preprocess/photo.jpg").write_bytes(photograph())
    make_exits(folder / "exits/models/exits/1/model.onnx")
    (models / "digits/labels.txt").write_text("\n".join(LABELS) + "\n")

    _, _, held_out, held_out_class = digits_split()
    session = onnxruntime.InferenceSession(models / "digits/1/model.onnx")
    probabilities = session.run(None, {"image": held_out})[0]
    right = int((probabilities.argmax(axis=1) == held_out_class).sum())
    print(f"digits: {right} of {len(held_out)} held-out pictures right ({right / len(held_out):.1%})")
    assert abs(right / len(held_out) - accuracy) < 1e-9, "the exported model does not answer as the trained one"

    # The first held-out seven that the model gets right.
    chosen = int(np.flatnonzero((held_out_class == 7) & (probabilities.argmax(axis=1) == 7))[0])
    picture = held_out[chosen]
    (folder / "digit.png").write_bytes(png(picture))
    request = {
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": picture.astype(int).ravel().tolist()}],
        "outputs": [{"name": "probabilities", "parameters": {"classification": 1}}],
    }
    (folder / "digit.json").write_text(json.dumps(request) + "\n")
    print(f"digit.png: a seven, probability {probabilities[chosen, 7]:.4f}")
    size = sum(file.stat().st_size for file in models.rglob("*") if file.is_file())
    print(f"{size / 1e6:.2f} MB of models")
    assert size < 2e6, "the examples are to stay under 2 MB"


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent / "examples")
