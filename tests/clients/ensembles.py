"""Ensembles made for a test.

`python ensembles.py FOLDER` writes an example: the ensemble `chain` of three models, and the ensemble `fork`.
"""
import json
import pathlib
import sys

import numpy as np
from onnx import TensorProto

import models
from graph import Graph

# A tensor of `models.add`.
FOUR = ("TYPE_FP32", [4])


def step(model, inputs, outputs, version=-1):
    """A step: names of the model's tensors, each with the tensor of the ensemble."""
    return {"model_name": model, "model_version": version, "input_map": inputs, "output_map": outputs}


def config(steps, inputs, outputs, max_batch_size=8, more=""):
    """The configuration of an ensemble. Tensors are {name: (type, dims)}; a third part is text for the tensor."""
    def quoted(maps):
        return " ".join(f'{which} {{ key: "{name}" value: "{tensor}" }}' for which, names in maps for name, tensor in names.items())

    def tensor(which, name, data_type, dims, extra=""):
        return f'{which} [ {{ name: "{name}" data_type: {data_type} dims: {json.dumps(dims)} {extra} }} ]'

    lines = ['platform: "ensemble"', f"max_batch_size: {max_batch_size}"]
    lines += [tensor("input", name, *parts) for name, parts in inputs.items()]
    lines += [tensor("output", name, *parts) for name, parts in outputs.items()]
    lines.append("ensemble_scheduling {")
    for one in steps:
        maps = quoted([("input_map", one["input_map"]), ("output_map", one["output_map"])])
        lines.append(f'  step [ {{ model_name: "{one["model_name"]}" model_version: {one["model_version"]} {maps} }} ]')
    return "\n".join([*lines, "}", more])


def write(repository, name, *args, **options):
    """Puts an ensemble into a repository, with an empty version folder as Triton wants it."""
    folder = pathlib.Path(repository) / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config(*args, **options))
    return folder


def chain(repository, name="chain", parts=(("plus1", 1), ("plus10", 10), ("plus100", 100)), more=""):
    """`in` FP32 [N, 4] to `out`, through a model for each part, which adds a number."""
    steps = []
    for at, (model, number) in enumerate(parts):
        if number is not None:
            models.add(repository, model, number)
        before, after = "in" if at == 0 else f"t{at}", "out" if at == len(parts) - 1 else f"t{at + 1}"
        steps.append(step(model, {"x": before}, {"y": after}))
    return write(repository, name, steps, {"in": FOUR}, {"out": FOUR}, more=more)


def join(repository, name="sum", config=""):
    """`a` and `b` FP32 [N, 4] to `y` = `a` - `b`."""
    graph = Graph(name)
    a, b = (graph.input(letter, TensorProto.FLOAT, ["N", 4]) for letter in "ab")
    graph.output(graph.node("Sub", a, b), "y", TensorProto.FLOAT, ["N", 4])
    return models.write(repository, name, graph, config)


def fork(repository, name="fork"):
    """`in` to `out` = (in + 1 + 10) - (in + 1 + 100), and `left` = in + 1 + 10."""
    for model, number in (("first", 1), ("left", 10), ("right", 100)):
        models.add(repository, model, number)
    join(repository)
    steps = [
        step("sum", {"a": "left", "b": "right"}, {"y": "out"}),
        step("left", {"x": "one"}, {"y": "left"}),
        step("right", {"x": "one"}, {"y": "right"}),
        step("first", {"x": "in"}, {"y": "one"}),
    ]
    return write(repository, name, steps, {"in": FOUR}, {"out": FOUR, "left": FOUR})


def unbatched(repository, name="unbatched", number=1):
    """`x` FP32 [4] to `y` = `x` + number, of a model without a batch dimension."""
    graph = Graph(name)
    x = graph.input("x", TensorProto.FLOAT, [4])
    graph.output(graph.node("Add", x, graph.constant(np.float32(number))), "y", TensorProto.FLOAT, [4])
    return models.write(repository, name, graph, "max_batch_size: 0")


if __name__ == "__main__":
    chain(sys.argv[1])
    fork(sys.argv[1])
