"""Ensembles: graphs of models behind one request, as Triton's configurations describe them."""
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import ensembles
import models
from ensembles import FOUR, step
from serving import Server, environment

EXPLICIT = ("--model-control-mode", "explicit")
QUICK = ("--profiling-budget", "0")
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def tensor(name, array, datatype="FP32", module=httpclient):
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def ask(client, model, array=X, outputs=None, module=httpclient, **options):
    wanted = outputs and [module.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, [tensor("in", array, module=module)], outputs=wanted, **options)


def index(client, name):
    return [(entry.get("state", ""), entry.get("reason", "")) for entry in client.get_model_repository_index() if entry["name"] == name]


def inferences(client, model):
    return client.get_inference_statistics(model)["model_stats"][0]["inference_stats"]["success"]["count"]


@pytest.fixture(scope="module")
def server(binary, tmp_path_factory):
    """A server with all ensembles that work."""
    folder = tmp_path_factory.mktemp("ensembles")
    repository = folder / "models"
    ensembles.chain(repository)
    ensembles.fork(repository)
    ensembles.write(repository, "nested", [
        step("chain", {"in": "in"}, {"out": "middle"}), step("plus1", {"x": "middle"}, {"y": "out"})], {"in": FOUR}, {"out": FOUR})
    ensembles.unbatched(repository)
    ensembles.write(repository, "item", [
        step("unbatched", {"x": "in"}, {"y": "a"}), step("plus1", {"x": "a"}, {"y": "b"}),
        step("unbatched", {"x": "b"}, {"y": "out"})], {"in": FOUR}, {"out": FOUR}, max_batch_size=0)
    ensembles.write(repository, "reshaped", [step("plus1", {"x": "in"}, {"y": "out"})],
                    {"in": ("TYPE_FP32", [2, 2], "reshape { shape: [4] }")}, {"out": ("TYPE_FP32", [2, 2], "reshape { shape: [4] }")})
    models.identity(repository, "BYTES", "text")
    text = ("TYPE_STRING", [-1])
    ensembles.write(repository, "texts", [
        step("text", {"INPUT0": "in"}, {"OUTPUT0": "a"}), step("text", {"INPUT0": "a"}, {"OUTPUT0": "out"})], {"in": text}, {"out": text})
    # Version control keeps no empty folder.
    shutil.rmtree(repository / "texts" / "1")
    for version, number in ((1, 1), (2, 2)):
        models.add(repository, "versions", number, version, 'version_policy { all { } }')
    ensembles.write(repository, "old", [
        step("versions", {"x": "in"}, {"y": "out1"}, 1), step("versions", {"x": "in"}, {"y": "out2"})], {"in": FOUR}, {"out1": FOUR, "out2": FOUR})
    with Server(binary, repository, folder, *QUICK) as server:
        yield server


@pytest.mark.parametrize("module", [pytest.param(httpclient, id="http"), pytest.param(grpcclient, id="grpc")])
def test_a_chain_and_a_fork_answer_as_their_models_do(server, module):
    with module.InferenceServerClient(server.http if module is httpclient else server.grpc) as client:
        answer = ask(client, "chain", module=module, request_id="seven")
        np.testing.assert_array_equal(answer.as_numpy("out"), X + 111)
        assert client.is_model_ready("chain") and client.is_model_ready("chain", "1") and not client.is_model_ready("chain", "2")
        answer = ask(client, "fork", module=module)
        np.testing.assert_array_equal(answer.as_numpy("out"), np.full_like(X, -90))
        np.testing.assert_array_equal(answer.as_numpy("left"), X + 11)
        np.testing.assert_array_equal(ask(client, "nested", module=module).as_numpy("out"), X + 112)


def test_metadata_and_configuration_are_those_of_an_ensemble(server):
    with httpclient.InferenceServerClient(server.http) as client:
        metadata = client.get_model_metadata("chain")
        assert metadata["platform"] == "ensemble" and metadata["versions"] == ["1"]
        assert metadata["inputs"] == [{"name": "in", "datatype": "FP32", "shape": [-1, 4]}]
        config = client.get_model_config("chain")
        assert config["platform"] == "ensemble" and len(config["ensemble_scheduling"]["step"]) == 3
        answer = ask(client, "chain", request_id="seven").get_response()
        assert (answer["id"], answer["model_name"], answer["model_version"]) == ("seven", "chain", "1")
        assert index(client, "chain") == [("READY", "")]


