"""ONNX files of many exporters: repaired at load or by `downbeat import`, with the answers of the file as it was."""
import subprocess

import numpy as np
import onnx
import onnxruntime
import pytest
import requests
import tritonclient.http as httpclient
from onnx import TensorProto, helper, numpy_helper

from serving import Server, environment

X = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
ENGINES = ["onnxruntime", "rten"]


def value(name, dims, element=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, element, dims)


def scores_by_class(name, key, element=TensorProto.FLOAT):
    """The type that ZipMap gives: a list of maps."""
    key = helper.make_tensor_type_proto(key, []).tensor_type.elem_type
    return helper.make_value_info(name, helper.make_sequence_type_proto(helper.make_map_type_proto(key, helper.make_tensor_type_proto(element, None))))


def network(ir, opset):
    """A product and a softmax, of these versions."""
    weights = np.random.default_rng(4).normal(size=(4, 3)).astype(np.float32)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Softmax", ["m"], ["y"], axis=1)], "",
                              [value("x", ["n", 4])], [value("y", ["n", 3])], [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, ir_version=ir, opset_imports=[helper.make_opsetid("", opset)])


def classifier(labels):
    """A pipeline as scikit-learn's converter writes it: scaler, linear classifier, normaliser, ZipMap."""
    rng = np.random.default_rng(5)
    texts = isinstance(labels[0], str)
    kind = TensorProto.STRING if texts else TensorProto.INT64
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", offset=[0.1, 0.2, 0.3, 0.4], scale=[1.0, 2.0, 0.5, 1.5]),
        helper.make_node("LinearClassifier", ["scaled"], ["label", "raw"], domain="ai.onnx.ml", coefficients=rng.normal(size=12).tolist(),
                         intercepts=rng.normal(size=3).tolist(), post_transform="LOGISTIC",
                         **{"classlabels_strings" if texts else "classlabels_ints": labels}),
        helper.make_node("Normalizer", ["raw"], ["probabilities"], domain="ai.onnx.ml", norm="L1"),
        helper.make_node("ZipMap", ["probabilities"], ["output_probability"], domain="ai.onnx.ml",
                         **{"classlabels_strings" if texts else "classlabels_int64s": labels}),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", [None, 4])], [value("label", [None], kind), scores_by_class("output_probability", kind)])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1), helper.make_opsetid("", 13)])


def doubles():
    """Scores of 64 bits, which ONNX Runtime's ZipMap refuses."""
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["s"], axis=1),
                               helper.make_node("ZipMap", ["s"], ["p"], domain="ai.onnx.ml", classlabels_int64s=[1, 2, 3, 4])], "g",
                              [value("x", [None, 4], TensorProto.DOUBLE)], [scores_by_class("p", TensorProto.INT64, TensorProto.DOUBLE)])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid("ai.onnx.ml", 1)])


def save(repository, name, model, **external):
    path = repository / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(model, str(path), **external)
    return path


def ask(server, model, x, *outputs):
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("x", list(x.shape), "FP64" if x.dtype == np.float64 else "FP32")
        tensor.set_data_from_numpy(x)
        return client.infer(model, [tensor], outputs=list(outputs) or None)


def expected_scores(model):
    """The label and the scores that ONNX Runtime gives for the file with its ZipMap."""
    label, maps = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})
    return label, np.array([list(scores.values()) for scores in maps], np.float32), list(maps[0])


