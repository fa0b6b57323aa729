"""Python models as users of Triton write them, through Triton's clients."""
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import textwrap
import threading
import time

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import ensembles
from serving import cluster

PATIENCE_S = 60
EXPLICIT = ("--model-control-mode", "explicit")

ADD_SUB = """
    import json
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            output = pb_utils.get_output_config_by_name(config, "SUM")
            self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
            assert pb_utils.get_input_config_by_name(config, "A")["dims"] == [4]
            assert not pb_utils.using_decoupled_model(config)

        def execute(self, requests):
            responses = []
            for request in requests:
                a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
                b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
                outputs = [pb_utils.Tensor("SUM", (a + b).astype(self.dtype)), pb_utils.Tensor("DIFFERENCE", a - b)]
                responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
            return responses
"""

# What one input asks for. The kind of error of each request is its own.
ASKED = """
    import ctypes, os, sys, time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.one(request) for request in requests]

        def one(self, request):
            asked = [word.decode() for word in pb_utils.get_input_tensor_by_name(request, "ASK").as_numpy().ravel()]
            word, *rest = asked[0].split()
            if word == "refuse":
                code = getattr(pb_utils.TritonError, rest[0])
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one", code))
            if word == "raise":
                raise ValueError("the model is not happy")
            if word == "crash":
                ctypes.string_at(0)
            if word == "exit":
                print("last words", file=sys.stderr, flush=True)
                time.sleep(0.2)
                os._exit(3)
            if word == "endless":
                while True:
                    pass
            if word == "sleep":
                time.sleep(float(rest[0]))
            if word == "stuck":
                # No exception ends a call into C.
                ctypes.CDLL(None).sleep(3600)
            if word == "memory":
                self.kept = bytearray(int(rest[0]))
            if word == "flood":
                for _ in range(int(rest[0])):
                    print("x" * 100)
            answer = np.array([f"{word} done".encode()], dtype=np.object_)
            return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", answer)])
"""
ASKED_CONFIG = """
    backend: "python"
    input [{ name: "ASK" data_type: TYPE_STRING dims: [ 1 ] }]
    output [{ name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] }]
"""


def write(repository, name, code, config="", version=1):
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(textwrap.dedent(code))
    (repository / name / "config.pbtxt").write_text(textwrap.dedent(config))
    return repository / name


def config(inputs, outputs, more=""):
    def side(word, tensors):
        each = (f'{{ name: "{name}" data_type: TYPE_{datatype} dims: {list(dims)} }}' for name, datatype, dims in tensors)
        return f"{word} [ {', '.join(each)} ]\n"

    return f'backend: "python"\n{side("input", inputs)}{side("output", outputs)}{more}\n'


ADD_SUB_CONFIG = config([("A", "FP32", [4]), ("B", "FP32", [4])], [("SUM", "FP32", [4]), ("DIFFERENCE", "FP32", [4])])


def tensor(name, array, module=httpclient):
    datatype = {"f": "FP32", "i": "INT64", "O": "BYTES"}[array.dtype.kind]
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def ask(client, text, name="asked", module=httpclient, **more):
    made = tensor("ASK", np.array([text.encode()], dtype=np.object_), module)
    return client.infer(name, [made], **more).as_numpy("ANSWER")[0].decode()


def refused(call):
    with pytest.raises(InferenceServerException) as error:
        call()
    return error.value


@pytest.fixture
def serve(start):
    def started(repository, *flags, python=sys.executable):
        return start(repository, "--python", str(python), *flags, engine="rten")

    return started


@pytest.fixture(params=["serve", "cluster"])
def ports(request, serve, binary, tmp_path):
    """Starts a server of a repository, or a cluster, and gives the process that clients ask."""
    def cluster_of(repository):
        names = [folder.name for folder in repository.iterdir()]
        return stack.enter_context(cluster(binary, repository, tmp_path, "--python", sys.executable, models=names))

    with contextlib.ExitStack() as stack:
        yield serve if request.param == "serve" else cluster_of


@pytest.fixture
def asked(serve, repository):
    """A server of the model that does what it is asked for."""
    write(repository, "asked", ASKED, ASKED_CONFIG)
    return serve(repository, "--run-timeout", "1")


