"""`downbeat infer` reads what people have, answers as ONNX Runtime does, and prints examples that work when they are pasted."""
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import requests
from onnx import TensorProto, helper
from PIL import Image

import models
from serving import EXAMPLES, Server

KINDS = {"half": (TensorProto.FLOAT16, np.float16), "flag": (TensorProto.BOOL, np.bool_), "count": (TensorProto.INT64, np.int64),
         "name": (TensorProto.STRING, np.object_)}


def mixed(repository):
    """Inputs of four datatypes, [N, 1] each, given back as `same_...`."""
    graph = models.Graph("mixed")
    for name, (elem_type, _) in KINDS.items():
        value = graph.input(name, elem_type, ["N", 1])
        graph.nodes.append(helper.make_node("Identity", [value], [f"same_{name}"]))
        graph.outputs.append(helper.make_tensor_value_info(f"same_{name}", elem_type, ["N", 1]))
    return models.write(repository, "mixed", graph)


def vision(repository, name, shape, axes):
    """`image` FP32 to the mean of each channel, `means`."""
    graph = models.Graph(name)
    image = graph.input("image", TensorProto.FLOAT, shape)
    mean = graph.node("ReduceMean", image, axes=axes, keepdims=0)
    graph.output(mean, "means", TensorProto.FLOAT, [shape[0], 3])
    return models.write(repository, name, graph)


def scalar(repository):
    """`x` FP32 without dimensions to `y` = `x` + `x`."""
    graph = models.Graph("scalar")
    x = graph.input("x", TensorProto.FLOAT, [])
    graph.output(graph.node("Add", x, x), "y", TensorProto.FLOAT, [])
    return models.write(repository, "scalar", graph)


@pytest.fixture(scope="module")
def server(binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("infer")
    repository = folder / "models"
    shutil.copytree(EXAMPLES / "models", repository)
    shutil.copytree(EXAMPLES / "preprocess" / "models", repository, dirs_exist_ok=True)
    mixed(repository)
    vision(repository, "nchw", ["N", 3, 16, 16], [2, 3])
    vision(repository, "nhwc", ["N", "H", "W", 3], [1, 2])
    vision(repository, "single", [1, 3, 16, 16], [2, 3])
    vision(repository, "large", ["N", 3, "H", "W"], [2, 3])
    scalar(repository)
    models.add(repository, "add", 0.5, config="max_batch_size: 3\n")
    with Server(binary, repository, folder, "--config", str(EXAMPLES / "preprocess" / "downbeat.toml")) as server:
        yield server


@pytest.fixture
def infer(binary, server, tmp_path):
    """Runs the command in a folder of its own."""

    def run(*args, text=None, fails=False):
        done = subprocess.run([binary, "infer", *map(str, args), "--url", server.url], cwd=tmp_path, capture_output=True, input=text,
                              text=True, timeout=120)
        assert (done.returncode != 0) == fails, f"{args}: {done.stdout}{done.stderr}"
        assert "panicked" not in done.stderr
        if fails:
            assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        return done.stderr if fails else done

    return run


ALL = ["digits", "mlp", "encoder", "photo", "sentence", "mixed", "nchw", "nhwc", "single", "large", "scalar", "add"]


@pytest.mark.parametrize("model", ALL)
@pytest.mark.parametrize("program", ["curl", "python", "infer"])
def test_each_example_works_when_it_is_pasted(infer, binary, server, model, program, tmp_path):
    if program == "curl" and shutil.which("curl") is None:
        pytest.skip("no curl")
    (tmp_path / "downbeat").symlink_to(binary)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
    pasted = infer(model, "--example", program).stdout
    interpreter = ["python3"] if program == "python" else ["sh", "-e"]
    done = subprocess.run(interpreter, input=pasted, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ, PATH=path), timeout=120)
    outputs = requests.get(f"{server.url}/v2/models/{model}").json()["outputs"]
    assert done.returncode == 0, f"{pasted}\n{done.stderr}"
    assert outputs[0]["name"] in done.stdout and "error" not in done.stdout, f"{pasted}\n{done.stdout}"


def test_without_input_all_examples_and_an_answer_are_printed(infer):
    said = infer("digits").stdout
    assert said.startswith("digits wants image FP32 [rows, 8, 8], at most 64 rows a request. It gives probabilities FP32 [rows, 10].")
    for part in ["\ncurl -s http", "\nimport requests", "\ndownbeat infer digits ", "# a picture: ", "probabilities: class "]:
        assert part in said, said


def answer(infer, *args, **options):
    """The outputs, by way of `--json`."""
    outputs = json.loads(infer(*args, "--json", **options).stdout)["outputs"]
    return {o["name"]: np.array(o["data"]).reshape(o["shape"]) for o in outputs}


