"""Runs a Python model for the server: loads it, gives it requests, and sends its answers."""

import asyncio
import concurrent.futures
import ctypes
import functools
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
import weakref

# Missing without numpy: the load then fails with words of its own.
utils = sys.modules.get("triton_python_backend_utils")
side = sys.modules.get("downbeat_side")
np = sys.modules.get("numpy")

ALIGNMENT = 64
MOST_FILES = 3
# The core's names of datatypes by the protocol's: the worker's messages have the former.
CORE_NAMES = {
    "BOOL": "Bool", "UINT8": "Uint8", "UINT16": "Uint16", "UINT32": "Uint32", "UINT64": "Uint64",
    "INT8": "Int8", "INT16": "Int16", "INT32": "Int32", "INT64": "Int64",
    "FP16": "Fp16", "FP32": "Fp32", "FP64": "Fp64", "BF16": "Bf16", "BYTES": "Bytes",
}  # fmt: skip
PROTOCOL_NAMES = {core: protocol for protocol, core in CORE_NAMES.items()}


class Ended(BaseException):
    """The server ends the run."""


class Failed(Exception):
    """The model cannot be loaded; the text is for people."""


# `json.dumps` would make an encoder for each message.
encoded = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def send(stream, message):
    data = encoded(message).encode()
    stream.sendall(len(data).to_bytes(4, "little") + data)


class Reader:
    """Reads messages of a socket."""

    def __init__(self, stream):
        self.file = stream.makefile("rb")

    def receive(self):
        head = self.file.read(4)
        if len(head) < 4:
            return None
        length = int.from_bytes(head, "little")
        data = self.file.read(length)
        return json.loads(data) if len(data) == length else None


def receive_with_files(stream):
    """The next message of the control socket, with its files; None: the server is gone."""
    head, files, _, _ = socket.recv_fds(stream, 4, MOST_FILES)
    if not head:
        return None, files
    data = bytearray(head)
    while len(data) < 4:
        data += stream.recv(4 - len(data)) or exit_now()
    length = int.from_bytes(data, "little")
    data = bytearray()
    while len(data) < length:
        data += stream.recv(min(length - len(data), 1 << 20)) or exit_now()
    return json.loads(data), files


def exit_now():
    os._exit(0)


class Region:
    """Memory that this process shares with the server."""

    def __init__(self, fd):
        self.fd, self.map = fd, None
        self.follow(os.fstat(fd).st_size)

    def follow(self, length):
        if self.map is None or length > len(self.map):
            # Arrays of the former mapping keep it.
            self.map = mmap.mmap(self.fd, length)

    def grow_to(self, length):
        if length > len(self.map):
            length = 1 << (length - 1).bit_length()
            os.ftruncate(self.fd, length)
            self.follow(length)

    def close(self):
        os.close(self.fd)


def innermost(error, folder):
    """The place of an exception in the model's own code, or the last place."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({os.path.basename(error.filename)}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith("<downbeat>")]
    own = [frame for frame in frames if frame.filename.startswith(folder)]
    frame = (own or frames or [None])[-1]
    return "" if frame is None else f" ({os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name})"


def words(error, folder=""):
    """The last line of a traceback, and the place."""
    last = traceback.format_exception_only(type(error), error)[-1].strip()
    return last + innermost(error, folder)


class Log:
    """Lines for the server's log on standard error."""

    def __init__(self):
        self.file = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
        self.lock = threading.Lock()

    def line(self, level, message):
        with self.lock:
            for line in message.splitlines() or [""]:
                self.file.write(f"\x01{level}{line}\n")