def client_of(server):
    return httpclient.InferenceServerClient(server.http, network_timeout=PATIENCE_S, connection_timeout=PATIENCE_S)


def wait_until(done):
    until = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_add_sub_over_both_protocols(serve, repository):
    write(repository, "add_sub", ADD_SUB, ADD_SUB_CONFIG)
    server = serve(repository)
    a, b = np.arange(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    for module, address in ((httpclient, server.http), (grpcclient, server.grpc)):
        with module.InferenceServerClient(address) as client:
            answer = client.infer("add_sub", [tensor("A", a, module), tensor("B", b, module)], request_id="7")
            assert answer.as_numpy("SUM").tolist() == [1, 2, 3, 4]
            assert answer.as_numpy("DIFFERENCE").tolist() == [-1, 0, 1, 2]
            only = client.infer("add_sub", [tensor("A", a, module), tensor("B", b, module)],
                                outputs=[module.InferRequestedOutput("DIFFERENCE")])
            assert only.as_numpy("SUM") is None and only.as_numpy("DIFFERENCE").tolist() == [-1, 0, 1, 2]
    with client_of(server) as client:
        metadata = client.get_model_metadata("add_sub")
        assert metadata["platform"] == "python" and [x["name"] for x in metadata["inputs"]] == ["A", "B"]
        assert client.get_model_config("add_sub")["backend"] == "python"
    server.stop()


def test_strings_come_and_go_in_shapes_that_differ_by_request(serve, repository):
    code = """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                responses = []
                for request in requests:
                    texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
                    rows = [text.decode("utf-8").split() for text in texts.ravel()]
                    longest = max(map(len, rows), default=0)
                    words = np.array([row + [""] * (longest - len(row)) for row in rows], dtype=np.object_)
                    lengths = np.array([[len(word) for word in row] for row in words], dtype=np.int64)
                    outputs = [pb_utils.Tensor("WORDS", words.reshape(len(rows), longest)),
                               pb_utils.Tensor("LENGTHS", lengths.reshape(len(rows), longest))]
                    responses.append(pb_utils.InferenceResponse(outputs))
                return responses
    """
    write(repository, "words", code, config(
        [("TEXT", "STRING", [1])], [("WORDS", "STRING", [-1]), ("LENGTHS", "INT64", [-1])],
        "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 200000 }"))
    server = serve(repository)
    texts = ["one", "zwei drei", "", "vier fünf sechs"]
    answers = {}

    def send(text):
        with client_of(server) as client:
            made = tensor("TEXT", np.array([[text.encode()]], dtype=np.object_))
            answers[text] = client.infer("words", [made])

    threads = [threading.Thread(target=send, args=(text,)) for text in texts]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for text in texts:
        words = [word.decode() for word in answers[text].as_numpy("WORDS").ravel()]
        assert words == text.split() and answers[text].as_numpy("LENGTHS").ravel().tolist() == [len(word) for word in words]
    with client_of(server) as client:
        both = client.infer("words", [tensor("TEXT", np.array([[b"a b"], [b"c"]], dtype=np.object_))])
        assert both.as_numpy("WORDS").tolist() == [[b"a", b"b"], [b"c", b""]]
    assert server.metric("nv_inference_exec_count") < server.metric("nv_inference_count"), "requests shared a batch"


def test_one_request_of_a_batch_fails_alone(serve, repository):
    write(repository, "asked", ASKED, ASKED_CONFIG + "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 300000 }")
    server = serve(repository)
    outcomes = {}

    def send(text):
        with client_of(server) as client:
            made = tensor("ASK", np.array([[text.encode()]], dtype=np.object_))
            try:
                outcomes[text] = client.infer("asked", [made]).as_numpy("ANSWER").ravel()[0].decode()
            except InferenceServerException as error:
                outcomes[text] = (error.status(), error.message())

    asked = ["good", "refuse INVALID_ARG", "fine", "refuse NOT_FOUND"]
    threads = [threading.Thread(target=send, args=(text,)) for text in asked]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert (outcomes["good"], outcomes["fine"]) == ("good done", "fine done")
    assert outcomes["refuse INVALID_ARG"] == ("400", "not this one")
    assert outcomes["refuse NOT_FOUND"] == ("404", "not this one")


def test_the_codes_of_errors_are_the_protocols(asked):
    with grpcclient.InferenceServerClient(asked.grpc) as client:
        for code, status in [("INTERNAL", "INTERNAL"), ("INVALID_ARG", "INVALID_ARGUMENT"), ("UNAVAILABLE", "UNAVAILABLE"),
                             ("UNSUPPORTED", "UNIMPLEMENTED"), ("ALREADY_EXISTS", "ALREADY_EXISTS")]:
            error = refused(lambda code=code: ask(client, f"refuse {code}", module=grpcclient))
            assert (error.status(), error.message()) == (f"StatusCode.{status}", "not this one")


def test_an_exception_is_the_error_of_its_requests_alone(asked):
    with client_of(asked) as client:
        error = refused(lambda: ask(client, "raise"))
        assert error.status() == "500"
        assert "ValueError: the model is not happy (model.py, line " in error.message() and "in one)" in error.message()
        assert ask(client, "hello") == "hello done"
    assert "Traceback" in asked.log and asked.metric("downbeat_executor_restarts_total") == 0


@pytest.mark.parametrize("how, words", [("crash", "signal 11"), ("exit", "last words")])
def test_a_crash_costs_its_requests_alone_and_the_model_comes_back(asked, how, words):
    with client_of(asked) as client:
        error = refused(lambda: ask(client, how))
        assert error.status() == "503" and words in error.message(), error
        wait_until(lambda: requests.get(f"{asked.url}/v2/models/asked/ready", timeout=PATIENCE_S).status_code == 200)
        assert ask(client, "hello") == "hello done"
    assert asked.metric("downbeat_executor_restarts_total") == 1
    asked.stop()


@pytest.mark.parametrize("how", ["endless", "stuck"])
def test_an_endless_loop_is_ended(asked, how):
    with client_of(asked) as client:
        error = refused(lambda: ask(client, how))
        assert error.status() in ("503", "504"), error

        def answers():
            try:
                return ask(client, "hello") == "hello done"
            except InferenceServerException:
                return False

        wait_until(answers)
    asked.stop()


def test_memory_is_limited(serve, repository):
    write(repository, "asked", ASKED, ASKED_CONFIG)
    server = serve(repository, "--python-memory-bytes", "1G")
    with client_of(server) as client:
        error = refused(lambda: ask(client, f"memory {4 << 30}"))
        assert "MemoryError" in error.message()
        assert ask(client, f"memory {1 << 20}") == "memory done"


def test_a_flood_of_output_is_bounded_and_costs_no_answer(asked):
    with client_of(asked) as client:
        assert ask(client, "flood 20000") == "flood done"
        assert ask(client, "hello") == "hello done"
    asked.stop()
    assert asked.log.count("x" * 100) < 2_000
    assert "asked" in next(line for line in asked.log.splitlines() if "x" * 100 in line)


def test_auto_complete_config_completes_the_configuration(serve, repository):
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(auto_complete_model_config):
                auto_complete_model_config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
                auto_complete_model_config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [4]})
                auto_complete_model_config.set_max_batch_size(16)
                auto_complete_model_config.set_dynamic_batching()
                return auto_complete_model_config

            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * 2)])
                        for request in requests]
    """
    write(repository, "completed", code)
    write(repository, "wrong", code, 'input [{ name: "X" data_type: TYPE_INT32 dims: [ 4 ] }]')
    server = serve(repository, "--exit-on-error", "false", "--strict-readiness", "false")
    with client_of(server) as client:
        wait_until(lambda: client.is_model_ready("completed"))
        made = client.get_model_config("completed")
        assert made["max_batch_size"] == 16 and "dynamic_batching" in made and made["input"][0]["dims"] == [4]
        answer = client.infer("completed", [tensor("X", np.ones((3, 4), dtype=np.float32))]).as_numpy("Y")
        assert answer.tolist() == [[2.0] * 4] * 3

        def why():
            return next(model for model in client.get_model_repository_index() if model["name"] == "wrong").get("reason", "")

        wait_until(lambda: "auto_complete_config failed" in why())
        assert "data_type TYPE_FP32 of auto_complete_config differs from TYPE_INT32" in why()


def test_two_instances_work_side_by_side_and_one_is_enough(serve, repository):
    write(repository, "asked", ASKED, ASKED_CONFIG + "instance_group [{ count: 2 kind: KIND_CPU }]")
    server = serve(repository)
    began = time.monotonic()
    threads = [threading.Thread(target=lambda: ask(client_of(server), "sleep 1")) for _ in range(2)]
    [thread.start() for thread in threads]
    children = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_child(pid, server.process.pid)]
    [thread.join() for thread in threads]
    assert len(children) == 2
    assert time.monotonic() - began >= 1
    with client_of(server) as client:
        refused(lambda: ask(client, "crash"))
        # The other instance answers while the first is started again.
        assert [ask(client, "hello") for _ in range(5)] == ["hello done"] * 5


def is_child(pid, parent):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(parent)
    except OSError:
        return False


@pytest.mark.parametrize("form", ["archive", "folder"])
def test_a_model_has_an_environment_of_its_own(serve, repository, form):
    # As conda-pack makes it: bin/python, which here starts another Python with a mark.
    script = f'#!/bin/sh\nMARK=environment exec {sys.executable} "$@"\n'.encode()
    code = """
        import os
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                text = np.array([os.environ.get("MARK", "").encode()], dtype=np.object_)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", text)]) for _ in requests]
    """
    path = f"$$TRITON_MODEL_DIRECTORY/{'env.tar.gz' if form == 'archive' else 'env'}"
    more = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
    folder = write(repository, "own", code, config([("X", "FP32", [1])], [("Y", "STRING", [1])], more))
    if form == "archive":
        with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
            entry = tarfile.TarInfo("bin/python3")
            entry.size, entry.mode = len(script), 0o755
            archive.addfile(entry, io.BytesIO(script))
    else:
        (folder / "env" / "bin").mkdir(parents=True)
        (folder / "env" / "bin" / "python3").write_bytes(script)
        (folder / "env" / "bin" / "python3").chmod(0o755)
    server = serve(repository, python="/nonexistent/python")
    with client_of(server) as client:
        answer = client.infer("own", [tensor("X", np.zeros(1, dtype=np.float32))])
        assert answer.as_numpy("Y").tolist() == [b"environment"]


def test_uploaded_code_does_not_run_unless_the_options_allow_it(serve, repository):
    mark = repository.parent / "ran"
    code = f"open({str(mark)!r}, 'w').close()\n" + textwrap.dedent(ADD_SUB)
    upload = dict(config=json.dumps({"backend": "python", "input": [
        {"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in "AB"], "output": [
        {"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in ("SUM", "DIFFERENCE")]}),
        files={"file:1/model.py": code.encode()})
    write(repository, "add_sub", ADD_SUB, ADD_SUB_CONFIG)
    server = serve(repository, *EXPLICIT, "--load-model", "add_sub")
    with client_of(server) as client:
        for name in ("add_sub", "other"):
            assert "--allow-uploaded-python" in refused(lambda name=name: client.load_model(name, **upload)).message()
        own = {"backend": "python", "parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp"}}}
        assert "--allow-uploaded-python" in refused(lambda: client.load_model("add_sub", config=json.dumps(own))).message()
        assert client.is_model_ready("add_sub")
    assert not mark.exists()
    server.stop()
    server = serve(repository, *EXPLICIT, "--allow-uploaded-python")
    with client_of(server) as client:
        client.load_model("other", **upload)
        assert client.is_model_ready("other")
    assert mark.exists()


def test_a_request_has_its_parameters_and_names(ports, repository):
    code = """
        import json
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [self.one(request) for request in requests]

            def one(self, request):
                seen = {"id": request.request_id(), "parameters": json.loads(request.parameters()),
                        "outputs": request.requested_output_names(), "model": request.model_name(),
                        "correlation": request.correlation_id(), "cancelled": request.is_cancelled(),
                        "timeout": request.timeout() > 0, "flags": request.flags(),
                        "inputs": [tensor.name() for tensor in request.inputs()],
                        "dir": pb_utils.get_model_dir()[-7:]}
                text = np.array([json.dumps(seen).encode()], dtype=np.object_)
                return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)])
    """
    folder = write(repository, "seen", code, config([("X", "FP32", [1])], [("SEEN", "STRING", [1])]))
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text + 'input [{ name: "Z" data_type: TYPE_FP32 dims: [ 2 ] optional: true }]\n')
    server = ports(repository)
    x = np.zeros(1, dtype=np.float32)
    with client_of(server) as client:
        answer = client.infer("seen", [tensor("X", x)], request_id="r1", sequence_id=42, sequence_start=True, timeout=5_000_000,
                              parameters={"temperature": 0.5, "name": "n", "flag": True},
                              outputs=[httpclient.InferRequestedOutput("SEEN")])
        seen = json.loads(answer.as_numpy("SEEN")[0])
        assert seen["id"] == "r1" and seen["model"] == "seen" and seen["outputs"] == ["SEEN"]
        parameters = seen["parameters"]
        assert (parameters["temperature"], parameters["name"], parameters["flag"]) == (0.5, "n", True)
        assert seen["correlation"] == 42 and seen["flags"] == 1 and seen["timeout"] and not seen["cancelled"]
        assert seen["inputs"] == ["X"] and seen["dir"] == "/seen/1"
        both = client.infer("seen", [tensor("X", x), tensor("Z", np.zeros(2, dtype=np.float32))])
        assert json.loads(both.as_numpy("SEEN")[0])["inputs"] == ["X", "Z"]


def test_a_model_hears_that_its_client_has_left(ports, repository):
    mark = repository.parent / "cancelled"
    code = f"""
        import time
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                if requests[0].inputs()[0].as_numpy()[0] == 7:
                    open({str(mark)!r} + "-begun", "w").close()
                    until = time.monotonic() + {PATIENCE_S}
                    while not requests[0].is_cancelled() and time.monotonic() < until:
                        time.sleep(0.01)
                    if requests[0].is_cancelled():
                        open({str(mark)!r}, "w").close()
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, dtype=np.float32))]) for _ in requests]
    """
    write(repository, "patient", code, config([("X", "FP32", [1])], [("Y", "FP32", [1])]))
    server = ports(repository)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        heard = threading.Event()
        seven = tensor("X", np.full(1, 7, dtype=np.float32), grpcclient)
        call = client.async_infer("patient", [seven], lambda result, error: heard.set())
        wait_until(lambda: pathlib.Path(f"{mark}-begun").exists())
        call.cancel()
        wait_until(mark.exists)


def test_metrics_and_log_lines_of_a_model_reach_the_server(serve, repository):
    code = """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                family = pb_utils.MetricFamily("requests_seen", "Requests seen", pb_utils.MetricFamily.COUNTER)
                self.seen = family.Metric(labels={"model": args["model_name"]})
                gauge = pb_utils.MetricFamily("last_value", "The last value", pb_utils.MetricFamily.GAUGE)
                self.last = gauge.Metric(labels={})
                self.seen.increment(0.5)
                pb_utils.Logger.log_info("an information")
                pb_utils.Logger.log("a warning", pb_utils.Logger.WARNING)
                pb_utils.Logger.log_error("an error")
                print("plain output")

            def execute(self, requests):
                for request in requests:
                    value = float(request.inputs()[0].as_numpy()[0])
                    if value == 9:
                        self.seen.increment(1)
                        self.last.set(value)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())]) for request in requests]
    """
    write(repository, "metered", code, config([("X", "FP32", [1])], [("Y", "FP32", [1])]))
    server = serve(repository)
    with client_of(server) as client:
        for _ in range(3):
            client.infer("metered", [tensor("X", np.full(1, 9, dtype=np.float32))])
    assert server.metric("requests_seen", model="metered") == 3.5 and server.metric("last_value") == 9

    def lines(text):
        return [line for line in server.log.splitlines() if text in line]

    wait_until(lambda: lines("plain output"))
    for level, text in (("INFO", "an information"), ("WARN", "a warning"), ("ERROR", "an error"), ("INFO", "plain output")):
        assert any(level in line and "metered" in line for line in lines(text)), lines(text)


def test_inputs_are_shared_memory_that_stays_as_long_as_the_model_keeps_it(serve, repository):
    code = """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.kept = []

            def execute(self, requests):
                for request in requests:
                    array = request.inputs()[0].as_numpy()
                    again = np.from_dlpack(request.inputs()[0])
                    assert again.ctypes.data == array.ctypes.data, "DLPack copies nothing"
                    assert not array.flags.owndata, "it is a view of the shared memory"
                    if array[0] >= 0:
                        self.kept.append(array)
                total = np.array([sum(float(kept[0]) for kept in self.kept)], dtype=np.float32)
                return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", total)]) for _ in requests]
    """
    write(repository, "keeps", code, config([("X", "FP32", [1])], [("Y", "FP32", [1])]))
    server = serve(repository, "--no-profiling")

    def total(value):
        return client.infer("keeps", [tensor("X", np.full(1, value, dtype=np.float32))]).as_numpy("Y")[0]

    with client_of(server) as client:
        begin = total(-1)
        assert [total(value) - begin for value in (1, 10, 100, -5)] == [1, 11, 111, 111]
    assert not any(name.startswith("/dev/shm") for name in server.open_files()), "no name that others could open"


def test_large_tensors_and_all_datatypes(serve, repository):
    datatypes = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"]
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y" + t.name()[1:], t.as_numpy()) for t in request.inputs()])
                        for request in requests]
    """
    sizes = [(f"X{name}", name, [-1]) for name in datatypes]
    write(repository, "identity", code, config(sizes, [(f"Y{name}", name, [-1]) for name in datatypes]))
    server = serve(repository)
    with client_of(server) as client:
        for count in (1, 300_000, 0, 7):
            made, sent = [], {}
            for name in datatypes:
                dtype = np.dtype("bool" if name == "BOOL" else name.lower().replace("fp", "float"))
                sent[name] = (np.arange(count) % 2).astype(dtype)
                one = httpclient.InferInput(f"X{name}", [count], name)
                one.set_data_from_numpy(sent[name])
                made.append(one)
            answer = client.infer("identity", made)
            for name in datatypes:
                got = answer.as_numpy(f"Y{name}")
                # The client gives an empty array no datatype.
                assert count == 0 or got.dtype == sent[name].dtype
                assert got.shape == sent[name].shape and np.array_equal(got, sent[name])