def test_items_and_batches_mix(server):
    with httpclient.InferenceServerClient(server.http) as client:
        item = X[0]
        np.testing.assert_array_equal(ask(client, "item", item).as_numpy("out"), item + 3)
        square = X.reshape(2, 2, 2)
        np.testing.assert_array_equal(ask(client, "reshaped", square).as_numpy("out"), square + 1)


def test_strings_go_from_step_to_step(server):
    words = np.array([["a", ""], ["čtyři", "x" * 1000]], dtype=np.object_)
    with httpclient.InferenceServerClient(server.http) as client:
        answer = client.infer("texts", [tensor("in", words, "BYTES")]).as_numpy("out")
        assert [[word.decode() for word in row] for row in answer] == words.tolist()


def test_a_step_names_its_version(server):
    with httpclient.InferenceServerClient(server.http) as client:
        answer = ask(client, "old")
        np.testing.assert_array_equal(answer.as_numpy("out1"), X + 1)
        np.testing.assert_array_equal(answer.as_numpy("out2"), X + 2)


def test_an_output_that_nobody_asked_for_is_not_computed(server):
    with httpclient.InferenceServerClient(server.http) as client:
        before = [inferences(client, model) for model in ("first", "left", "right", "sum")]
        answer = ask(client, "fork", outputs=["left"])
        assert [output["name"] for output in answer.get_response()["outputs"]] == ["left"]
        after = [inferences(client, model) for model in ("first", "left", "right", "sum")]
        assert [now - then for now, then in zip(after, before)] == [1, 1, 0, 0]


def test_statistics_and_metrics_count_the_ensemble_and_its_models(server):
    with httpclient.InferenceServerClient(server.http) as client:
        counted = ("chain", "plus1", "plus10", "plus100")
        before = [inferences(client, model) for model in counted]
        steps = server.metric("downbeat_pipeline_step_duration_seconds_count", ensemble="chain")
        for _ in range(3):
            ask(client, "chain")
        assert [inferences(client, model) - then for model, then in zip(counted, before)] == [3, 3, 3, 3]
        stats = client.get_inference_statistics("chain")["model_stats"][0]
        assert stats["inference_count"] == 2 * stats["inference_stats"]["success"]["count"]
        # Three requests, three steps, two phases.
        assert server.metric("downbeat_pipeline_step_duration_seconds_count", ensemble="chain") - steps == 18
        assert server.metric("nv_inference_request_success", model="chain") >= 3


@pytest.mark.parametrize("array, words", [
    (np.zeros((2, 5), np.float32), ["unexpected shape for input 'in'", "[-1,4]", "[2,5]"]),
    (np.zeros((9, 4), np.float32), ["batch-size must be <= 8", "'chain'"]),
])
def test_a_request_that_does_not_fit_is_told_in_the_ensembles_words(server, array, words):
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException) as error:
            ask(client, "chain", array)
        assert all(word in str(error.value) for word in words), error.value
        with pytest.raises(InferenceServerException, match="unexpected inference output 'no'"):
            ask(client, "chain", outputs=["no"])
        with pytest.raises(InferenceServerException, match="missing required input"):
            client.infer("chain", [])


def fails(name, models_of, args, words, **options):
    return pytest.param(models_of, args, options, words, id=name)