def test_numpy_files_answer_as_onnxruntime_does(infer, tmp_path):
    generator = np.random.default_rng(1)
    for model, feeds in [("mlp", {"x": (5, 784)}), ("encoder", {"input_ids": (3, 9), "attention_mask": (3, 9)})]:
        session = onnxruntime.InferenceSession(EXAMPLES / "models" / model / "1" / "model.onnx")
        names = [i.name for i in session.get_inputs()]
        shapes = list(feeds.values())
        if model == "mlp":
            feed = {names[0]: generator.random(shapes[0], np.float32)}
            # Float64 in the order of Fortran, which becomes FP32.
            np.save(tmp_path / "a.npy", np.asfortranarray(feed[names[0]].astype(np.float64)))
            files = ["a.npy"]
        else:
            feed = {name: generator.integers(0, 2, shapes[0]) for name in names}
            np.savez_compressed(tmp_path / "a.npz", **{name: value.astype(np.int32) for name, value in feed.items()})
            files = ["a.npz"]
        infer(model, *files, "--output", "out.npz")
        written = np.load(tmp_path / "out.npz")
        for output, expected in zip(session.get_outputs(), session.run(None, feed)):
            np.testing.assert_allclose(written[output.name], expected, rtol=1e-3, atol=1e-4)


def test_a_table_is_divided_by_the_batch_size_and_joined_in_order(infer, tmp_path):
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    (tmp_path / "rows.csv").write_text("a,b,c,d\n" + "\n".join(",".join(map(str, row)) for row in rows) + "\n")
    done = infer("add", "rows.csv", "--output", "out.npy")
    assert "4 requests" in done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), rows + 0.5)
    table = infer("add", "rows.csv").stdout
    assert len(table.splitlines()) == 12 and "36.5, 37.5, 38.5, 39.5" in table, table
    infer("add", "rows.csv", "--output", "out.csv")
    again = infer("add", "out.csv", "--output", "again.npy", fails=False)
    assert again.returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "again.npy"), rows + 1)


def test_columns_values_and_json_fill_inputs_of_all_kinds(infer, tmp_path):
    expected = {"same_half": [[0.5], [2.0]], "same_flag": [[True], [False]], "same_count": [[2**60 + 1], [-3]], "same_name": [["Bonn"], ["Ulm, Donau"]]}
    (tmp_path / "rows.csv").write_text(f'name,half,label,flag,count\nBonn,0.5,x,True,{2**60 + 1}\n"Ulm, Donau",2,y,0,-3\n')
    rows = [{"half": 0.5, "flag": True, "count": 2**60 + 1, "name": "Bonn"}, {"half": 2, "flag": False, "count": -3, "name": "Ulm, Donau"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    by_name = {key: [row[key] for row in rows] for key in rows[0]}
    np.savez(tmp_path / "arrays.npz", **{name: np.array(by_name[name]).astype(str if name == "name" else KINDS[name][1]) for name in KINDS})
    values = [f"--input={name}={json.dumps(value)}" for name, value in by_name.items()]
    for args, text in [(["rows.csv"], None), (["rows.json"], None), (["-"], json.dumps(by_name)), (["arrays.npz"], None), (values, None)]:
        found = answer(infer, "mixed", *args, text=text)
        assert {name: value.tolist() for name, value in found.items()} == expected, args
    assert "no input takes the columns label" in infer("mixed", "rows.csv").stderr
    single = infer("mixed", "--input", "half=0.5", "--input", "flag=true", "--input", "count=7", "--input", "name=so it is").stdout
    assert "same_name BYTES [1, 1]: so it is" in single and "same_flag BOOL [1, 1]: true" in single


def test_a_request_goes_as_it_is_and_a_scalar_has_no_dimension(infer, tmp_path):
    assert "seven" in infer("digits", EXAMPLES / "digit.json").stdout
    assert answer(infer, "scalar", "--input", "x=1.5")["y"].tolist() == [3]
    np.save(tmp_path / "x.npy", np.float32(3))
    assert answer(infer, "scalar", "x.npy")["y"].tolist() == [6]


def picture(folder, name, size=(40, 20), colour=(51, 102, 255)):
    Image.new("RGB", size, colour).save(folder / name)
    return name


def test_pictures_become_pixels_and_the_assumptions_are_told(infer, tmp_path):
    png, jpeg = picture(tmp_path, "a.png"), picture(tmp_path, "b.jpg", size=(16, 16), colour=(0, 0, 0))
    means = np.array([51, 102, 255]) / 255
    done = infer("nchw", png, jpeg, "--output", "out.npy")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), [means, [0, 0, 0]], atol=0.01)
    assert "resized from 40 x 20 to 16 x 16, RGB in NCHW, FP32 0 to 1 (assumed; --pixels changes it)" in done.stderr
    done = infer("nhwc", png, "--json")
    assert "40 x 20, RGB in NHWC" in done.stderr
    np.testing.assert_allclose(json.loads(done.stdout)["outputs"][0]["data"], means, atol=1e-3)
    # The model has a fixed batch of 1, so each picture takes a request.
    np.testing.assert_allclose(answer(infer, "single", png, png)["means"], [means, means], atol=1e-3)
    for pixels, expected in [("raw", means * 255), ("signed", means * 2 - 1), ("imagenet", (means - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225])]:
        np.testing.assert_allclose(answer(infer, "nchw", png, "--pixels", pixels)["means"][0], expected, rtol=1e-3)
    assert "colour: blue" in infer("photo", EXAMPLES / "preprocess" / "photo.jpg").stdout
    # The example's own scale: its samples are 0 to 255.
    assert re.search(r"seven \(probability 0\.97", infer("digits", EXAMPLES / "digit.png").stdout)


