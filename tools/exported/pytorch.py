"""Models of PyTorch, exported by both of its exporters: the older one by TorchScript, and the newer one by
torch.export (`dynamo=True`, the default since PyTorch 2.9)."""

import pathlib
import tempfile

import numpy as np
import torch
from torch import nn

from .export import SEED, Export, Group

GROUP = Group()
PACKAGES = ("torch", "onnx", "onnxscript", "numpy")
TORCHSCRIPT, DYNAMO = "torch.onnx, dynamo=False", "torch.onnx, dynamo=True"


def export(module, arguments, *, exporter, names, outputs, **options):
    """Exports a module into a folder of its own, since weights may come in a file beside the model."""
    folder = pathlib.Path(tempfile.mkdtemp())
    torch.onnx.export(module, arguments, folder / "model.onnx", input_names=names, output_names=outputs,
                      dynamo=exporter is DYNAMO, **options)
    return folder


def pytorch(module, example, rows, *, exporter, names, outputs=("output",), how="", packages=PACKAGES, framework="PyTorch", **options):
    """A module as `exporter` writes it for the arguments `example`, and its answers for `rows`."""
    module.eval()
    folder = export(module, tuple(map(torch.tensor, example)), exporter=exporter, names=list(names), outputs=list(outputs), **options)
    with torch.no_grad():
        answers = module(*map(torch.tensor, rows))
    answers = answers if isinstance(answers, (tuple, list)) else [answers]
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    how = f"torch.onnx.export({how or type(module).__name__}, dynamo={exporter is DYNAMO}{arguments and ', ' + arguments})"
    return Export(framework, exporter, packages, folder, dict(zip(names, rows)),
                  {name: answer.numpy() for name, answer in zip(outputs, answers)}, how)


def drawn(*shape):
    """Random eighths, which a compressed file holds in few bytes."""
    return (np.random.default_rng(SEED).normal(size=shape) * 8).round().astype(np.float32) / 8


def seeded(make):
    torch.manual_seed(SEED)
    return make()


def batch(names, exporter, axes=(0,), outputs=("output",)):
    """The option that lets sizes vary: the batch, and the other axes that are named."""
    named = {axis: f"d{axis}" for axis in axes} | {0: "batch"}
    if exporter is DYNAMO:
        dims = {axis: torch.export.Dim(name) for axis, name in named.items()}
        return {"dynamic_shapes": tuple(dims for _ in names)}
    return {"dynamic_axes": {name: {0: "batch"} if name in outputs else named for name in (*names, *outputs)}}


class Cnn(nn.Module):
    """Convolutions, normalisation, pooling of two kinds, a classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, groups=4), nn.SiLU(), nn.Conv2d(16, 16, 1), nn.GELU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(16, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1)).softmax(1)


class Recurrent(nn.Module):
    """A recurrent layer, both ways, over a sequence; the last step is classified."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer(6, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Segmenter(nn.Module):
    """A picture of any size to a map of the same size: strides, a transposed convolution, a resize."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.deeper = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        first = self.down(x).relu()
        second = self.up(self.deeper(first).relu())
        return nn.functional.interpolate(self.out(torch.cat([first, second], 1)), scale_factor=2.0, mode="bilinear", align_corners=False)


class Encoder(nn.Module):
    """Numbered words through a transformer encoder to a mean vector."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.places = nn.Parameter(torch.randn(64, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        return self.layers(self.words(ids) + self.places[: ids.shape[1]]).mean(1)


class Lookup(nn.Module):
    """A table of 1.5 M weights: 6 MB."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12_000, 128)
        self.head = nn.Linear(128, 8)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1)).tanh()


class Several(nn.Module):
    """Two inputs of different datatypes, three outputs: one of each datatype that answers commonly have."""

    def forward(self, x, n):
        score = x * n.unsqueeze(1).to(x.dtype)
        return score, score.argmax(1), score.sum(1) > 0


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


def each_exporter(name, make, example, rows, names=("x",), axes=(0,), outputs=("output",), **options):
    """Two models: `name` by either exporter, with a varying batch."""
    for suffix, exporter in (("torchscript", TORCHSCRIPT), ("dynamo", DYNAMO)):
        def made(exporter=exporter):
            return pytorch(seeded(make), example, rows, exporter=exporter, names=names, outputs=outputs,
                           **batch(names, exporter, axes, outputs), **options)

        GROUP[f"torch_{name}_{suffix}"] = made


PICTURE, SEQUENCE = drawn(4, 3, 16, 16), drawn(5, 9, 6)
IDS = np.random.default_rng(SEED).integers(0, 100, (4, 11))

each_exporter("cnn", Cnn, [PICTURE[:2]], [PICTURE])
each_exporter("mlp", mlp, [drawn(2, 16)], [drawn(5, 16)])
each_exporter("lstm", lambda: Recurrent(nn.LSTM), [SEQUENCE[:2]], [SEQUENCE])
each_exporter("gru", lambda: Recurrent(nn.GRU), [SEQUENCE[:2]], [SEQUENCE])
each_exporter("several", Several, [drawn(2, 3), np.array([1, 2])], [drawn(4, 3), np.array([3, -1, 0, 2])], names=("x", "n"),
              outputs=("score", "best", "positive"))


@GROUP.model
def torch_encoder_torchscript():
    """No dynamic axes: the older exporter writes the example's sizes into attention, and no engine answers others."""
    return pytorch(seeded(Encoder), [IDS], [IDS], exporter=TORCHSCRIPT, names=["ids"])


