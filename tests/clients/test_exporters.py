"""Models as the frameworks' exporters write them: Downbeat's answers are those of the framework itself.

Models of packages that install fast are made here. Some of PyTorch, Keras and transformers are in `exported`, where
`tools/exporters.py` put them. `DOWNBEAT_EXPORTERS` names a folder with all models of that script."""
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import requests

from serving import ROOT, Server

sys.path.insert(0, str(ROOT / "tools"))
from exported import judge  # noqa: E402

STORED = pathlib.Path(__file__).parent / "exported"
INSTALL = "`downbeat engine install`"
# Models that rten may refuse, and the operator or the datatype that the refusal then names. rten serves all others.
REFUSED_BY_RTEN = {
    r"lightgbm_.*|xgboost_.*|sklearn_(forest|gradient_boosting|isolation_forest|tree).*": "TreeEnsemble",
    r"sklearn_(logistic_columns|logistic_names|texts)": "text",
    r"sklearn_pipeline": "OneHotEncoder|BYTES",
    r"sklearn_knn": "Scan",
    r"sklearn_sv[cr]": "SVM|ArrayFeatureExtractor",
    r"sklearn_float64.*|torch_float64": "FP64",
    r"fp16_io_.*|torch_half": "FP16",
    r"int8_dynamic_torch_lstm_.*": "DynamicQuantizeLSTM",
    r"int8_operators_.*": "QLinearConv",
}


def refusal(model):
    """What rten's refusal of a model may name; None: rten serves it."""
    return next((cause for pattern, cause in REFUSED_BY_RTEN.items() if re.fullmatch(pattern, model)), None)


def judged(binary, folder, scratch):
    """Judges a folder. Each model is right on onnxruntime. rten is right too, or says in one line how to get the other engine."""
    faults, verdicts = [], list(judge.judge_all(Server, binary, folder, scratch))
    for verdict in verdicts:
        cause = refusal(verdict.model) if verdict.engine == "rten" else None
        is_remedy = cause and re.search(cause, verdict.message) and INSTALL in verdict.message and "\n" not in verdict.message
        if not verdict.right and (verdict.served or not is_remedy):
            faults.append(f"{verdict.model} on {verdict.engine}: {verdict.message}")
    assert not faults, "\n".join(faults)
    return {verdict.model for verdict in verdicts if verdict.right}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The models of scikit-learn, LightGBM and XGBoost, exported now."""
    folder = tmp_path_factory.mktemp("exported")
    subprocess.run([sys.executable, ROOT / "tools" / "exporters.py", folder, "--part", "light"], check=True, timeout=600)
    return folder


def test_models_of_scikit_learn_and_boosting_are_right(binary, made, tmp_path):
    assert len(judged(binary, made, tmp_path)) >= 25


def test_models_of_pytorch_keras_and_transformers_are_right(binary, tmp_path):
    right = judged(binary, STORED, tmp_path)
    for framework in ("torch", "keras", "transformers", "int8", "fp16", "newest"):
        assert any(model.startswith(framework) for model in right), framework


@pytest.mark.skipif("DOWNBEAT_EXPORTERS" not in os.environ, reason="DOWNBEAT_EXPORTERS names no folder that tools/exporters.py has filled")
def test_all_exported_models_are_right(binary, tmp_path):
    judged(binary, pathlib.Path(os.environ["DOWNBEAT_EXPORTERS"]), tmp_path)


def test_a_forest_answers_with_names_of_classes(binary, made, tmp_path):
    """ZipMap's names of classes are the labels of Triton's classification extension."""
    models, flags = judge.repository([made / "sklearn_tree"], tmp_path, "onnxruntime")
    rows = judge.arrays(made / "sklearn_tree" / "inputs.npz")["X"]
    names = judge.arrays(made / "sklearn_tree" / "outputs.npz")["output_label"]
    with Server(binary, models, tmp_path, *flags) as server:
        assert judge.load(server, "sklearn_tree") is None, server.log
        body = {
            "inputs": [{"name": "X", "shape": list(rows.shape), "datatype": "FP32", "data": rows.ravel().tolist()}],
            "outputs": [{"name": "output_probability", "parameters": {"classification": 1}}],
        }
        answer = requests.post(f"{server.url}/v2/models/sklearn_tree/infer", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        best = np.array(answer.json()["outputs"][0]["data"]).ravel()
        # A class is value:index:name.
        assert [text.split(":")[2] for text in best] == list(names)


def test_the_judge_finds_wrong_answers():
    tolerance = {"relative": 1e-4, "absolute": 1e-5}
    expected = {"label": np.array([1, 2]), "score": np.array([[0.5], [0.25]], np.float32), "name": np.array(["a", "b"])}
    found = {"label": np.array([[1], [2]]), "score": np.array([[0.5], [0.25001]], np.float32), "name": np.array([b"a", b"b"], object)}
    assert judge.difference(expected, found, tolerance)[1] is None
    for name, other in [("label", np.array([1, 3])), ("score", np.array([[0.5], [0.251]])), ("score", np.array([[0.5], [np.nan]])),
                        ("score", np.array([0.5, 0.25, 0.1])), ("name", np.array([b"a", b"c"], object))]:
        assert f"'{name}'" in judge.difference(expected, found | {name: other}, tolerance)[1]
    assert "no output 'name'" in judge.difference(expected, {"label": found["label"], "score": found["score"]}, tolerance)[1]