PLUS = [("a", 1), ("b", 2)]
CHAIN = [step("a", {"x": "in"}, {"y": "t"}), step("b", {"x": "t"}, {"y": "out"})]
INOUT = ({"in": FOUR}, {"out": FOUR})
REFUSED = [
    fails("circle", PLUS, ([step("a", {"x": "u"}, {"y": "t"}), step("b", {"x": "t"}, {"y": "u"}), step("a", {"x": "in"}, {"y": "out"})], *INOUT),
          ["circle", "step 0 ('a') -> step 1 ('b') -> step 0 ('a')", "'u'"]),
    fails("nothing makes", PLUS, ([step("a", {"x": "in"}, {"y": "middle"}), step("b", {"x": "midle"}, {"y": "out"})], *INOUT),
          ["step 1 ('b') needs the tensor 'midle'", "did you mean 'middle'"]),
    fails("made twice", PLUS, ([*CHAIN, step("a", {"x": "in"}, {"y": "out"})], *INOUT), ["step 2 ('a') makes the tensor 'out'", "step 1 ('b') makes too"]),
    fails("unknown model", [("a", 1)], (CHAIN, *INOUT), ["step 1 ('b')", "model_name"]),
    fails("unknown input", PLUS, ([CHAIN[0], step("b", {"z": "t"}, {"y": "out"})], *INOUT), ["step 1 ('b'): the model has no input 'z'", "'x'"]),
    fails("unknown output", PLUS, ([CHAIN[0], step("b", {"x": "t"}, {"z": "out"})], *INOUT), ["step 1 ('b'): the model has no output 'z'"]),
    fails("shapes", PLUS, (CHAIN, {"in": ("TYPE_FP32", [5])}, {"out": FOUR}), ["step 0 ('a'): the tensor 'in' does not fit", "[-1,5]", "[-1,4]"]),
    fails("types", PLUS, (CHAIN, {"in": FOUR}, {"out": ("TYPE_INT32", [4])}), ["step 1 ('b'): the tensor 'out' does not fit", "TYPE_INT32", "TYPE_FP32"]),
    fails("batch", PLUS, (CHAIN, *INOUT), ["max_batch_size", "step 0 ('a')", "at most 32"], max_batch_size=64),
    fails("no output", PLUS, (CHAIN, {"in": FOUR}, {"put": FOUR}), ["no step makes the tensor 'put'"]),
    fails("itself", PLUS, ([CHAIN[0], step("e", {"in": "t"}, {"out": "out"})], *INOUT), ["a step of itself: e -> e"]),
]


@pytest.mark.parametrize("models_of, args, options, words", REFUSED)
def test_a_wrong_ensemble_is_refused_with_the_step_and_the_tensor(binary, start, repository, tmp_path, models_of, args, options, words):
    for model, number in models_of:
        models.add(repository, model, number)
    ensembles.write(repository, "e", *args, **options)
    checked = subprocess.run([binary, "config", "check", str(repository), "--engine", "rten"], capture_output=True, text=True,
                             env=environment(tmp_path, "rten"))
    assert checked.returncode != 0 and "1 in error" in checked.stdout, checked.stdout
    assert all(word in checked.stdout for word in words), checked.stdout
    server = start(repository, *EXPLICIT, *QUICK, engine="rten")
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException) as error:
            client.load_model("e")
        assert all(word in str(error.value) for word in words), error.value
        # The models of the steps stand for themselves.
        client.load_model("a")
        assert client.is_model_ready("a") and not client.is_model_ready("e")


def test_a_missing_input_of_a_step_is_named(start, repository):
    ensembles.join(repository)
    ensembles.write(repository, "e", [step("sum", {"a": "in"}, {"y": "out"})], *INOUT)
    server = start(repository, *EXPLICIT, *QUICK)
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match=r"step 0 \('sum'\) gets no tensor for the model's input 'b'"):
            client.load_model("e")


def test_ensembles_that_contain_each_other_are_refused(start, repository):
    models.add(repository, "a", 1)
    ensembles.write(repository, "e", [CHAIN[0], step("f", {"in": "t"}, {"out": "out"})], *INOUT)
    ensembles.write(repository, "f", [CHAIN[0], step("e", {"in": "t"}, {"out": "out"})], *INOUT)
    server = start(repository, *EXPLICIT, *QUICK)
    with httpclient.InferenceServerClient(server.http) as client:
        for name, circle in (("e", "e -> f -> e"), ("f", "f -> e -> f")):
            with pytest.raises(InferenceServerException, match=f"a step of itself: {circle}"):
                client.load_model(name)


