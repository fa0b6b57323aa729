#!/usr/bin/env python3
"""Models as the exporters of the frameworks write them, and whether Downbeat answers as the frameworks do.

    pip install -r tools/exporters_requirements.txt
    tools/exporters.py FOLDER [MODEL ...] [--part PART]     # makes the models, or some of them
    tools/exporters.py FOLDER --store tests/clients/exported   # copies the models that CI tests without the frameworks

    pip install -r tests/clients/requirements.txt           # in another environment
    tools/exporters.py FOLDER --judge target/ci/downbeat    # serves each on each engine, and compares the answers
    tools/exporters.py FOLDER --judge target/ci/downbeat --write docs/results/exporters.md

If packages of a part are missing, the script names them and makes the other parts. The script downloads no models:
models are trained on small data, or have random weights. Each model gets a folder:

- `model.onnx`, and the file of its weights if the exporter made one;
- `inputs.npz`, and `outputs.npz` with the answers of the framework itself;
- `about.json`: framework, exporter, versions, the call that exported it, opsets, IR, tolerance with its reason.
"""

import argparse
import importlib
import json
import pathlib
import re
import shutil
import sys
import tempfile
import traceback
import warnings

# A module of `exported`, and the packages that it needs first.
PARTS = {
    "light": "scikit-learn, skl2onnx, lightgbm, xgboost-cpu, onnxmltools",
    "pytorch": "torch, onnxscript",
    "hugging_face": "transformers, torch, onnxscript",
    "keras_models": "tensorflow-cpu, tf2onnx",
    "smaller": "onnxruntime, onnxconverter-common",
}
# Small models of the frameworks that take long to install: one of each kind.
STORED = [
    "torch_cnn_torchscript", "torch_cnn_dynamo", "torch_gru_torchscript", "torch_segmenter_dynamo", "torch_several_torchscript",
    "torch_fixed_torchscript", "torch_old_opset", "torch_float64", "torch_half",
    "keras_cnn", "keras_lstm", "keras_two_inputs", "tf2onnx_saved_model_mlp", "tf2onnx_function_cnn",
    "transformers_classification_torchscript", "transformers_token_classification_torchscript", "transformers_embeddings_torchscript",
    "transformers_question_answering_torchscript",
    "int8_dynamic_keras_mlp", "int8_dynamic_torch_lstm_torchscript", "int8_qdq_torch_cnn_dynamo", "int8_operators_torch_cnn_torchscript",
    "fp16_keras_cnn", "fp16_torch_lstm_torchscript", "fp16_io_torch_mlp_torchscript", "onnx_newest", "newest_torch_cnn_torchscript",
]
ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: tools/exporters.py -->", "<!-- end of table -->"


def parts(names):
    """The modules that these Python packages suffice for."""
    for name in names:
        try:
            yield importlib.import_module(f"exported.{name}")
        except ModuleNotFoundError as error:
            print(f"{name}: not made, since {error.name} is missing; it needs {PARTS[name]}", file=sys.stderr)


def make(folder, chosen, names):
    """Makes models of the chosen parts. Returns how many failed."""
    warnings.simplefilter("ignore")
    failed = 0
    for part in parts(chosen):
        part.FOLDER = folder
        for name, function in part.GROUP.items():
            if names and name not in names:
                continue
            try:
                function().save(folder / name)
                print(f"{name}: made", flush=True)
            except Exception as error:  # noqa: BLE001: an exporter may fail in any way, and the others go on
                failed += 1
                traceback.print_exc()
                print(f"{name}: failed: {' '.join(str(error).split())[:200]}", flush=True)
    return failed


def judge(folder, names, program, page):
    """Judges models, prints the verdicts and writes the page. Returns how many no engine serves right."""
    sys.path.insert(0, str(ROOT / "tests" / "clients"))
    from exported import judge as judging
    from serving import Server

    verdicts = []
    with tempfile.TemporaryDirectory() as scratch:
        for verdict in judging.judge_all(Server, program, folder, pathlib.Path(scratch), names):
            verdicts.append(verdict)
            said = f"{verdict.model:45} {verdict.engine:12} {judging.cell(verdict):6} {verdict.difference:8.1g}"
            print(said, verdict.message or verdict.repaired, flush=True)
    right = {verdict.model for verdict in verdicts if verdict.right}
    (folder / "verdicts.json").write_text(json.dumps([vars(verdict) for verdict in verdicts], indent=1) + "\n")
    models = {verdict.model for verdict in verdicts}
    for engine in judging.ENGINES:
        print(f"{engine}: {sum(verdict.right for verdict in verdicts if verdict.engine == engine)} of {len(models)} right")
    print(f"one or the other: {len(right)} of {len(models)}; none: {', '.join(sorted(models - right)) or '-'}")
    if page:
        text = page.read_text()
        table = judging.table(folder, verdicts)
        page.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{table}\n{END}", text, flags=re.DOTALL))
    return len(models - right)


def store(folder, place):
    """Copies the models that CI tests without their frameworks."""
    for name in STORED:
        shutil.copytree(folder / name, place / name, dirs_exist_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the folder of the exported models")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these")
    parser.add_argument("--judge", type=pathlib.Path, metavar="PROGRAM", help="serve the models with this `downbeat`, and compare")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="with --judge: put the table into this page")
    parser.add_argument("--part", choices=PARTS, action="append", help="make only the models of this part")
    parser.add_argument("--store", type=pathlib.Path, metavar="PLACE", help="copy the models for CI from the folder to this place")
    args = parser.parse_intermixed_args()
    if args.store:
        store(args.folder, args.store)
    elif args.judge:
        sys.exit(1 if judge(args.folder, args.models, args.judge.resolve(), args.write) else 0)
    else:
        sys.exit(1 if make(args.folder, args.part or PARTS, args.models) else 0)


if __name__ == "__main__":
    main()