def test_the_outputs_of_a_batched_model_need_no_row_for_each_of_the_inputs(serve, repository):
    """Detectors answer a picture with any number of boxes, as Triton lets them."""
    code = """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                boxes = [np.full((int(np.abs(r.inputs()[0].as_numpy()).sum()) % 7, 4), 0.5, np.float32) for r in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("BOXES", one)]) for one in boxes]
    """
    write(repository, "boxes", code, config([("X", "FP32", [2])], [("BOXES", "FP32", [-1, 4])], "max_batch_size: 4"))
    server = serve(repository)
    with client_of(server) as client:
        for count in (0, 3, 5):
            answer = client.infer("boxes", [tensor("X", np.array([[count, 0]], np.float32))])
            assert answer.as_numpy("BOXES").shape == (count, 4)


def test_an_ensemble_answers_without_an_output_that_its_step_leaves_out(serve, repository):
    """As in Triton, unless another step needs the output."""
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor("A", r.inputs()[0].as_numpy())]) for r in requests]
    """
    write(repository, "part", code, config([("X", "FP32", [2])], [("A", "FP32", [2]), ("B", "FP32", [2])], "max_batch_size: 8"))
    two = ("TYPE_FP32", [2])
    ensembles.write(repository, "whole", [ensembles.step("part", {"X": "in"}, {"A": "a", "B": "b"})], {"in": two}, {"a": two, "b": two})
    steps = [ensembles.step("part", {"X": "in"}, {"B": "b"}), ensembles.step("part", {"X": "b"}, {"A": "a"})]
    ensembles.write(repository, "chained", steps, {"in": two}, {"a": two})
    server = serve(repository)
    made = tensor("in", np.ones((1, 2), np.float32))
    with client_of(server) as client:
        answer = client.infer("whole", [made])
        assert answer.as_numpy("a").tolist() == [[1, 1]] and answer.as_numpy("b") is None
        assert "the model gave no output 'B'" in refused(lambda: client.infer("chained", [made])).message()


def test_instances_know_their_places(serve, repository):
    code = """
        import time
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.place = " ".join(args[f"model_instance_{key}"] for key in ("name", "kind", "device_id"))

            def execute(self, requests):
                # Requests side by side then reach all instances.
                time.sleep(0.2)
                place = np.array([self.place.encode()], dtype=np.object_)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("PLACE", place)])] * len(requests)
    """
    groups = "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 3 ] }, { name: 'own' kind: KIND_CPU }, { kind: KIND_MODEL } ]"
    write(repository, "places", code, config([("X", "FP32", [1])], [("PLACE", "STRING", [1])], groups))
    server, seen = serve(repository), set()
    made = tensor("X", np.zeros(1, np.float32))

    def send():
        with client_of(server) as client:
            seen.add(client.infer("places", [made]).as_numpy("PLACE")[0].decode())

    expected = {f"places_0_{count} GPU {device}" for count in (0, 1) for device in (0, 3)} | {"own_0 CPU 0", "places_2_0 MODEL 0"}

    def all_seen():
        threads = [threading.Thread(target=send) for _ in range(12)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return seen >= expected

    wait_until(lambda: all_seen() or seen > expected)
    assert seen == expected, seen


def test_an_answer_has_its_parameters(ports, repository):
    code = """
        import json
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [self.one(json.loads(request.parameters()), request.inputs()[0].as_numpy()) for request in requests]

            def one(self, asked, x):
                if "kind" in asked:
                    try:
                        pb_utils.InferenceResponse(parameters={"a": [1]} if asked["kind"] == "value" else {1: "a"})
                    except pb_utils.TritonModelException as error:
                        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
                parameters = {"text": "a", "count": 7, "sure": True} if asked.get("some") else None
                return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)], parameters=parameters)
    """
    write(repository, "told", code, config([("X", "FP32", [1])], [("Y", "FP32", [1])]))
    server = ports(repository)
    for module, address in ((httpclient, server.http), (grpcclient, server.grpc)):
        made = tensor("X", np.zeros(1, np.float32), module)
        with module.InferenceServerClient(address) as client:
            assert "parameters" not in answer_of(client.infer("told", [made]), module)
            told = answer_of(client.infer("told", [made], parameters={"some": True}), module)["parameters"]
            if module is grpcclient:
                told = {key: next(iter(value.values())) for key, value in told.items()}
                told["count"] = int(told["count"])
            assert told == {"text": "a", "count": 7, "sure": True}
    with client_of(server) as client:
        for kind, words in (("value", "values to have type bool/int/str, found type <class 'list'>"), ("key", "keys to have type str, found type <class 'int'>")):
            error = refused(lambda kind=kind: client.infer("told", [tensor("X", np.zeros(1, np.float32))], parameters={"kind": kind}))
            assert words in error.message()
    generated = requests.post(f"{server.url}/v2/models/told/generate", json={"X": 1.0, "some": True}, timeout=PATIENCE_S).json()
    assert generated["text"] == "a" and generated["count"] == 7 and generated["Y"] == 1.0


def answer_of(result, module):
    return result.get_response(as_json=True) if module is grpcclient else result.get_response()


BROKEN = {
    "no_class": ("x = 1", "the file has no class TritonPythonModel"),
    "syntax": ("\ndef (", "the import failed: SyntaxError: invalid syntax (model.py, line 2)"),
    "missing": ("import surely_not_installed", "pip install surely_not_installed"),
    "initialize": ("class TritonPythonModel:\n    def initialize(self, args):\n        raise KeyError('weights')\n"
                   "    def execute(self, requests):\n        return []", "initialize failed: KeyError: 'weights' (model.py, line 3, in initialize)"),
    "no_execute": ("class TritonPythonModel:\n    pass", "no method execute"),
}


def test_a_decoupled_model_is_no_step_of_an_ensemble(serve, repository, binary):
    tensors = [("X", "FP32", [1])], [("Y", "FP32", [1])]
    write(repository, "many", COUNTS, config(*tensors, "model_transaction_policy { decoupled: true }"))
    one = ("TYPE_FP32", [1])
    ensembles.write(repository, "e", [ensembles.step("many", {"X": "in"}, {"Y": "out"})], {"in": one}, {"out": one}, max_batch_size=0)
    words = "step 0 ('many'): the model is decoupled, and a step gives one answer to each request"
    command = [binary, "config", "check", str(repository), "--engine", "rten", "--python", sys.executable]
    assert words in subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    server = serve(repository, "--strict-readiness", "false")
    with client_of(server) as client:
        wait_until(lambda: any(words in model.get("reason", "") for model in client.get_model_repository_index()))


READY = """
    import asyncio, pathlib
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.file = pathlib.Path(args["model_repository"]) / "state"

        def execute(self, requests):
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())]) for request in requests]

        def is_ready(self):
            state = self.file.read_text()
            if state == "raise":
                raise ValueError("the database is gone")
            return self.later() if state == "later" else {"yes": True, "no": False, "word": "yes"}[state]

        async def later(self):
            await asyncio.sleep(0.05)
            return True
