"""The second socket to the server: the answers of decoupled models, and the model's own requests to other models."""

import asyncio
import concurrent.futures
import itertools
import json
import queue
import sys
import threading
import time

utils = sys.modules.get("triton_python_backend_utils")
np = sys.modules.get("numpy")

# `json.dumps` would make an encoder for each message.
encoded = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
# A wait is looked at this often, so that the server can end it.
LOOK_S = 0.2
# Most answers to a made-up request.
MOST_MADE_UP = 1000
FINAL = 1


class Enough(BaseException):
    """A made-up request has had answers enough."""


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


class Side:
    """Sends messages to the server from any thread, and hears its replies."""

    def __init__(self, stream):
        self.stream, self.waiting, self.ids, self.out = stream, {}, itertools.count(1), queue.SimpleQueue()
        # Gives the reason why the model is not ready; None: it is.
        self.unready = lambda: "the model is not loaded yet"
        for work in (self.read, self.write):
            threading.Thread(target=work, daemon=True, name="downbeat-side").start()

    def read(self):
        file = self.stream.makefile("rb")
        while True:
            start = file.read(12)
            if len(start) < 12:
                return
            head = json.loads(file.read(int.from_bytes(start[:4], "little")))
            data = file.read(int.from_bytes(start[4:], "little"))
            if head.get("asks_ready"):
                threading.Thread(target=self.check, args=(head["id"],), daemon=True, name="downbeat-ready").start()
                continue
            hear = self.waiting.pop(head["id"], None) if head["is_final"] else self.waiting.get(head["id"])
            if hear is not None:
                hear(head, data)

    def check(self, number):
        self.tell("ready", id=number, reason=self.unready())

    def write(self):
        while True:
            head, parts = self.out.get()
            head = encoded(head).encode()
            length = sum(len(part) for part in parts)
            try:
                self.stream.sendall(len(head).to_bytes(4, "little") + length.to_bytes(8, "little") + head)
                for part in parts:
                    self.stream.sendall(part)
            except OSError:
                return
            # An array that is held here would keep the memory of the run's inputs.
            head = parts = part = None

    def tell(self, kind, parts=(), **fields):
        # Another thread writes: the server may end a run of this thread at any point.
        self.out.put(({kind: fields}, parts))

    def ask(self, hear, kind, parts=(), **fields):
        number = next(self.ids)
        self.waiting[number] = hear
        self.tell(kind, parts, id=number, **fields)
        return number

    def ask_and_wait(self, kind, parts=(), **fields):
        replies = queue.SimpleQueue()
        self.ask(lambda head, data: replies.put(head), kind, parts, **fields)
        return waited(replies)


def waited_for(future):
    """The result of a future, as [`waited`] waits."""
    while True:
        try:
            return future.result(timeout=LOOK_S)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise


def waited(replies):
    """The next reply. The thread stays one that the server can end."""
    while True:
        try:
            return replies.get(timeout=LOOK_S)
        except queue.Empty:
            pass


def parts_of(named):
    """Arrays by their names or places, as the heads and the bytes of a message."""
    heads, parts = [], []
    for name, place, array, data, datatype in named:
        part = data if data is not None else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        heads.append({"name": name, "place": place, "datatype": datatype, "shape": list(array.shape), "len": len(part)})
        parts.append(part)
    return heads, parts


def tensors_of(heads, data):
    """The tensors of a message."""
    base, at, tensors = np.frombuffer(data, dtype=np.uint8), 0, []
    for head in heads:
        part = base[at : at + head["len"]]
        at += head["len"]
        if head["datatype"] == "BYTES":
            array = utils._unpacked(part.data)
        else:
            array = part.view(np.uint16 if head["datatype"] == "BF16" else utils._BY_PROTOCOL[head["datatype"]])
        tensors.append(utils.Tensor._of(head["name"], array.reshape(head["shape"]), head["datatype"]))
    return tensors


class Local:
    """Takes the answers that no client waits for: those of made-up requests, and of models with one answer."""

    is_used = is_over = False

    def __init__(self, has_one):
        self.first, self.ended, self.count, self.has_one = None, threading.Event(), 0, has_one

    def send(self, response, is_final):
        self.count += 1
        if self.count > MOST_MADE_UP:
            self.ended.set()
            raise Enough
        if self.has_one and response is not None and self.first is not None:
            raise utils.TritonModelException("Unable to send response. Response sender has been closed.")
        if self.first is None and response is not None:
            self.first = response
        if is_final or (self.has_one and response is not None):
            self.ended.set()
        if self.has_one and self.first is None:
            raise utils.TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response"
            )
        return True

    def is_cancelled(self):
        return False

    def response(self, loop):
        """The first answer. `loop`: the tasks that may still give the answer run in this loop."""
        while not self.ended.is_set():
            if loop is None:
                self.ended.wait(LOOK_S)
            else:
                loop.run_until_complete(loop.run_in_executor(None, self.ended.wait, LOOK_S))
        return self.first


