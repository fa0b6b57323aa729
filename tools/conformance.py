"""Which of the `onnx` package's node cases an engine answers right.

    cargo build -p downbeat-engine-ort --example conformance
    python tools/conformance.py                       # all cases, rten and onnxruntime
    python tools/conformance.py --sample rten         # what CI runs
    python tools/conformance.py --save after.json --before before.json --write docs/conformance.md

A case is a model of one operator, or of the operators that define it, with inputs and the outputs that the standard asks for. Each goes through Downbeat's engine
(crates/engine-ort/examples/conformance.rs) and is *passed* within the case's own tolerance, *wrong*, or *refused* by the engine with a reason. ORT_DYLIB_PATH names the
library of onnxruntime.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENGINES = ("rten", "onnxruntime")
# Operators whose output is drawn: only its datatype and shape are compared.
RANDOM = {"Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"}
# The cases that CI runs: those that an engine once got wrong, and one of each common operator.
SAMPLE = ROOT / "tools/conformance_sample.txt"
# Cases that an engine answers otherwise, and why that is left (docs/conformance.md): they fail no run.
KNOWN = {
    "rten": {"test_resize_downsample_scales_linear_align_corners": "the size that the output has"},
    "onnxruntime": {
        "test_resize_downsample_scales_(linear|cubic)_align_corners": "the size that the output has",
        "test_(dft|stft).*": "zero but for rounding",
        "test_training_dropout.*": "drawn numbers",
        "test_attention_4d_causal_fp16": "the last bit of a half float",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_.d_mask_causal": "negative infinity, or the least number",
        "test_maxunpool_export_with_output_shape": "what indices count",
    },
}
OUTCOMES = ("passed", "wrong", "refused")
# Explains the tables in the file of --write.
NOTE = """\
*Before* is an earlier run, whose file `--before` names. `(expanded functions)` counts the cases in which
the simpler operators that define an operator stand in its place.

"""
DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16", "object": "BYTES",
}


class NotATensor(Exception):
    """A value that the inference protocol cannot carry."""


def encoded(name, value):
    """A value as the runner reads it."""
    if not isinstance(value, (np.ndarray, np.generic)):
        raise NotATensor(f"'{name}' is no tensor")
    value = np.asarray(value)
    datatype = "BYTES" if value.dtype.kind in "USO" else DATATYPES.get(value.dtype.name)
    if datatype is None:
        raise NotATensor(f"'{name}' is of {value.dtype}")
    if datatype == "BYTES":
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in value.ravel()]
        data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    else:
        data = np.ascontiguousarray(value).tobytes()
    return {"name": name, "datatype": datatype, "shape": list(value.shape), "data": list(data)}


def decoded(value, like):
    """A tensor of the runner's answer, as the array that `like` is compared with."""
    data, shape = bytes(value["data"]), value["shape"]
    if value["datatype"] == "BYTES":
        texts, at = [], 0
        while at < len(data):
            length = int.from_bytes(data[at:at + 4], "little")
            texts.append(data[at + 4:at + 4 + length].decode())
            at += 4 + length
        return np.array(texts, dtype=object).reshape(shape)
    return np.frombuffer(data, dtype=like.dtype).reshape(shape)


def difference(value, expected, case, is_random):
    """The difference of an output from the expected one; `None` if they agree."""
    expected = np.asarray(expected)
    like = encoded(value["name"], expected)
    if (value["datatype"], value["shape"]) != (like["datatype"], like["shape"]):
        return f"{value['name']} is {value['datatype']}{value['shape']}, not {like['datatype']}{like['shape']}"
    got = decoded(value, expected)
    if is_random:
        return None
    if like["datatype"] == "BYTES":
        same = [text.decode() if isinstance(text, bytes) else str(text) for text in expected.ravel()] == list(got.ravel())
        return None if same else f"{value['name']} is {got.tolist()}, not {expected.tolist()}"
    if like["datatype"] == "BF16":
        got, expected = got.astype(np.float32), expected.astype(np.float32)
    try:
        np.testing.assert_allclose(got, expected, rtol=case.rtol, atol=case.atol)
    except AssertionError as error:
        return re.sub(r"\s+", " ", str(error)).strip()
    return None


class Runner:
    """An engine in a process of its own: a case that ends the process does not end the others."""

    def __init__(self, program, engine):
        self.command, self.process = [program, engine], None

    def ask(self, question):
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status, said = self.process.wait(), self.process.stderr.read()
            if status > 0 and status != 101:
                # The failure is not of the case: this build has no such engine.
                sys.exit(f"{self.command[1]} cannot be tried: {said.strip()}")
            return {"ended": f"the process ended ({status}): {said[-300:]}"}
        return json.loads(line)


def outcome(runner, case, folder):
    """(outcome, why) of a case."""
    path = folder / f"{case.name}.onnx"
    onnx.save(case.model, path)
    names = [value.name for value in case.model.graph.input]
    is_random = any(node.op_type in RANDOM for node in case.model.graph.node)
    for inputs, outputs in case.data_sets:
        try:
            values = [encoded(name, value) for name, value in zip(names, inputs)]
        except NotATensor as error:
            # The case cannot become a request. The runner says why the engine does not load the
            # model.
            values = []
            refusal = str(error)
        else:
            refusal = None
        answer = runner.ask({"model": str(path), "inputs": values})
        if "ended" in answer:
            return "wrong", answer["ended"]
        if "refused" in answer or refusal:
            return "refused", answer.get("refused", refusal).replace(str(path), path.name)
        if len(answer["outputs"]) != len(outputs):
            return "wrong", f"{len(answer['outputs'])} outputs, not {len(outputs)}"
        for value, expected in zip(answer["outputs"], outputs):
            if reason := difference(value, expected, case, is_random):
                return "wrong", reason
    path.unlink()
    return "passed", ""