"""


def test_a_models_own_check_decides_whether_it_is_ready(serve, repository):
    folder = write(repository, "checked", READY, config([("X", "FP32", [1])], [("Y", "FP32", [1])], "instance_group [{ count: 2 }]"))
    (folder / "state").write_text("no")
    server = serve(repository)
    x = np.ones(1, dtype=np.float32)
    with client_of(server) as client, grpcclient.InferenceServerClient(server.grpc) as other:
        for state, ready in (("yes", True), ("no", False), ("raise", False), ("word", False), ("later", True)):
            (folder / "state").write_text(state)
            assert (client.is_model_ready("checked"), other.is_model_ready("checked")) == (ready, ready), state
            assert client.infer("checked", [tensor("X", x)]).as_numpy("Y") == x
    wait_until(lambda: "the database is gone" in server.log and "is_ready must return True or False" in server.log)


def test_a_check_that_does_not_return_is_no_yes_and_stops_no_request(serve, repository):
    code = READY.replace("state = self.file.read_text()", "import time; time.sleep(3600)")
    write(repository, "checked", code, config([("X", "FP32", [1])], [("Y", "FP32", [1])]))
    server = serve(repository)
    with client_of(server) as client:
        assert not client.is_model_ready("checked")
        assert client.infer("checked", [tensor("X", np.ones(1, dtype=np.float32))]).as_numpy("Y") == 1


# Answers the number of requests that it has had, and how many of them were not zero.
COUNTS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.seen = []

        def execute(self, requests):
            self.seen.extend(float(request.inputs()[0].as_numpy()[0]) for request in requests)
            answer = np.array([len(self.seen), sum(value != 0 for value in self.seen)], dtype=np.float32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)]) for _ in requests]
"""
WARM_UP = 'model_warmup [{ name: "zero" batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }]'