class Model:
    """The model's class, its instance, and the order of its tensors."""

    def __init__(self, call, link):
        self.settings, self.side, self.loop = call["settings"], link, None
        self.path = call["path"]
        self.folder = os.path.dirname(self.path)
        self.name = self.settings["model"]
        self.warned = set()
        utils._model_dir = self.folder
        sys.path[:0] = [self.folder, self.settings["folder"]]
        self.config = json.loads(self.settings["config"])
        self.callers = utils._callers = side.Callers(link, self)
        kind = self.import_class()
        if self.settings["completes"] and callable(getattr(kind, "auto_complete_config", None)):
            completed = self.run("auto_complete_config", kind.auto_complete_config, utils.ModelConfig(self.settings["config"]))
            if not isinstance(completed, utils.ModelConfig):
                raise Failed("auto_complete_config must return the configuration that it was given")
            self.config = completed.as_dict()
        self.outputs = [self.spec(tensor, "output") for tensor in self.config.get("output", [])]
        self.inputs = [self.spec(tensor, "input") for tensor in self.config.get("input", [])]
        self.decoupled = utils.using_decoupled_model(self.config)
        self.places = {spec["name"]: place for place, spec in enumerate(self.outputs)}
        self.instance = self.run("the constructor", kind)
        if not callable(getattr(self.instance, "execute", None)):
            raise Failed("TritonPythonModel has no method execute(self, requests)")
        if callable(getattr(self.instance, "initialize", None)):
            self.run("initialize", self.instance.initialize, self.arguments())
        self.checks_ready = callable(getattr(self.instance, "is_ready", None))
        link.unready = self.unready

    def arguments(self):
        name, kind, device = place_of(self.config, self.name, self.settings["instance"])
        return {
            "model_config": json.dumps(self.config),
            "model_instance_kind": kind,
            "model_instance_name": name,
            "model_instance_device_id": str(device),
            "model_repository": self.settings["folder"],
            "model_version": str(self.settings["version"]),
            "model_name": self.name,
        }

    def import_class(self):
        version, stem = os.path.basename(self.folder), os.path.splitext(os.path.basename(self.path))[0]
        if version.isdigit() and "." not in stem:
            # As a part of its folder, so that `from .other import ...` works.
            module = self.run("the import", importlib.import_module, f"{version}.{stem}")
        else:
            spec = importlib.util.spec_from_file_location("model", self.path)
            module = importlib.util.module_from_spec(spec)
            sys.modules["model"] = module
            self.run("the import", spec.loader.exec_module, module)
        kind = getattr(module, "TritonPythonModel", None)
        if not inspect.isclass(kind):
            raise Failed("the file has no class TritonPythonModel")
        return kind

    def run(self, step, function, *arguments):
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            hint = ""
            if isinstance(error, ModuleNotFoundError) and error.name:
                hint = f"; type: {sys.executable} -m pip install {error.name.partition('.')[0]}"
            raise Failed(f"{step} failed: {words(error, self.folder)}{hint}") from None

    def spec(self, tensor, side):
        name, data_type = tensor.get("name", ""), tensor.get("data_type", "TYPE_INVALID")
        if data_type not in utils._BY_CONFIG_NAME:
            raise Failed(
                f"{side} '{name}' has no data_type; write it in config.pbtxt, or add the {side} in auto_complete_config"
            )
        dims = (tensor.get("reshape") or {}).get("shape", tensor.get("dims")) or []
        if not tensor.get("dims"):
            raise Failed(f"{side} '{name}' has no dims; write them in config.pbtxt, or in auto_complete_config")
        dims = [int(size) for size in dims]
        if int(self.config.get("max_batch_size", 0)) > 0:
            dims.insert(0, -1)
        return {"name": name, "datatype": CORE_NAMES[utils._BY_CONFIG_NAME[data_type][0]], "dims": dims}

    def execute(self, requests, is_made_up):
        """The responses. A coroutine of a decoupled model goes on beside later runs: then its future."""
        responses = self.instance.execute(requests)
        if not inspect.iscoroutine(responses):
            return responses
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            if self.decoupled:
                threading.Thread(target=self.loop.run_forever, daemon=True, name="downbeat-loop").start()
            else:
                asyncio.set_event_loop(self.loop)
        if not self.decoupled:
            return self.loop.run_until_complete(responses)
        future = asyncio.run_coroutine_threadsafe(responses, self.loop)
        return side.waited_for(future) if is_made_up else future

    def stand_in(self):
        """The answer of a decoupled model that gave none to a made-up request."""
        tensors = []
        for spec in self.outputs:
            datatype = PROTOCOL_NAMES[spec["datatype"]]
            shape = [max(size, 1) for size in spec["dims"]]
            if datatype == "BYTES":
                array = np.full(shape, b"", dtype=np.object_)
            else:
                array = np.zeros(shape, dtype=np.uint16 if datatype == "BF16" else utils._BY_PROTOCOL[datatype])
            tensors.append(utils.Tensor._of(spec["name"], array, datatype))
        return utils.InferenceResponse(output_tensors=tensors)

    def loaded(self):
        return {
            "inputs": self.inputs, "outputs": self.outputs, "segments": [], "activations": None, "operators": None,
            "profile": None, "rewritten": None, "configuration": json.dumps(self.config),
            "metering": utils._take_metering(), "checks_ready": self.checks_ready,
        }  # fmt: skip

    def unready(self):
        """The reason why the model's own check says that it is not ready; None: it is ready."""
        try:
            answer = self.instance.is_ready()
            if inspect.iscoroutine(answer):
                shared = self.loop if self.decoupled else None
                answer = asyncio.run_coroutine_threadsafe(answer, shared).result() if shared else asyncio.run(answer)
        except Exception as error:
            traceback.print_exc()
            return f"is_ready raised {words(error, self.folder)}"
        if not isinstance(answer, bool):
            self.warn_once(f"is_ready must return True or False, and returned a {type(answer).__name__}")
            return f"is_ready returned a {type(answer).__name__}"
        return None if answer else "is_ready returned False"

    def warn_once(self, text):
        if text not in self.warned:
            self.warned.add(text)
            utils.Logger.log_warn(text)

    def finalize(self):
        finalize = getattr(self.instance, "finalize", None)
        if callable(finalize):
            try:
                finalize()
            except Exception:
                traceback.print_exc()


