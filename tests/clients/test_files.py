"""Files that a server makes or reads: their places, their readers, and the files that remain."""
import os
import stat
import subprocess

import onnx
import tritonclient.http as httpclient
from onnx import TensorProto, helper

import models
from serving import EXAMPLES, Server, environment

UPLOAD = {"file:1/model.onnx": (EXAMPLES / "models/mlp/1/model.onnx").read_bytes()}


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_uploaded_models_are_private_and_end_with_the_next_start(binary, tmp_path, repository, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    models.add_sub(repository)
    flags = ("--model-control-mode", "explicit", "--load-model", "*")

    def server_with_upload():
        server = Server(binary, repository, tmp_path, *flags, engine="rten")
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("uploaded", config="{}", files=UPLOAD)
        return server

    killed, other = server_with_upload(), server_with_upload()
    parent, = temporary.glob("downbeat-*")
    uploads = sorted(parent.glob("*/*/uploaded/1/model.onnx"))
    assert len(uploads) == 2, sorted(temporary.rglob("*"))
    for upload in uploads:
        for folder in [parent, *upload.relative_to(parent).parents[-3:-1]]:
            assert mode(parent / folder) == 0o700, folder
    killed.process.kill()
    killed.process.wait()
    assert sorted(parent.glob("*/*/uploaded/1/model.onnx")) == uploads, "nobody has cleaned yet"

    # Files in use stay, others go.
    with server_with_upload() as third:
        left = sorted(parent.glob("*/*/uploaded/1/model.onnx"))
        assert len(left) == 2 and len(set(left) & set(uploads)) == 1, left
        assert third.process.poll() is None
    with httpclient.InferenceServerClient(other.http) as client:
        assert client.is_model_ready("uploaded")
    other.stop()
    assert not list(parent.iterdir()), "a server that ends well leaves nothing"


def test_config_check_says_what_the_engine_refuses(binary, tmp_path, repository):
    models.add_sub(repository)
    tree = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, nodes_treeids=[0], nodes_nodeids=[0],
        nodes_featureids=[0], nodes_modes=["LEAF"], nodes_values=[0.0], nodes_truenodeids=[0], nodes_falsenodeids=[0],
        nodes_missing_value_tracks_true=[0], nodes_hitrates=[1.0], target_treeids=[0], target_nodeids=[0], target_ids=[0],
        target_weights=[1.0])
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name, width in (("x", 4), ("y", 1))]
    graph = helper.make_graph([tree], "trees", tensors[:1], tensors[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    (repository / "trees" / "1").mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), repository / "trees" / "1" / "model.onnx")

    def check(engine):
        command = [str(binary), "config", "check", str(repository), "--engine", engine]
        return subprocess.run(command, env=environment(tmp_path, engine), capture_output=True, text=True, timeout=120)

    refused = check("rten")
    assert refused.returncode == 1, refused
    assert "error: " in refused.stdout and "TreeEnsembleRegressor" in refused.stdout, refused
    assert "2 models, 1 in error" in refused.stdout, refused
    taken = check("onnxruntime")
    assert taken.returncode == 0 and taken.stdout.endswith("\n2 models, 0 in error, 0 warnings\n"), taken
    assert "simple 1: rows of a batch: independent" in taken.stdout, taken