def test_made_up_requests_do_not_reach_code_whose_author_keeps_them_away(serve, repository):
    tensors = [("X", "FP32", [1])], [("Y", "FP32", [2])]
    write(repository, "counts", COUNTS, config(*tensors))
    write(repository, "sampled", COUNTS, config(*tensors, WARM_UP))
    one = [tensor("X", np.ones(1, dtype=np.float32))]
    with client_of(serve(repository, "--no-profiling")) as client:
        assert client.infer("counts", one).as_numpy("Y").tolist() == [1, 1]
        assert client.infer("sampled", one).as_numpy("Y")[1] == 1
    with client_of(serve(repository)) as client:
        assert client.infer("sampled", one).as_numpy("Y")[1] == 1, "only samples of the configuration"


def test_the_index_says_what_is_wrong(serve, repository):
    for name, (code, _) in BROKEN.items():
        write(repository, name, code, ASKED_CONFIG)
    write(repository, "good", ASKED, ASKED_CONFIG)
    server = serve(repository, "--strict-readiness", "false")
    with client_of(server) as client:
        wait_until(lambda: client.is_model_ready("good"))
        index = lambda: {model["name"]: model.get("reason", "") for model in client.get_model_repository_index()}  # noqa: E731
        wait_until(lambda: all(words in index()[name] for name, (_, words) in BROKEN.items()))


def test_a_python_without_numpy_is_named_with_the_remedy(serve, repository, tmp_path):
    write(repository, "asked", ASKED, ASKED_CONFIG)
    for python, words in ((empty_python(tmp_path), "numpy is missing in"), ("/nonexistent/python", "name a Python with --python")):
        server = serve(repository, "--strict-readiness", "false", python=python)
        with client_of(server) as client:
            wait_until(lambda client=client, words=words: words in client.get_model_repository_index()[0].get("reason", ""))
        server.stop()


def empty_python(folder):
    """A Python that sees no packages."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return script