def test_a_load_loads_the_models_of_the_steps_and_they_may_leave_and_come_back(start, repository):
    ensembles.chain(repository)
    ensembles.write(repository, "outer", [step("chain", {"in": "in"}, {"out": "out"})], *INOUT)
    server = start(repository, *EXPLICIT, *QUICK)
    with httpclient.InferenceServerClient(server.http) as client:
        assert not client.is_model_ready("plus10")
        client.load_model("outer")
        np.testing.assert_array_equal(ask(client, "outer").as_numpy("out"), X + 111)
        client.unload_model("plus10")
        for name in ("chain", "outer"):
            assert not client.is_model_ready(name)
        (state, reason), = index(client, "chain")
        assert state == "UNAVAILABLE" and "step 1 ('plus10')" in reason and "unloaded" in reason, reason
        with pytest.raises(InferenceServerException, match=r"step 1 \('plus10'\).*unloaded"):
            ask(client, "chain")
        client.load_model("plus10")
        assert index(client, "outer") == [("READY", "")]
        np.testing.assert_array_equal(ask(client, "outer").as_numpy("out"), X + 111)
        # Another model in the place of a step's.
        shutil.rmtree(repository / "plus10")
        models.add(repository, "plus10", 20)
        client.load_model("plus10")
        np.testing.assert_array_equal(ask(client, "outer").as_numpy("out"), X + 121)
        client.unload_model("chain")
        assert client.is_model_ready("plus10") and not client.is_model_ready("outer") and not client.is_model_ready("chain")
        assert index(client, "chain") == [("UNAVAILABLE", "unloaded")]
        client.load_model("outer")
        assert client.is_model_ready("chain") and client.is_model_ready("outer")
        client.unload_model("outer", unload_dependents=True)
        assert not any(client.is_model_ready(model) for model in ("outer", "chain", "plus1", "plus10", "plus100"))


def test_a_model_that_changes_its_tensors_takes_the_ensemble_out(start, repository):
    ensembles.chain(repository)
    server = start(repository, *EXPLICIT, *QUICK, "--load-model", "chain")
    with httpclient.InferenceServerClient(server.http) as client:
        shutil.rmtree(repository / "plus10")
        models.add_sub(repository, "plus10")
        client.load_model("plus10")
        (state, reason), = index(client, "chain")
        assert state == "UNAVAILABLE" and "step 1 ('plus10'): the model has no input 'x'" in reason, reason
        # A broken configuration of the ensemble does not end an ensemble that serves.
        shutil.rmtree(repository / "plus10")
        models.add(repository, "plus10", 10)
        client.load_model("plus10")
        (repository / "chain" / "config.pbtxt").write_text('platform: "ensemble"')
        with pytest.raises(InferenceServerException, match="ensemble_scheduling"):
            client.load_model("chain")
        np.testing.assert_array_equal(ask(client, "chain").as_numpy("out"), X + 111)


def test_poll_mode_follows_ensembles_and_their_models(start, repository):
    ensembles.chain(repository)
    server = start(repository, "--model-control-mode", "poll", "--repository-poll-secs", "1", *QUICK)
    with httpclient.InferenceServerClient(server.http) as client:
        np.testing.assert_array_equal(ask(client, "chain").as_numpy("out"), X + 111)
        ensembles.write(repository, "late", [step("more", {"x": "in"}, {"y": "t"}), step("chain", {"in": "t"}, {"out": "out"})], *INOUT)
        models.add(repository, "more", 1000)
        deadline = time.monotonic() + 60
        while not client.is_model_ready("late") and time.monotonic() < deadline:
            time.sleep(0.1)
        np.testing.assert_array_equal(ask(client, "late").as_numpy("out"), X + 1111)


def slow_chain(repository, more=""):
    """The ensemble `race` of two slow steps."""
    models.slow(repository, "slow")
    one = ("TYPE_FP32", [1])
    return ensembles.write(repository, "race", [step("slow", {"x": "in"}, {"y": "t"}), step("slow", {"x": "t"}, {"y": "out"})],
                           {"in": one}, {"out": one}, max_batch_size=1, more=more)


