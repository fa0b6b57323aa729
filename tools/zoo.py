#!/usr/bin/env python3
"""Writes larger graphs with random weights, in the model repository's layout, for engine tests and benchmarks.

    pip install -r tools/requirements.txt && python tools/zoo.py [--check] [--pixels N] [FOLDER] [MODEL ...]

FOLDER is target/zoo unless said otherwise; without MODEL all are written. With --pixels the pictures are N x N, a multiple of 32, where
the whole ones would take a few cores too long. The files are never committed. Latency depends on
the graph and not on the values of its weights, so these stand for the trained models; answers can be compared between
engines, not with a label.

- `resnet50`: ResNet-50 v1.5, `input` FP32 [N, 3, 224, 224] to `output` FP32 [N, 1000]; 25.5 M weights.
- `resnet152`, `vgg19`: the same input and output; 60 M and 144 M weights.
- `unet`, `linknet`: segmentation, `input` FP32 [N, 3, 256, 256] to `output` FP32 [N, 2, 256, 256]; 2 M and 11 M weights.
- `mobilenetv2`: MobileNetV2 1.0, the same input and output; 3.5 M weights.
- `bert`: a BERT-base-like encoder, `input_ids` and `attention_mask` INT64 [N, T] (ids below 30522, T up to 512) to `hidden`
  FP32 [N, T, 768]; 109 M weights.
- `bertlarge`: the same with the sizes of BERT-large: 24 layers, 1024 wide; 334 M weights.
- `exits`: a small classifier with two exits, `input` FP32 [N, 64] to `early` and `late` FP32 [N, 10]; 0.1 M weights.
- `widemlp`: 1024-4096-4096-1024-10, 25 M weights: reading them costs far more than a request's arithmetic, so it shows
  what batching is worth.
- `trees`: 300 regression trees of depth 6, as gradient boosting makes them, `input` FP32 [N, 32] to `output` FP32 [N, 1].
  The built-in engine has no trees.
"""
import argparse
import pathlib
import time

import numpy as np
from onnx import TensorProto

from graph import Graph

SEED = 0
# Height and width of pictures, if not each model's own.
PIXELS = None


def picture(pixels):
    """Height and width of a model's pictures."""
    return [PIXELS or pixels] * 2


