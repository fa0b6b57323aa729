"""Whether Downbeat serves exported models, and answers as the framework that they come from."""

import dataclasses
import json
import pathlib
import re
import shutil

import numpy as np
import requests
import tritonclient.http
from tritonclient.utils import np_to_triton_dtype

ENGINES = ("rten", "onnxruntime")
OPTIONS = '[model_control]\nmode = "explicit"\n'


@dataclasses.dataclass
class Verdict:
    """How a model fares on an engine: `served`, and right up to `difference`, or else `message` says why not."""

    model: str
    engine: str
    served: bool
    right: bool
    difference: float
    message: str
    repaired: str


def named(folder):
    """The folders of exported models in a folder."""
    return sorted(path for path in pathlib.Path(folder).iterdir() if (path / "about.json").is_file())


def arrays(path):
    with np.load(path) as file:
        return dict(file)


def repository(exported, folder, engine):
    """A model repository of exported models, each bound to an engine; gives the options that bind them."""
    options = f'engine = "{engine}"\n' + OPTIONS
    for model in exported:
        version = folder / "models" / model.name / "1"
        version.mkdir(parents=True, exist_ok=True)
        for file in model.iterdir():
            if file.suffix not in (".npz", ".json"):
                shutil.copy(file, version / file.name)
        options += f'[models.{model.name}]\nengine = "{engine}"\n'
    path = folder / f"{engine}.toml"
    path.write_text(options)
    return folder / "models", ["--config", str(path), "--no-profiling", "--allow-empty"]


def load(server, model):
    """None, or the server's message about a model that it cannot load."""
    answer = requests.post(f"{server.url}/v2/repository/models/{model}/load", timeout=300)
    return None if answer.ok else answer.json().get("error", answer.text)


def ask(server, model, inputs):
    """The outputs of a model for these inputs, by Triton's client."""
    with tritonclient.http.InferenceServerClient(server.http, network_timeout=120) as client:
        asked = []
        for name, array in inputs.items():
            array = array.astype(np.object_) if array.dtype.kind == "U" else array
            value = tritonclient.http.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            value.set_data_from_numpy(array, binary_data=True)
            asked.append(value)
        answer = client.infer(model, asked)
        return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def texts(array):
    """An array of strings, however they came."""
    return np.array([text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel()])


def difference(expected, found, tolerance):
    """(the largest difference of two sets of outputs, what is wrong or None)."""
    largest, wrong = 0.0, []
    for name, array in expected.items():
        if name not in found:
            wrong.append(f"no output '{name}', but {', '.join(found)}")
        # A single number of each row is served as [rows, 1], as Triton asks for it.
        elif found[name].shape not in (array.shape, (*array.shape, 1)):
            wrong.append(f"'{name}' has the shape {list(found[name].shape)} in place of {list(array.shape)}")
        elif array.dtype.kind == "U":
            if list(texts(found[name])) != list(texts(array)):
                wrong.append(f"'{name}' has other texts")
        else:
            apart = np.abs(found[name].astype(np.float64).reshape(array.shape) - array.astype(np.float64))
            largest = np.fmax(largest, float(apart.max(initial=0.0)))
            if array.dtype.kind != "f" and apart.any():
                wrong.append(f"'{name}' has other whole numbers")
            # Written so that a NaN is wrong too.
            elif not (apart <= tolerance["absolute"] + tolerance["relative"] * np.abs(array)).all():
                wrong.append(f"'{name}' is {apart.max():.2g} away")
    return largest, "; ".join(wrong) or None


def judge(server, model, engine):
    """The verdict on the exported model in a folder, on a server that is bound to an engine."""
    before = len(server.log)
    message = load(server, model.name)
    if message is not None:
        return Verdict(model.name, engine, False, False, 0.0, message, "")
    repaired = repairs(server.log[before:])
    about = json.loads((model / "about.json").read_text())
    try:
        found = ask(server, model.name, arrays(model / "inputs.npz"))
    except tritonclient.utils.InferenceServerException as error:
        return Verdict(model.name, engine, False, False, 0.0, f"loaded, but the request failed: {error.message()}", repaired)
    apart, wrong = difference(arrays(model / "outputs.npz"), found, about["tolerance"])
    return Verdict(model.name, engine, True, wrong is None, apart, wrong or "", repaired)


def repairs(log):
    """What the server's log says about changes of a model."""
    said = re.findall(r"repaired before loading: (.*?) model=|runs by other operators[^:]*: (.*?) model=", log)
    return "; ".join(repaired or f"on rten other operators for {replaced}" for repaired, replaced in said)


def judge_all(server_class, program, folder, scratch, names=(), engines=ENGINES):
    """Verdicts on all exported models of a folder (or on `names`), one after the other, for each engine."""
    exported = [model for model in named(folder) if not names or model.name in names]
    for engine in engines:
        place = scratch / engine
        place.mkdir(parents=True)
        models, flags = repository(exported, place, engine)
        with server_class(program, models, place, *flags, engine=engine) as server:
            for model in exported:
                yield judge(server, model, engine)


def versions(about):
    """Opsets and IR of a model, in a few words."""
    short = {"ai.onnx": "", "ai.onnx.ml": "ml "}
    sets = [f"{short[domain]}{number}" for domain, number in sorted(about["opset"].items()) if domain in short]
    return f"{', '.join(sets)} / {about['ir']}"


def cell(verdict):
    """One verdict in a table."""
    return "right" if verdict.right else "wrong" if verdict.served else "no"


def table(folder, verdicts):
    """The rows of the page, in Markdown: one for each model."""
    rows = ["| Model | Exporter | Opset / IR | rten | onnxruntime | Largest difference | Repaired |", "|---|---|---|---|---|---|---|"]
    by_model = {}
    for verdict in verdicts:
        by_model.setdefault(verdict.model, {})[verdict.engine] = verdict
    for name, found in by_model.items():
        about = json.loads((pathlib.Path(folder) / name / "about.json").read_text())
        served = [verdict for verdict in found.values() if verdict.served]
        apart = f"{max(verdict.difference for verdict in served):.1g}" if served else "–"
        mended = "; ".join(sorted({verdict.repaired for verdict in served} - {""})) or "–"
        rows.append(f"| `{name}` | {about['exporter']} | {versions(about)} | {' | '.join(cell(found[engine]) for engine in ENGINES)} | {apart} | {mended} |")
    return "\n".join(rows) + "\n"