def place_of(config, model, number):
    """The name, the kind and the device of an instance. Each group has `count` instances, of KIND_GPU on each of its GPUs."""
    places = []
    for at, group in enumerate(config.get("instance_group") or [{}]):
        kind = (group.get("kind") or "KIND_CPU").removeprefix("KIND_").replace("AUTO", "CPU")
        devices = (group.get("gpus") or [0]) if kind == "GPU" else [0]
        for count in range(max(int(group.get("count") or 1), 1)):
            places.extend((f"{group.get('name') or f'{model}_{at}'}_{count}", kind, device) for device in devices)
    return places[number % len(places)]


def array_of(base, placed):
    """The array of a tensor in the inputs, without a copy."""
    begin = placed["begin"]
    data = base[begin : begin + placed["len"]]
    datatype = PROTOCOL_NAMES[placed["datatype"]]
    if datatype == "BYTES":
        return utils._unpacked(data.data).reshape(placed["shape"]), datatype
    dtype = np.uint16 if datatype == "BF16" else utils._BY_PROTOCOL[datatype]
    return data.view(dtype).reshape(placed["shape"]), datatype


class Lane:
    """Runs requests that come over a socket."""

    def __init__(self, model, stream, inputs, outputs):
        self.model, self.stream, self.reader = model, stream, Reader(stream)
        self.takers = []
        self.inputs, self.outputs = Region(inputs), Region(outputs)
        self.run = None

    def serve(self):
        while True:
            call = self.reader.receive()
            if call is None:
                break
            self.run = call["run"]
            try:
                answer = self.answer(call)
            except Ended:
                answer = {"Failed": "it was ended before it was done"}
            finally:
                self.run = None
            send(self.stream, answer)
        self.stream.close()
        self.inputs.close()
        self.outputs.close()

    def answer(self, call):
        self.inputs.follow(call["batch"]["region"])
        base = np.frombuffer(self.inputs.map, dtype=np.uint8)
        alive = weakref.ref(base)
        requests = self.requests(call, base)
        del base
        count, reason, callers, takers = len(requests), None, self.model.callers, self.takers
        callers_of_run = callers.enter(requests)
        # Many models refuse the requests that the server makes up at load.
        is_made_up = all(asked["is_made_up"] for asked in call["asked"])
        try:
            responses = self.model.execute(requests, is_made_up)
        except side.Enough:
            responses = None
        except Exception as error:
            for taker in takers:
                # The error is the end: the senders that go with the frames of execute tell no other.
                taker.is_over = True
            if not is_made_up:
                traceback.print_exc()
            reason = words(error, self.model.folder)
            traceback.clear_frames(error.__traceback__)
        except SystemExit:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        finally:
            callers.leave(callers_of_run)
        del requests
        if any(taker.first is not None for taker in takers) and reason is not None:
            # An answer that was sent counts, although execute failed then.
            failed = utils.InferenceResponse(error=utils.TritonError(reason))
            responses, reason = [taker.first or failed for taker in takers], None
        if reason is not None:
            self.takers = takers = taker = None
            kept = alive() is not None
            return {"Raised": {"reason": reason, "keeps_inputs": kept, "metering": utils._take_metering()}}
        if isinstance(responses, concurrent.futures.Future):
            responses.add_done_callback(functools.partial(self.end, takers))
            responses = [utils.InferenceResponse() for _ in takers]
        else:
            responses = self.taken(takers, responses)
        self.takers = takers = None
        if not isinstance(responses, (list, tuple)) or len(responses) != count:
            given = f"{len(responses)}" if isinstance(responses, (list, tuple)) else type(responses).__name__
            reason = f"execute must return a list with a response for each of the {count} requests, and returned {given}"
            return {"Raised": {"reason": reason}}
        batch, replies = self.written(responses)
        del responses
        answer = {"batch": batch, "requests": replies, "metering": utils._take_metering()}
        if alive() is not None:
            answer["keeps_inputs"] = True
        return {"Answered": answer}

    def end(self, takers, future):
        """A coroutine of a decoupled model has ended."""
        error = None if future.cancelled() else future.exception()
        for taker in takers:
            if error is not None:
                # The senders that go with the frames of execute tell no other end.
                taker.is_over = True
                taker.send(utils.InferenceResponse(error=utils.TritonError(words(error, self.model.folder))), True)
            elif not taker.is_used:
                taker.send(None, True)
        if error is not None:
            traceback.print_exception(error)

    def taken(self, takers, responses):
        """The responses of execute, with those that went through response senders."""
        if responses is None and (self.model.decoupled or any(taker.is_used for taker in takers)):
            responses = [None] * len(takers)
        if not isinstance(responses, (list, tuple)) or len(responses) != len(takers):
            return responses
        return [self.taken_one(taker, response) for taker, response in zip(takers, responses)]

    def taken_one(self, taker, response):
        if isinstance(taker, side.Remote):
            if not taker.is_used:
                taker.send(response, True)
            return utils.InferenceResponse()
        if taker.is_used and (response is None or taker.first is not None):
            # An answer that was sent comes before the one that execute returned.
            response = taker.response(None if self.model.decoupled else self.model.loop)
        return self.model.stand_in() if response is None and self.model.decoupled else response

    def requests(self, call, base):
        """The requests of a call, on the arrays of its batch."""
        tensors, specs = call["batch"]["tensors"], self.model.inputs
        left = self.inputs.map
        requests, self.takers = [], []
        for asked in call["asked"]:
            inputs = [
                utils.Tensor._of(spec["name"], *array_of(base, tensors[place]))
                for spec, place in zip(specs, asked["inputs"])
                if place is not None
            ]
            parameters = asked["parameters"] or "{}"
            names = asked["outputs"] or list(self.model.places)
            request = utils.InferenceRequest._of(
                asked["id"], inputs, names, self.model.name, self.model.settings["version"], parameters
            )
            request._timeout = asked["budget_us"] or 0
            taker = self.taker(asked)
            self.takers.append(taker)
            request._taker = taker
            request._left = lambda left=left, at=asked["left"]: left[at] != 0
            if "sequence_id" in parameters:
                given = json.loads(parameters)
                request._correlation_id = given.get("sequence_id", 0)
                request._flags = bool(given.get("sequence_start")) | bool(given.get("sequence_end")) << 1
            requests.append(request)
        return requests

    def taker(self, asked):
        key = asked["answers"]
        return side.Local(not self.model.decoupled) if key is None else side.Remote(self.model.side, key, self.sent_outputs)

    def sent_outputs(self, response):
        try:
            outputs = self.outputs_of(response)
        except Failed as error:
            raise utils.TritonModelException(str(error)) from None
        return {place: (array, data, PROTOCOL_NAMES[wanted]) for place, (array, data, wanted) in outputs.items()}

    def written(self, responses):
        """Writes the outputs of all responses. Returns the batch, and a reply for each response."""
        arrays, placed, replies, end = [], [], [], 0
        for response in responses:
            try:
                outputs = self.outputs_of(response)
            except Failed as error:
                replies.append({"Error": {"reason": str(error), "code": utils.TritonError.INTERNAL}})
                continue
            if outputs is None:
                error = response.error()
                replies.append({"Error": {"reason": error.message(), "code": error.code()}})
                continue
            places = [None] * len(self.model.outputs)
            for place, (array, data, datatype) in outputs.items():
                begin = -(-end // ALIGNMENT) * ALIGNMENT
                length = len(data) if data is not None else array.nbytes
                end = begin + length
                places[place] = len(placed)
                placed.append(
                    {"datatype": datatype, "shape": list(array.shape), "begin": begin, "len": length}
                )
                arrays.append((array, data))
            reply = {"places": places}
            if response._parameters:
                reply["parameters"] = response.parameters()
            replies.append({"Outputs": reply})
        self.outputs.grow_to(end)
        memory = self.outputs.map
        for (array, data), place in zip(arrays, placed):
            begin, length = place["begin"], place["len"]
            if data is not None:
                memory[begin : begin + length] = data
            elif length:
                target = np.frombuffer(memory, dtype=array.dtype, count=array.size, offset=begin)
                np.copyto(target.reshape(array.shape), array)
        return {"region": len(memory), "tensors": placed}, replies

    def outputs_of(self, response):
        """The outputs of a response by their places: array, strings' bytes, datatype; None: an error."""
        if not isinstance(response, utils.InferenceResponse):
            raise Failed(f"execute returned a {type(response).__name__} in place of a pb_utils.InferenceResponse")
        if response.has_error():
            return None
        outputs = {}
        for tensor in response.output_tensors():
            place = self.model.places.get(tensor._name)
            if place is None:
                self.model.warn_once(f"execute gives the output '{tensor._name}', which the configuration does not have")
                continue
            wanted = self.model.outputs[place]["datatype"]
            array, datatype = tensor._array, CORE_NAMES[tensor._datatype]
            if datatype != wanted:
                array = self.cast_to(tensor, wanted)
            outputs[place] = (array, utils._packed(array) if wanted == "Bytes" else None, wanted)
        return outputs

    def cast_to(self, tensor, wanted):
        protocol = PROTOCOL_NAMES[wanted]
        dtype = utils._BY_PROTOCOL[protocol]
        if tensor._array.size == 0:
            # No element has a datatype.
            return np.empty(tensor._array.shape, dtype=dtype or np.uint16)
        if "BYTES" in (protocol, tensor._datatype) or dtype is None or tensor._datatype == "BF16":
            raise Failed(
                f"output '{tensor._name}' is {tensor._datatype}, and the configuration declares {protocol}"
            )
        self.model.warn_once(
            f"output '{tensor._name}' is {tensor._datatype}, and the configuration declares {protocol}; the server "
            f"converts each answer"
        )
        return tensor._array.astype(dtype)


class Worker:
    """The process: one thread hears the server, the main thread runs the model."""

    def __init__(self, control):
        self.control, self.calls, self.lane = control, queue.SimpleQueue(), None
        self.main = threading.get_ident()

    def listen(self):
        while True:
            try:
                call, files = receive_with_files(self.control)
            except OSError:
                call, files = None, []
            if isinstance(call, dict) and "Stop" in call:
                self.stop(call["Stop"]["run"])
                continue
            self.calls.put((call, files))
            if call is None:
                lane = self.lane
                if lane is not None:
                    try:
                        lane.stream.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass
                return

    def stop(self, run):
        lane = self.lane
        if lane is not None and lane.run == run:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.main), ctypes.py_object(Ended))

    def serve(self, problem):
        model = None
        while True:
            call, files = self.calls.get()
            if call is None:
                if model is not None:
                    model.finalize()
                return
            if "Load" in call:
                try:
                    if problem is not None:
                        raise Failed(missing(problem))
                    limit(call["Load"]["settings"])
                    link = side.Side(socket.socket(fileno=files[0]))
                    model = Model(call["Load"], link)
                    send(self.control, {"Loaded": model.loaded()})
                except Failed as error:
                    send(self.control, {"Failed": {"of_file": False, "reason": str(error)}})
            elif "Lane" in call:
                stream, inputs, outputs = files
                self.lane = Lane(model, socket.socket(fileno=stream), inputs, outputs)
                send(self.control, "Lane")
                try:
                    self.lane.serve()
                except (BrokenPipeError, ConnectionResetError):
                    pass
                self.lane = None


def missing(problem):
    version = ".".join(map(str, sys.version_info[:3]))
    if getattr(problem, "name", None) == "numpy":
        return (
            f"numpy is missing in {sys.executable} (Python {version}); type: {sys.executable} -m pip install numpy, or "
            "name another Python with --python, or an environment in the parameter EXECUTION_ENV_PATH"
        )
    return f"{sys.executable} (Python {version}) cannot import the packages of the worker: {problem}"


def limit(settings):
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if settings["memory"]:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory"], settings["memory"]))


def main(control, problem):
    # The process ends with the thread of the server that has started it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = Log()
    if utils is not None:
        utils._log_line = log.line
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)
    worker = Worker(control)
    threading.Thread(target=worker.listen, daemon=True, name="downbeat").start()
    worker.serve(problem)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