def residual(name, blocks):
    """A ResNet of version 1.5 with bottleneck blocks, so many in each of four stages (He et al. 2015, table 1)."""
    graph = Graph(name, SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 3, *picture(224)])
    value = graph.convolution(value, 3, 64, 7, stride=2)
    value = graph.node("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, (width, count) in enumerate(zip([64, 128, 256, 512], blocks)):
        for block in range(count):
            # Version 1.5: the 3x3 convolution strides, not the 1x1 before it.
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut = value
            if block == 0:
                shortcut = graph.convolution(value, channels, 4 * width, 1, stride=stride, activation=None)
            inner = graph.convolution(value, channels, width, 1)
            inner = graph.convolution(inner, width, width, 3, stride=stride)
            # A small residual branch keeps activations in range through many random blocks.
            inner = graph.convolution(inner, width, 4 * width, 1, activation=None, scale=1 / sum(blocks) ** 0.5)
            value = graph.node("Relu", graph.node("Add", inner, shortcut))
            channels = 4 * width
    value = graph.node("Flatten", graph.node("GlobalAveragePool", value), axis=1)
    graph.output(graph.dense(value, 2048, 1000), "output", TensorProto.FLOAT, ["N", 1000])
    return graph


def resnet50():
    return residual("resnet50", [3, 4, 6, 3])


def resnet152():
    return residual("resnet152", [3, 8, 36, 3])


def vgg19():
    graph = Graph("vgg19", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 3, *picture(224)])
    channels = 3
    # Simonyan and Zisserman 2015, configuration E: channels, convolutions before each pooling.
    for width, count in [(64, 2), (128, 2), (256, 4), (512, 4), (512, 4)]:
        for _ in range(count):
            value = graph.convolution(value, channels, width, 3)
            channels = width
        value = graph.node("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])
    value = graph.node("Flatten", value, axis=1)
    for inputs, outputs in [(512 * (picture(224)[0] // 32) ** 2, 4096), (4096, 4096)]:
        value = graph.dense(value, inputs, outputs, "Relu")
    graph.output(graph.dense(value, 4096, 1000), "output", TensorProto.FLOAT, ["N", 1000])
    return graph


def doubled(graph, value):
    """Twice the height and width, each pixel repeated."""
    scales = graph.constant(np.array([1, 1, 2, 2], np.float32))
    return graph.node("Resize", value, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric",
                      nearest_mode="floor")


def unet():
    graph = Graph("unet", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 3, *picture(256)])
    channels, skips = 3, []
    # Ronneberger et al. 2015, padded so that sizes stay, a quarter of its channels.
    for width in [16, 32, 64, 128]:
        value = graph.convolution(graph.convolution(value, channels, width, 3), width, width, 3)
        skips.append((value, width))
        value = graph.node("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])
        channels = width
    value = graph.convolution(graph.convolution(value, channels, 256, 3), 256, 256, 3)
    channels = 256
    for skip, width in reversed(skips):
        value = graph.convolution(doubled(graph, value), channels, width, 3)
        value = graph.node("Concat", skip, value, axis=1)
        value = graph.convolution(graph.convolution(value, 2 * width, width, 3), width, width, 3)
        channels = width
    graph.output(graph.convolution(value, channels, 2, 1, activation=None), "output", TensorProto.FLOAT, ["N", 2, *picture(256)])
    return graph


def linknet():
    graph = Graph("linknet", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 3, *picture(256)])
    value = graph.convolution(value, 3, 64, 7, stride=2)
    value = graph.node("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels, skips = 64, []
    # Chaurasia and Culurciello 2017: a ResNet-18 encoder, whose stages are added to the decoder's.
    for stage, width in enumerate([64, 128, 256, 512]):
        skips.append((value, channels))
        for block in range(2):
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut = value
            if stride == 2:
                shortcut = graph.convolution(value, channels, width, 1, stride=2, activation=None)
            inner = graph.convolution(value, channels, width, 3, stride=stride)
            inner = graph.convolution(inner, width, width, 3, activation=None, scale=0.5)
            value = graph.node("Relu", graph.node("Add", inner, shortcut))
            channels = width
    for stage, (skip, width) in reversed(list(enumerate(skips))):
        value = graph.convolution(value, channels, channels // 4, 1)
        if stage > 0:
            value = doubled(graph, value)
        value = graph.convolution(value, channels // 4, channels // 4, 3)
        value = graph.convolution(value, channels // 4, width, 1)
        value = graph.node("Add", value, skip)
        channels = width
    value = graph.convolution(doubled(graph, value), 64, 32, 3)
    value = graph.convolution(doubled(graph, value), 32, 32, 3)
    graph.output(graph.convolution(value, 32, 2, 1, activation=None), "output", TensorProto.FLOAT, ["N", 2, *picture(256)])
    return graph


def mobilenetv2():
    graph = Graph("mobilenetv2", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 3, *picture(224)])
    value = graph.convolution(value, 3, 32, 3, stride=2, activation="Clip")
    channels = 32
    # Sandler et al. 2018, table 2: expansion, channels, blocks, stride of the first block.
    for expansion, width, blocks, stride in [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
                                             (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]:
        for block in range(blocks):
            step, inner, expanded = stride if block == 0 else 1, value, channels * expansion
            if expansion > 1:
                inner = graph.convolution(inner, channels, expanded, 1, activation="Clip")
            inner = graph.convolution(inner, expanded, expanded, 3, stride=step, groups=expanded, activation="Clip")
            inner = graph.convolution(inner, expanded, width, 1, activation=None)
            value = graph.node("Add", inner, value) if step == 1 and channels == width else inner
            channels = width
    value = graph.convolution(value, channels, 1280, 1, activation="Clip")
    value = graph.node("Flatten", graph.node("GlobalAveragePool", value), axis=1)
    graph.output(graph.dense(value, 1280, 1000), "output", TensorProto.FLOAT, ["N", 1000])
    return graph


def encoder(name, width, heads, inner, layers):
    """An encoder with the sizes of a BERT (Devlin et al. 2019, section 3)."""
    graph = Graph(name, SEED)
    ids = graph.input("input_ids", TensorProto.INT64, ["N", "T"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["N", "T"])
    hidden = graph.encoder(ids, mask, vocabulary=30522, positions=512, width=width, heads=heads, inner=inner, layers=layers,
                           as_pytorch=True)
    graph.output(hidden, "hidden", TensorProto.FLOAT, ["N", "T", width])
    return graph


def bert():
    return encoder("bert", width=768, heads=12, inner=3072, layers=12)


def bertlarge():
    return encoder("bertlarge", width=1024, heads=16, inner=4096, layers=24)


def exits():
    """A classifier with two exits: the first gives probabilities after a third of its residual layers."""
    graph = Graph("exits", SEED)
    value = graph.dense(graph.input("input", TensorProto.FLOAT, ["N", 64]), 64, 96, "Relu")
    for layer in range(9):
        inner = graph.node("Mul", graph.dense(value, 96, 96, "Relu"), graph.constant(np.float32(0.3)))
        value = graph.node("Add", value, inner)
        if layer == 2:
            probabilities = graph.node("Softmax", graph.dense(value, 96, 10), axis=-1)
            graph.output(probabilities, "early", TensorProto.FLOAT, ["N", 10])
    graph.output(graph.node("Softmax", graph.dense(value, 96, 10), axis=-1), "late", TensorProto.FLOAT, ["N", 10])
    return graph


def widemlp():
    graph = Graph("widemlp", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 1024])
    for inputs, outputs in [(1024, 4096), (4096, 4096), (4096, 1024)]:
        value = graph.dense(value, inputs, outputs, "Relu")
    graph.output(graph.dense(value, 1024, 10), "output", TensorProto.FLOAT, ["N", 10])
    return graph


def trees():
    graph = Graph("trees", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 32])
    graph.output(graph.trees(value, features=32, trees=300, depth=6), "output", TensorProto.FLOAT, ["N", 1])
    return graph


# Model, largest batch, SLO in ms.
ZOO = {
    resnet50: (16, 500), resnet152: (16, 1500), vgg19: (16, 2500), unet: (16, 1000), linknet: (16, 500),
    mobilenetv2: (16, 250), bert: (8, 2000), bertlarge: (8, 6000), widemlp: (32, 50), exits: (64, 20), trees: (128, 20),
}

CONFIG = """\
# Written by tools/zoo.py.
max_batch_size: {batch}
dynamic_batching {{ }}
parameters {{
  key: "slo_ms"
  value {{ string_value: "{slo_ms}" }}
}}
"""


def check(path, name):
    """Runs the model at batch 1 and 2; finite numbers that do not depend on the neighbour in the batch are expected."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    random = np.random.default_rng(SEED)
    feed = {}
    for entry in session.get_inputs():
        shape = [{"N": 2, "T": 16}.get(size, size) for size in entry.shape]
        if entry.type == "tensor(float)":
            feed[entry.name] = random.standard_normal(shape, dtype=np.float32)
        else:
            feed[entry.name] = random.integers(1, 2 if "mask" in entry.name else 1000, shape)
    started = time.perf_counter()
    both = session.run(None, feed)[0]
    seconds = time.perf_counter() - started
    alone = session.run(None, {key: value[:1] for key, value in feed.items()})[0]
    assert np.isfinite(both).all(), f"{name}: not finite"
    assert np.allclose(both[:1], alone, rtol=1e-3, atol=1e-4 * np.abs(both).max()), f"{name}: batch 2 differs from batch 1"
    print(f"{name}: checked, batch of 2 in {1e3 * seconds:.0f} ms, outputs of {both.std():.3g} standard deviation")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run each model with ONNX Runtime")
    parser.add_argument("--pixels", type=int, metavar="N", help="height and width of pictures, a multiple of 32")
    parser.add_argument("folder", nargs="?", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent / "target/zoo")
    names = [make.__name__ for make in ZOO]
    # argparse checks the default of a positional against `choices`, so they are checked here.
    parser.add_argument("models", nargs="*", metavar="MODEL", help=" ".join(names))
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(names)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are {', '.join(names)}")

    if (arguments.pixels or 32) % 32 or arguments.pixels == 0:
        parser.error(f"--pixels {arguments.pixels}: expected a multiple of 32")
    global PIXELS
    PIXELS = arguments.pixels

    for make, (batch, slo_ms) in ZOO.items():
        name = make.__name__
        if arguments.models and name not in arguments.models:
            continue
        path = arguments.folder / name / "1" / "model.onnx"
        make().save(path)
        (arguments.folder / name / "config.pbtxt").write_text(CONFIG.format(batch=batch, slo_ms=slo_ms))
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
        if arguments.check:
            check(path, name)


if __name__ == "__main__":
    main()
