#!/usr/bin/env python3
"""Writes larger graphs with random weights, in the model repository's layout, for engine tests and benchmarks.

    pip install -r tools/requirements.txt && python tools/zoo.py [--check] [FOLDER] [MODEL ...]

FOLDER is target/zoo unless said otherwise; without MODEL all are written. The files are never committed. Latency depends on
the graph and not on the values of its weights, so these stand for the trained models; answers can be compared between
engines, not with a label.

- `resnet50`: ResNet-50 v1.5, `input` FP32 [N, 3, 224, 224] to `output` FP32 [N, 1000]; 25.5 M weights.
- `mobilenetv2`: MobileNetV2 1.0, the same input and output; 3.5 M weights.
- `bert`: a BERT-base-like encoder, `input_ids` and `attention_mask` INT64 [N, T] (ids below 30522, T up to 512) to `hidden`
  FP32 [N, T, 768]; 109 M weights.
- `widemlp`: 1024-4096-4096-1024-10, 25 M weights: reading them costs far more than a request's arithmetic, so it shows
  what batching is worth.
"""
import argparse
import pathlib
import time

import numpy as np
from onnx import TensorProto

from graph import Graph

SEED = 0


def resnet50():
    graph = Graph("resnet50", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 3, 224, 224])
    value = graph.convolution(value, 3, 64, 7, stride=2)
    value = graph.node("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            # Version 1.5: the 3x3 convolution strides, not the 1x1 before it.
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut = value
            if block == 0:
                shortcut = graph.convolution(value, channels, 4 * width, 1, stride=stride, activation=None)
            inner = graph.convolution(value, channels, width, 1)
            inner = graph.convolution(inner, width, width, 3, stride=stride)
            # A small residual branch keeps activations in range through 16 random blocks.
            inner = graph.convolution(inner, width, 4 * width, 1, activation=None, scale=0.25)
            value = graph.node("Relu", graph.node("Add", inner, shortcut))
            channels = 4 * width
    value = graph.node("Flatten", graph.node("GlobalAveragePool", value), axis=1)
    graph.output(graph.dense(value, 2048, 1000), "output", TensorProto.FLOAT, ["N", 1000])
    return graph


def mobilenetv2():
    graph = Graph("mobilenetv2", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 3, 224, 224])
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


def bert():
    graph = Graph("bert", SEED)
    ids = graph.input("input_ids", TensorProto.INT64, ["N", "T"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["N", "T"])
    hidden = graph.encoder(ids, mask, vocabulary=30522, positions=512, width=768, heads=12, inner=3072, layers=12)
    graph.output(hidden, "hidden", TensorProto.FLOAT, ["N", "T", 768])
    return graph


def widemlp():
    graph = Graph("widemlp", SEED)
    value = graph.input("input", TensorProto.FLOAT, ["N", 1024])
    for inputs, outputs in [(1024, 4096), (4096, 4096), (4096, 1024)]:
        value = graph.dense(value, inputs, outputs, "Relu")
    graph.output(graph.dense(value, 1024, 10), "output", TensorProto.FLOAT, ["N", 10])
    return graph


# Model, largest batch, SLO in ms.
ZOO = {resnet50: (16, 500), mobilenetv2: (16, 250), bert: (8, 2000), widemlp: (32, 50)}

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
    parser.add_argument("folder", nargs="?", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent / "target/zoo")
    names = [make.__name__ for make in ZOO]
    # argparse checks the default of a positional against `choices`, so they are checked here.
    parser.add_argument("models", nargs="*", metavar="MODEL", help=" ".join(names))
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(names)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are {', '.join(names)}")

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