def operator(case):
    """The operator that a case tests. A case whose operator is expanded to its definition is
    recognised by the case's name."""
    nodes = case.model.graph.node
    if "expanded" in case.name or not nodes:
        return "(expanded functions)"
    return nodes[0].op_type if len(nodes) == 1 else "(several)"


def whole(case):
    """A case with its model and data. Older packages keep them in files."""
    if case.model is not None:
        return case
    folder = pathlib.Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")

    def values(data_set, what, infos):
        read = []
        for index, info in enumerate(infos):
            path = data_set / f"{what}_{index}.pb"
            is_tensor = info.type.WhichOneof("value") == "tensor_type"
            read.append(numpy_helper.to_array(onnx.load_tensor(path)) if is_tensor else NotATensor)
        return read

    sets = sorted(folder.glob("test_data_set_*"))
    data_sets = [(values(one, "input", model.graph.input), values(one, "output", model.graph.output)) for one in sets]
    return dataclasses.replace(case, model=model, data_sets=data_sets)


def cases(names):
    with warnings.catch_warnings():
        # numpy warns that the package's own cases overflow, which is their purpose.
        warnings.simplefilter("ignore")
        all_cases = load_model_tests(kind="node")
    return [whole(case) for case in all_cases if not names or any(re.fullmatch(name, case.name) for name in names)]


def run(program, engine, chosen):
    """Outcome, reason and operator of each case by name."""
    runner, results = Runner(program, engine), {}
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            what, why = outcome(runner, case, pathlib.Path(folder))
            results[case.name] = {"outcome": what, "why": why, "operator": operator(case)}
    return results


def known(engine, name):
    """Why a wrong answer is left as it is."""
    return next((why for pattern, why in KNOWN.get(engine, {}).items() if re.fullmatch(pattern, name)), None)


def by_either(results):
    """Downbeat's answers with both engines present: the second engine runs the cases that the first
    refuses."""
    first, second = (results.get(engine, {}) for engine in ENGINES)
    both = first.keys() & second.keys()
    return {name: second[name] if first[name]["outcome"] == "refused" else first[name] for name in both}


def counts(results):
    count = collections.Counter(result["outcome"] for result in results.values())
    return [count[what] for what in OUTCOMES]


def table(before, after):
    """Markdown: totals, then the operators of which an engine does not pass all cases."""
    lines = ["| Engine | | Passed | Wrong | Refused |", "|---|---|---:|---:|---:|"]
    rows = [(engine, before.get(engine), results) for engine, results in after.items()]
    rows.append((" else ".join(ENGINES), by_either(before), by_either(after)))
    for engine, *both in rows:
        for when, of in zip(("before", "now"), both):
            if of:
                lines.append(f"| {engine} | {when} | " + " | ".join(map(str, counts(of))) + " |")
    for engine, results in after.items():
        lines += ["", f"## Operators of which {engine} does not pass all cases, or did not before", "", "| Operator | Cases | Passed | Wrong | Refused | Before: passed | wrong | refused |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
        by_operator = collections.defaultdict(dict)
        for name, result in results.items():
            by_operator[result["operator"]][name] = result
        for name, of in sorted(by_operator.items()):
            old = {case: before[engine][case] for case in of if case in before.get(engine, {})}
            if counts(of)[0] < len(of) or (old and counts(old)[0] < len(old)):
                earlier = counts(old) if old else ["", "", ""]
                lines.append(f"| {name} | {len(of)} | " + " | ".join(map(str, counts(of) + earlier)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", default=None, help="rten, onnxruntime; both if left out")
    parser.add_argument("--sample", action="store_true", help="only the cases that CI runs")
    parser.add_argument("--case", action="append", default=[], help="only cases whose whole name is this regular expression")
    parser.add_argument("--program", default=os.environ.get("DOWNBEAT_CONFORMANCE", str(ROOT / "target/debug/examples/conformance")))
    parser.add_argument("--save", help="write the outcome of each case to this file")
    parser.add_argument("--before", help="compare with the outcomes in this file, of an earlier --save")
    parser.add_argument("--write", help="replace what follows the line <!-- cases --> in this file by the table")
    arguments = parser.parse_args()
    names = arguments.case + (SAMPLE.read_text().split() if arguments.sample else [])
    chosen = cases(names)
    before = json.loads(pathlib.Path(arguments.before).read_text()) if arguments.before else {}
    after = {engine: run(arguments.program, engine, chosen) for engine in arguments.engines or ENGINES}
    is_new = False
    for engine, results in after.items():
        for name, result in sorted(results.items()):
            if result["outcome"] == "wrong":
                why = known(engine, name)
                is_new |= why is None
                print(f"{engine}: {name}: " + (f"known: {why}" if why else result["why"][:300]))
    shown = table(before, after)
    print(shown)
    if arguments.save:
        pathlib.Path(arguments.save).write_text(json.dumps(after, indent=1) + "\n")
    if arguments.write:
        path = pathlib.Path(arguments.write)
        head = path.read_text().split("<!-- cases -->")[0]
        path.write_text(head + "<!-- cases -->\n\n" + f"`onnx` {onnx.__version__}, {len(chosen)} cases.\n\n" + NOTE + shown)
    sys.exit(is_new)


if __name__ == "__main__":
    main()
