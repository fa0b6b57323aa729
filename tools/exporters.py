#!/usr/bin/env python3
"""Models as the exporters of the frameworks write them, and whether Downbeat answers as the frameworks do.

    tools/exporters.py FOLDER [MODEL ...]                   # makes the models, or some of them
    tools/exporters.py FOLDER --judge target/ci/downbeat    # serves each on each engine, and compares the answers
    tools/exporters.py FOLDER --judge target/ci/downbeat --write docs/results/exporters.md

No package has all frameworks beside each other. Make one virtual environment for each part of
exporters_requirements.txt, and run the first command with each: it makes the models whose packages are there, and
names the packages of the others. The judge needs the packages of tests/clients/requirements.txt.

Nothing is downloaded: models are trained on small data, or have random weights. Each gets a folder:

- `model.onnx`, and the file of its weights if the exporter made one;
- `inputs.npz`, and `outputs.npz` with the answers of the framework itself;
- `about.json`: framework, exporter, versions, the call that exported it, opsets, IR, tolerance with its reason.
"""

import argparse
import importlib
import json
import pathlib
import re
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
ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: tools/exporters.py -->", "<!-- end of table -->"


def parts(names):
    """The modules that these Python packages suffice for."""
    for name in names:
        try:
            yield importlib.import_module(f"exported.{name}")
        except ModuleNotFoundError as error:
            print(f"{name}: not made, since {error.name} is missing; it needs {PARTS[name]}", file=sys.stderr)


def make(folder, names):
    """Makes models. Returns how many failed."""
    warnings.simplefilter("ignore")
    failed = 0
    for part in parts(PARTS):
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

    with tempfile.TemporaryDirectory() as scratch:
        verdicts = judging.judge_all(Server, program, folder, pathlib.Path(scratch), names)
    right = {verdict.model for verdict in verdicts if verdict.right}
    for verdict in sorted(verdicts, key=lambda verdict: verdict.model):
        print(f"{verdict.model:45} {verdict.engine:12} {judging.cell(verdict):6} {verdict.difference:8.1g} {verdict.message or verdict.repaired}")
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the folder of the exported models")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these")
    parser.add_argument("--judge", type=pathlib.Path, metavar="PROGRAM", help="serve the models with this `downbeat`, and compare")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="with --judge: put the table into this page")
    args = parser.parse_args()
    if args.judge:
        failed = judge(args.folder, args.models, args.judge.resolve(), args.write)
    else:
        failed = make(args.folder, args.models)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