def endless_fork(repository):
    """The ensemble `e`: a quick step, and then an endless one beside a quick one."""
    models.add(repository, "a", 1)
    models.loop(repository, "endless")
    return ensembles.write(repository, "e", [step("a", {"x": "in"}, {"y": "t"}), step("endless", {"x": "t"}, {"y": "out"}),
                                             step("a", {"x": "t"}, {"y": "beside"})], {"in": FOUR}, {"out": FOUR, "beside": FOUR})


LONG = np.full((1, 4), 2e9, np.float32)


def test_a_client_that_leaves_cancels_the_steps(start, repository):
    endless_fork(repository)
    server = start(repository, *QUICK)
    deadline = time.monotonic() + 60
    with grpcclient.InferenceServerClient(server.grpc) as client, httpclient.InferenceServerClient(server.http) as http:
        leaves = client.async_infer("e", [tensor("in", LONG, module=grpcclient)], lambda result, error: None)
        # Both quick steps are done, so only the endless one runs.
        while inferences(http, "a") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        leaves.cancel()
    for model in ("e", "endless"):
        while server.metric("nv_inference_request_failure", model=model, reason="CANCELED") < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.metric("nv_inference_request_failure", model=model, reason="CANCELED") == 1
    cancelled = server.metrics()["downbeat_pipeline_step_failures_total"]
    assert {labels["step"]: value for labels, value in cancelled if labels["reason"] == "cancelled"} == {"0": 0, "1": 1, "2": 0}


def test_the_whole_has_one_deadline_and_a_drop_names_the_step(start, repository):
    slow_chain(repository, 'parameters { key: "slo_ms" value { string_value: "1" } }')
    server = start(repository)
    one = np.ones((1, 1), np.float32)
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException) as error:
            client.infer("race", [tensor("in", one)])
        assert "step 0 ('slow') of ensemble 'race'" in str(error.value), error.value
        assert error.value.status() == "504", error.value.status()
        # The model has no SLO of its own.
        assert client.infer("slow", [tensor("x", one)]).as_numpy("y") == 1
    assert server.metric("downbeat_pipeline_step_failures_total", ensemble="race", step="0", reason="dropped") == 1
    assert server.metric("downbeat_requests_not_answered_total", model="race", reason="deadline_hopeless") == 1


def test_a_models_own_slo_is_for_its_own_clients(start, repository):
    slow_chain(repository)
    config = (repository / "slow" / "config.pbtxt").read_text()
    (repository / "slow" / "config.pbtxt").write_text(config + 'parameters { key: "slo_ms" value { string_value: "1" } }')
    server = start(repository)
    one = np.ones((1, 1), np.float32)
    with httpclient.InferenceServerClient(server.http) as client:
        # A step runs although its model would hardly ever be in time for its own clients.
        for _ in range(5):
            assert client.infer("race", [tensor("in", one)]).as_numpy("out") == 1
        # A request's own timeout is a deadline of the whole.
        with pytest.raises(InferenceServerException, match=r"step 0 \('slow'\) of ensemble 'race'"):
            client.infer("race", [tensor("in", one)], timeout=1000)


def test_max_inflight_requests_bounds_each_step(start, repository):
    ensembles.chain(repository)
    config = (repository / "chain" / "config.pbtxt").read_text()
    (repository / "chain" / "config.pbtxt").write_text(config.replace("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 1"))
    server = start(repository, *QUICK)
    answers = []

    def client_of(number):
        with httpclient.InferenceServerClient(server.http) as client:
            for _ in range(20):
                answers.append(np.array_equal(ask(client, "chain", X + number).as_numpy("out"), X + number + 111))

    threads = [threading.Thread(target=client_of, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert answers == [True] * 80


def test_a_failing_step_ends_the_request_and_names_the_step(start, repository):
    endless_fork(repository)
    server = start(repository, *QUICK)
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match=r"step 1 \('endless'\) of ensemble 'e'.*timeout of 500 ms"):
            ask(client, "e", LONG, timeout=500_000)
        assert client.is_model_ready("a")


def test_a_timeline_of_requests_is_where_the_time_went(server):
    page = requests.get(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10).text
    assert 'downbeat_pipeline_step_duration_seconds_bucket{ensemble="chain",model="plus10",phase="waiting",step="1"' in page