@GROUP.model
def torch_encoder_dynamo():
    return pytorch(seeded(Encoder), [IDS[:2, :7]], [IDS], exporter=DYNAMO, names=["ids"], **batch(["ids"], DYNAMO, (0, 1)))


@GROUP.model
def torch_segmenter_torchscript():
    axes = {0: "batch", 2: "height", 3: "width"}
    return pytorch(seeded(Segmenter), [drawn(1, 3, 32, 32)], [drawn(2, 3, 24, 16)], exporter=TORCHSCRIPT, names=["image"],
                   dynamic_axes={"image": axes, "output": axes})


@GROUP.model
def torch_segmenter_dynamo():
    # Multiples of 4, as the strides want them.
    axes = {0: torch.export.Dim("batch"), 2: 4 * torch.export.Dim("h4"), 3: 4 * torch.export.Dim("w4")}
    return pytorch(seeded(Segmenter), [drawn(2, 3, 32, 32)], [drawn(2, 3, 24, 16)], exporter=DYNAMO, names=["image"], dynamic_shapes=(axes,))


@GROUP.model
def torch_fixed_torchscript():
    """No dynamic axes: one item at a time, as the first line of many tutorials makes it."""
    return pytorch(seeded(Cnn), [PICTURE[:1]], [PICTURE[:1]], exporter=TORCHSCRIPT, names=["x"])


@GROUP.model
def torch_fixed_dynamo():
    return pytorch(seeded(Cnn), [PICTURE[:1]], [PICTURE[:1]], exporter=DYNAMO, names=["x"])


@GROUP.model
def torch_fixed_batch_4():
    return pytorch(seeded(Cnn), [PICTURE[:4]], [PICTURE[:4]], exporter=TORCHSCRIPT, names=["x"])


@GROUP.model
def torch_external():
    """The newer exporter keeps weights beside the model, in `model.onnx.data`."""
    ids = np.random.default_rng(SEED).integers(0, 12_000, (5, 3))
    return pytorch(seeded(Lookup), [ids[:2]], [ids], exporter=DYNAMO, names=["ids"], **batch(["ids"], DYNAMO))


@GROUP.model
def torch_float64():
    x = drawn(5, 16).astype(np.float64)
    made = pytorch(seeded(mlp).double(), [x[:2]], [x], exporter=DYNAMO, names=["x"], **batch(["x"], DYNAMO))
    made.tolerance, made.because = (1e-9, 1e-9), "double precision on both sides"
    return made


@GROUP.model
def torch_half():
    """`module.half()`: weights, inputs and outputs in half precision."""
    x = PICTURE.astype(np.float16)
    made = pytorch(seeded(Cnn).half(), [x[:2]], [x], exporter=DYNAMO, names=["x"], **batch(["x"], DYNAMO))
    made.tolerance, made.because = (5e-3, 1e-3), "half precision has 11 bits"
    return made


@GROUP.model
def torch_old_opset():
    """Opset 9, as models of 2019 have it."""
    return pytorch(seeded(mlp), [drawn(2, 16)], [drawn(5, 16)], exporter=TORCHSCRIPT, names=["x"], opset_version=9,
                   **batch(["x"], TORCHSCRIPT))


@GROUP.model
def torch_newest_opset():
    """The newest opset that the exporter takes."""
    from torch.onnx._internal.exporter import _constants

    newest = getattr(_constants, "TORCHLIB_OPSET", 23)
    return pytorch(seeded(Cnn), [PICTURE[:2]], [PICTURE], exporter=DYNAMO, names=["x"], opset_version=max(23, newest), **batch(["x"], DYNAMO))


@GROUP.model
def torch_default_names():
    """No names given: the exporter makes them."""
    module = seeded(Cnn).eval()
    folder = pathlib.Path(tempfile.mkdtemp())
    torch.onnx.export(module, (torch.tensor(PICTURE[:1]),), folder / "model.onnx", dynamo=False)
    import onnx

    graph = onnx.load(folder / "model.onnx").graph
    with torch.no_grad():
        answer = module(torch.tensor(PICTURE[:1])).numpy()
    return Export("PyTorch", TORCHSCRIPT, PACKAGES, folder, {graph.input[0].name: PICTURE[:1]}, {graph.output[0].name: answer},
                  "torch.onnx.export(Cnn, dynamo=False), without names")