def test_texts_go_to_the_steps_of_the_server(infer, tmp_path):
    (tmp_path / "a.txt").write_text("I love this\n")
    assert "tone: " in infer("sentence", "a.txt").stdout
    table = infer("sentence", "--text", "I love this", "--text", "so it is").stdout
    assert len(table.splitlines()) == 4, table


def test_each_fault_has_one_line_that_says_what_to_type(infer, binary, server, tmp_path):
    np.save(tmp_path / "wrong.npy", np.zeros((2, 5)))
    np.save(tmp_path / "half.npy", np.array([[0.5]]))
    np.save(tmp_path / "objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    whole = (tmp_path / "wrong.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-1])
    (tmp_path / "bad.csv").write_text("1,2,3,4\n1,2,x,4\n")
    (tmp_path / "noise.bin").write_bytes(b"\xff\xfe\xfd")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes(buffer.getvalue()[:-40])
    for args, said in [
        (["add", "wrong.npy"], "input 'x' wants FP32 [rows, 4], but wrong.npy has FP64 [2, 5]"),
        (["add", "cut.npy"], "cut.npy: the NumPy file is damaged: <f8 of shape [2, 5] takes 80 bytes, but the file has 79"),
        (["add", "cut.npz"], "cut.npz: the .npz file is a damaged archive"),
        (["add", "objects.npy"], "objects.npy: the NumPy file has Python objects; save texts with array.astype(str)"),
        (["add", "bad.csv"], "bad.csv: row 2, column 3: input 'x' wants FP32 [rows, 4]: 'x' is no such number"),
        (["add", "noise.bin"], "noise.bin is neither a picture (PNG, JPEG) nor a NumPy file, and is UTF-16 text"),
        (["add", "--input", "y=1"], "model 'add' has no input 'y'; it wants x FP32 [rows, 4]"),
        (["add", "--text", "a"], "model 'add' takes no texts"),
        (["add", "none.npy"], "cannot read none.npy"),
        (["mixed", "--input", "count=half.npy"], "input 'count' wants INT64 [rows, 1], but half.npy has FP64 [1, 1]: convert the values to INT64"),
        (["mixed", "--input", "count=1"], "model 'mixed' needs a value for half FP16 [rows, 1]: add --input half=FILE or --input half=VALUE"),
        (["mixed", "wrong.npy"], "wrong.npy names no input; give each its own value with --input NAME=FILE"),
        (["encoder", picture(tmp_path, "a.png")], "a.png names no input"),
        (["mlp", "--input", "input=[1,2"], "'[1,2' is neither a file nor such values"),
        (["digist"], "'digits'"),
    ]:
        assert said in infer(*args, fails=True), args
    for args, status, said in [
        (["add", "--output", "out.txt"], 2, "expected a name that ends in .npy, .npz, .json or .csv"),
        (["add", "wrong.npy", "--url", "http://127.0.0.1:9"], 1, "is `downbeat serve` running there?"),
        (["add", "wrong.npy", "--url", f"http://{server.grpc}"], 1, "answers, but not in HTTP/1.1: a gRPC port does so"),
    ]:
        done = subprocess.run([binary, "infer", *args], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status and said in done.stderr, done.stderr


def test_a_picture_that_claims_to_be_huge_takes_no_memory(infer, tmp_path):
    file = bytearray((tmp_path / picture(tmp_path, "a.png")).read_bytes())
    file[16:24] = b"\x7f\xff\xff\xff" * 2
    (tmp_path / "huge.png").write_bytes(file)
    assert "at most 67108864 are allowed" in infer("nchw", "huge.png", fails=True)


def test_the_page_of_the_api_needs_no_other_server(server):
    page = requests.get(f"{server.url}/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"https?://", page.text), "the page names no other server"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    (script,) = re.findall(r'<script type="module" src="([^"]+)">', page.text)
    packed = requests.get(server.url + script, headers={"Accept-Encoding": "gzip"})
    plain = requests.get(server.url + script, headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert packed.content == plain.content and b"rapi-doc" in plain.content
    assert int(packed.headers["content-length"]) < 300_000
    assert requests.get(f"{server.url}/docs/").text == page.text
    assert requests.get(f"{server.url}/v2/openapi.yaml").text.count("\n  /docs:\n") == 1