@pytest.fixture(scope="module", params=ENGINES)
def server(request, binary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    repository = folder / "models"
    save(repository, "newest", network(14, 28))
    save(repository, "apart", network(14, 28), save_as_external_data=True, location="the weights.bin", size_threshold=0)
    save(repository, "classes", classifier([10, 20, 30]))
    if request.param == "onnxruntime":
        save(repository, "texts", classifier(["cat", "dog", "eel"]))
        save(repository, "doubles", doubles())
    with Server(binary, repository, folder, "--no-profiling", engine=request.param) as server:
        server.engine = request.param
        yield server


@pytest.mark.parametrize("name", ["newest", "apart"])
def test_the_newest_versions_of_format_and_operators_are_served(server, name):
    expected = onnxruntime.InferenceSession(network(10, 20).SerializeToString()).run(None, {"x": X})[0]
    np.testing.assert_allclose(ask(server, name, X).as_numpy("y"), expected, rtol=1e-5)
    assert "version 10 of the format in place of 14" in server.log
    assert "version 26 of the operators in place of 28, which has the same operators" in server.log


def test_scores_by_class_are_a_tensor_with_labels(server):
    names = {"classes": [10, 20, 30]} | ({"texts": ["cat", "dog", "eel"]} if server.engine == "onnxruntime" else {})
    for model, labels in names.items():
        label, scores, classes = expected_scores(classifier(labels))
        assert classes == labels
        result = ask(server, model, X)
        np.testing.assert_allclose(result.as_numpy("output_probability"), scores, rtol=1e-5)
        answered = result.as_numpy("label").reshape(-1).tolist()
        assert [each.decode() if isinstance(each, bytes) else each for each in answered] == label.tolist()
        best = ask(server, model, X, httpclient.InferRequestedOutput("output_probability", class_count=1)).as_numpy("output_probability")
        named = [str(labels[row.argmax()]) for row in scores]
        assert [each.decode().split(":")[2] for each in best.reshape(-1)] == named


def test_scores_of_64_bits_keep_their_bits(server):
    if server.engine == "rten":
        pytest.skip("rten has no FP64")
    x = X.astype(np.float64)
    expected = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    result = ask(server, "doubles", x).as_numpy("p")
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_a_repaired_model_runs_in_a_process_of_its_own(binary, tmp_path):
    save(tmp_path / "models", "apart", network(14, 28), save_as_external_data=True, location="w.bin", size_threshold=0)
    with Server(binary, tmp_path / "models", tmp_path, "--no-profiling", "--isolation", "process") as server:
        expected = onnxruntime.InferenceSession(network(10, 20).SerializeToString()).run(None, {"x": X})[0]
        np.testing.assert_allclose(ask(server, "apart", X).as_numpy("y"), expected, rtol=1e-5)


def test_what_cannot_be_repaired_is_refused_in_one_line_with_a_remedy(binary, tmp_path):
    network_of_tomorrow = network(14, 29)
    swiglu = network(14, 28)
    swiglu.graph.node[1].op_type = "SwiGLU"
    save(tmp_path / "models", "tomorrow", network_of_tomorrow)
    save(tmp_path / "models", "swiglu", swiglu)
    save(tmp_path / "models", "texts", classifier(["cat", "dog", "eel"]))
    checked = subprocess.run([str(binary), "config", "check", str(tmp_path / "models"), "--engine", "rten"], cwd=tmp_path,
                             env=environment(tmp_path, "rten"), capture_output=True, text=True)
    errors = [line for line in checked.stdout.splitlines() if line.startswith("error: ")]
    assert checked.returncode == 1 and len(errors) == 3, checked.stdout
    assert any("made for version 29 of the ONNX operators, the newest known here is 28. Export it with an older version" in line for line in errors)
    assert any("its operator SwiGLU came with version 28" in line for line in errors)
    assert any("it lacks LinearClassifier: its labels are texts. onnxruntime may run it: `downbeat engine install`" in line for line in errors)


def import_file(binary, folder, file, *flags):
    return subprocess.run([str(binary), "import", str(file), *flags], cwd=folder, env=environment(folder), capture_output=True, text=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_imported_file_is_a_repository(binary, tmp_path, engine):
    file = tmp_path / "iris.onnx"
    onnx.save(classifier([10, 20, 30]), str(file))
    onnx.save(network(14, 28), str(tmp_path / "apart.onnx"), save_as_external_data=True, location="w.bin", size_threshold=0)
    for name in ("iris", "apart"):
        done = import_file(binary, tmp_path, tmp_path / f"{name}.onnx")
        assert done.returncode == 0, done.stderr
    assert "models/apart/1/model.onnx: it has version 10" in done.stdout, done.stdout
    assert (tmp_path / "models/iris/labels.txt").read_text() == "10\n20\n30\n"
    assert 'label_filename: "labels.txt"' in (tmp_path / "models/iris/config.pbtxt").read_text()
    assert onnx.load(str(tmp_path / "models/apart/1/model.onnx")).ir_version == 10
    # Nobody but `serve` has to repair the file again.
    scores = onnxruntime.InferenceSession(str(tmp_path / "models/iris/1/model.onnx")).run(["output_probability"], {"x": X})[0]
    np.testing.assert_allclose(scores, expected_scores(classifier([10, 20, 30]))[1], rtol=1e-5)
    with Server(binary, tmp_path / "models", tmp_path, "--no-profiling", engine=engine) as server:
        assert "repaired" not in server.log
        np.testing.assert_allclose(ask(server, "iris", X).as_numpy("output_probability"), scores, rtol=1e-5)
        config = requests.get(f"{server.url}/v2/models/apart/config", timeout=10).json()
        assert config["max_batch_size"] == 32
    again = import_file(binary, tmp_path, file)
    assert again.returncode == 1 and "exists already; remove that folder, or give the model another name" in again.stderr
    (tmp_path / "text.onnx").write_text("no model")
    wrong = import_file(binary, tmp_path, tmp_path / "text.onnx", "--name", "m")
    assert wrong.returncode == 1 and "not an ONNX model" in wrong.stderr
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["apart", "iris"]