class Remote:
    """Takes the answers to a client's request."""

    is_used, is_over, first = False, False, None

    def __init__(self, side, key, outputs_of):
        self.side, self.key, self.outputs_of, self.open = side, key, outputs_of, True

    def send(self, response, is_final):
        outputs = error = parameters = None
        parts = ()
        if response is not None and response.has_error():
            error = {"reason": response.error().message(), "code": response.error().code()}
        elif response is not None:
            named = ((None, place, *output) for place, output in self.outputs_of(response).items())
            outputs, parts = parts_of(named)
            parameters = response._parameters
        self.open = self.side.ask_and_wait(
            "answer", parts, request=self.key, is_final=is_final, error=error, outputs=outputs, parameters=parameters
        )["ok"]
        return self.open

    def is_cancelled(self):
        if self.open:
            self.open = self.side.ask_and_wait("look", request=self.key)["ok"]
        return not self.open


class InferenceResponseSender:
    """Sends the answers to a request of a decoupled model."""

    def __init__(self, taker):
        self._taker, self._ended = taker, False

    def send(self, response=None, flags=0):
        if self._ended:
            raise utils.TritonModelException("Unable to send response. Response sender has been closed.")
        if flags not in (0, FINAL):
            raise utils.TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise utils.TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, utils.InferenceResponse):
            raise utils.TritonModelException(f"send takes an InferenceResponse, not a {type(response).__name__}")
        self._ended = flags == FINAL
        self._taker.send(response, self._ended)

    def is_cancelled(self):
        return self._taker.is_cancelled()

    def __del__(self):
        # A model that drops its sender has no more answers.
        if not self._ended and not self._taker.is_over:
            self._ended = True
            try:
                self._taker.send(None, True)
            except Exception:
                pass


class Callers:
    """Runs the model's requests to other models."""

    def __init__(self, side, model):
        self.side, self.model = side, model
        # The instants by which the requests that are under way must be answered.
        self.deadlines, self.in_execute = {}, None

    def enter(self, requests):
        self.in_execute = threading.get_ident()
        for request in requests:
            if request._timeout:
                self.deadlines[id(request)] = time.monotonic() + request._timeout / 1e6
        return [id(request) for request in requests]

    def leave(self, numbers):
        self.in_execute = None
        for number in numbers:
            self.deadlines.pop(number, None)

    def budget_us(self, own):
        """The rest of the callers' time, or the request's own timeout if that is shorter; None: no limit."""
        budgets = [max(1, int((deadline - time.monotonic()) * 1e6)) for deadline in list(self.deadlines.values())]
        if own:
            budgets.append(int(own))
        return min(budgets, default=None)

    def begin(self, request, decoupled, timeout, hear):
        named = (
            (tensor._name, 0, tensor._array, utils._packed(tensor._array) if tensor._datatype == "BYTES" else None, tensor._datatype)
            for tensor in request.inputs()
        )
        inputs, parts = parts_of(named)
        version = request.model_version()
        return self.side.ask(
            hear, "call", parts, model=text(request.model_name()), version="" if version in (-1, "", None) else str(version),
            request_id=text(request.request_id()), parameters=request.parameters(),
            outputs=[text(name) for name in request.requested_output_names()], inputs=inputs,
            budget_us=self.budget_us(timeout or request.timeout()), decoupled=decoupled,
            blocks=self.in_execute is not None,
        )  # fmt: skip

    def exec(self, request, decoupled, timeout):
        replies = queue.SimpleQueue()
        number = self.begin(request, decoupled, timeout, lambda head, data: replies.put((head, data)))
        if decoupled:
            return Iterator(self.side, number, replies)
        return response_of(*waited(replies)) or no_answer()

    async def async_exec(self, request, decoupled, timeout):
        loop, first, replies = asyncio.get_running_loop(), asyncio.get_running_loop().create_future(), queue.SimpleQueue()

        def done():
            if not first.done():
                first.set_result(None)

        def hear(head, data):
            replies.put((head, data))
            try:
                loop.call_soon_threadsafe(done)
            except RuntimeError:
                pass  # The loop has ended.

        number = self.begin(request, decoupled, timeout, hear)
        answers = Iterator(self.side, number, replies) if decoupled else None
        # Others go on until the first answer is there.
        await first
        return answers if decoupled else response_of(*replies.get()) or no_answer()


def no_answer():
    return utils.InferenceResponse(error=utils.TritonError("the model gave no answer"))


def response_of(head, data):
    """The response of a reply; None: the reply only tells the end."""
    if head["error"] is not None:
        return utils.InferenceResponse(error=utils.TritonError(head["error"]["reason"], head["error"]["code"]))
    if head["outputs"] is not None:
        return utils.InferenceResponse(output_tensors=tensors_of(head["outputs"], data), parameters=head["parameters"])
    return None


class Iterator:
    """The answers of a decoupled model. The next is fetched when it is wanted."""

    def __init__(self, side, number, replies):
        self.side, self.number, self.replies, self.ended, self.cancelled = side, number, replies, False, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.ended:
            raise StopIteration
        if self.cancelled:
            self.ended = True
            error = utils.TritonError("the code that asked has cancelled the request", utils.TritonError.CANCELLED)
            return utils.InferenceResponse(error=error)
        head, data = waited(self.replies)
        self.ended = head["is_final"]
        if not self.ended:
            self.side.tell("pull", id=self.number)
        response = response_of(head, data)
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self):
        return self

    async def __anext__(self):
        # A StopIteration cannot leave a thread of an executor.
        response = await asyncio.get_running_loop().run_in_executor(None, next, self, None)
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self):
        if not self.ended and not self.cancelled:
            self.cancelled = True
            self.side.waiting.pop(self.number, None)
            self.side.tell("drop", id=self.number)

    def __del__(self):
        self.cancel()
