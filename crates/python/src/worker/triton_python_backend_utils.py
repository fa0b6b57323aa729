"""The module that a Python model imports: the names and meanings of Triton's
triton_python_backend_utils."""

import json
import struct
import sys
import threading
import weakref

import numpy as np

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

# Each datatype: its name in configurations, its number there, its name in the protocol, its numpy type.
_DATATYPES = [
    ("TYPE_BOOL", 1, "BOOL", np.bool_),
    ("TYPE_UINT8", 2, "UINT8", np.uint8),
    ("TYPE_UINT16", 3, "UINT16", np.uint16),
    ("TYPE_UINT32", 4, "UINT32", np.uint32),
    ("TYPE_UINT64", 5, "UINT64", np.uint64),
    ("TYPE_INT8", 6, "INT8", np.int8),
    ("TYPE_INT16", 7, "INT16", np.int16),
    ("TYPE_INT32", 8, "INT32", np.int32),
    ("TYPE_INT64", 9, "INT64", np.int64),
    ("TYPE_FP16", 10, "FP16", np.float16),
    ("TYPE_FP32", 11, "FP32", np.float32),
    ("TYPE_FP64", 12, "FP64", np.float64),
    ("TYPE_STRING", 13, "BYTES", np.object_),
    ("TYPE_BF16", 14, "BF16", None),
]
_BY_CONFIG_NAME = {config: (protocol, dtype) for config, _, protocol, dtype in _DATATYPES}
_BY_NUMBER = {number: dtype for _, number, _, dtype in _DATATYPES}
_BY_PROTOCOL = {protocol: dtype for _, _, protocol, dtype in _DATATYPES}
_BY_DTYPE = {np.dtype(dtype): protocol for _, _, protocol, dtype in _DATATYPES if dtype is not None}
_NUMBERS = {np.dtype(dtype): number for _, number, _, dtype in _DATATYPES if dtype is not None}

# The worker sets these: the folder of the model's version, and the way to the server's log.
_model_dir = None
_log_line = None


class TritonModelException(Exception):
    """An error of the server's side of a model."""


class TritonError:
    """The error of one request."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message="", code=INTERNAL):
        self._message = str(message)
        self._code = int(code)

    def message(self):
        return self._message

    def code(self):
        return self._code

    def __str__(self):
        return self._message


class _LogLevel:
    INFO = "I"
    WARNING = "W"
    ERROR = "E"
    VERBOSE = "V"


LogLevel = _LogLevel


def _logged(level, message):
    if not isinstance(message, str):
        raise TypeError(f"the log takes a str, not {type(message).__name__}")
    _log_line(level, message)


class Logger:
    """Writes to the log of the server."""

    INFO = _LogLevel.INFO
    WARNING = _LogLevel.WARNING
    ERROR = _LogLevel.ERROR
    VERBOSE = _LogLevel.VERBOSE
    LogLevel = _LogLevel

    @staticmethod
    def log(message, level=_LogLevel.INFO):
        if level not in ("I", "W", "E", "V"):
            raise TypeError(f"level must be a pb_utils.LogLevel, not {level!r}")
        _logged(level, message)

    @staticmethod
    def log_info(message):
        _logged("I", message)

    @staticmethod
    def log_warn(message):
        _logged("W", message)

    @staticmethod
    def log_error(message):
        _logged("E", message)

    @staticmethod
    def log_verbose(message):
        _logged("V", message)


class _Capsule:
    """A DLPack capsule as an object that numpy reads."""

    def __init__(self, capsule):
        self._capsule = capsule

    def __dlpack__(self, *_, **__):
        return self._capsule

    def __dlpack_device__(self):
        return (1, 0)


def _from_torch(value):
    """The bytes of a torch tensor as a numpy array and its datatype; None: it is no torch tensor."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(np.uint16), "BF16"
    return value.numpy(), None


class Tensor:
    """An input or output of a request."""

    __slots__ = ("_name", "_array", "_datatype")

    def __init__(self, name, numpy_array):
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {type(name).__name__}")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"tensor '{name}' must be made of a numpy array, not of {type(numpy_array).__name__}")
        if numpy_array.dtype.kind in "SU":
            numpy_array = numpy_array.astype(np.object_)
        datatype = _BY_DTYPE.get(numpy_array.dtype)
        if datatype is None:
            raise TritonModelException(f"tensor '{name}' has the numpy type {numpy_array.dtype}, which has no datatype")
        self._name, self._array, self._datatype = name, numpy_array, datatype

    @classmethod
    def _of(cls, name, array, datatype):
        tensor = cls.__new__(cls)
        tensor._name, tensor._array, tensor._datatype = name, array, datatype
        return tensor

    @classmethod
    def from_dlpack(cls, name, tensor):
        datatype = None
        torch_array = _from_torch(tensor)
        if torch_array is not None:
            array, datatype = torch_array
        else:
            source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
            if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] not in (1, 3):
                # A tensor on a GPU: numpy reads only the memory of the CPU.
                array = tensor.get() if hasattr(tensor, "get") else np.from_dlpack(tensor.cpu())
            else:
                try:
                    array = np.from_dlpack(source)
                except (BufferError, RuntimeError, TypeError, ValueError) as error:
                    raise TritonModelException(f"tensor '{name}' cannot be read through DLPack: {error}") from None
        if datatype is None:
            return cls(name, array)
        return cls._of(name, array, datatype)

    def to_dlpack(self):
        return self.__dlpack__()

    def __dlpack__(self, *, stream=None, **_):
        if self._datatype == "BYTES":
            raise TritonModelException(f"tensor '{self._name}' holds strings, which DLPack has no type for")
        if self._datatype == "BF16":
            import torch

            return torch.from_numpy(self._array.view(np.int16)).view(torch.bfloat16).__dlpack__()
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)

    def name(self):
        return self._name

    def shape(self):
        return list(self._array.shape)

    def triton_dtype(self):
        config = next(number for _, number, protocol, _ in _DATATYPES if protocol == self._datatype)
        return config

    def is_cpu(self):
        return True

    def as_numpy(self):
        if self._datatype == "BF16":
            raise TritonModelException(
                f"tensor '{self._name}' is BF16, which numpy lacks; use to_dlpack() and a library such as torch"
            )
        return self._array


class PreferredMemory:
    """The wanted place of outputs. All tensors are in the memory of the CPU here."""

    def __init__(self, preferred_memory_type=TRITONSERVER_MEMORY_CPU, preferred_device_id=0):
        self.type, self.device_id = preferred_memory_type, preferred_device_id


# The value of an argument that the caller must give.
_NOT_GIVEN = object()
_TEXT, _NUMBER = (str, bytes), (int, np.integer)


def _check_types(call, **arguments):
    for name, (value, kinds) in arguments.items():
        if value is _NOT_GIVEN:
            raise TypeError(f"{call} needs the argument {name}")
        if not isinstance(value, kinds):
            raise TypeError(f"{call}: {name} must be of the type {kinds[0].__name__}, not {type(value).__name__}")


def _listed(call, name, value):
    if value is _NOT_GIVEN:
        raise TypeError(f"{call} needs the argument {name}")
    if value is None or isinstance(value, _TEXT):
        raise TypeError(f"{call}: {name} must be a list, not {type(value).__name__}")
    return list(value)


class InferenceRequest:
    """A request for a model."""

    def __init__(
        self,
        request_id="",
        correlation_id=0,
        inputs=_NOT_GIVEN,
        requested_output_names=_NOT_GIVEN,
        model_name=_NOT_GIVEN,
        model_version=-1,
        flags=0,
        timeout=0,
        preferred_memory=None,
        trace=None,
        parameters=None,
    ):
        call = "InferenceRequest"
        inputs = _listed(call, "inputs", inputs)
        requested_output_names = _listed(call, "requested_output_names", requested_output_names)
        _check_types(
            call,
            request_id=(request_id, _TEXT),
            correlation_id=(correlation_id, (*_NUMBER, str)),
            model_name=(model_name, _TEXT),
            model_version=(model_version, (*_NUMBER, str)),
            flags=(flags, _NUMBER),
            timeout=(timeout, _NUMBER),
        )
        for output in requested_output_names:
            _check_types(call, requested_output_names=(output, _TEXT))
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException("inputs must be a list of pb_utils.Tensor")
        if parameters is not None and not isinstance(parameters, (dict, str)):
            raise TritonModelException("parameters must be a dict")
        parameters = parameters if isinstance(parameters, str) else json.dumps(parameters or {})
        self._set(request_id, inputs, requested_output_names, model_name, model_version, parameters)
        self._correlation_id, self._flags, self._timeout = correlation_id, flags, timeout
        self._preferred_memory, self._trace = preferred_memory, trace

    @classmethod
    def _of(cls, *parts):
        """A request of the server, whose parts need no check."""
        request = cls.__new__(cls)
        request._set(*parts)
        return request

    def _set(self, request_id, inputs, requested, model_name, model_version, parameters):
        self._request_id, self._inputs, self._requested = request_id, inputs, requested
        self._model_name, self._model_version, self._parameters = model_name, model_version, parameters
        self._correlation_id = self._flags = self._timeout = 0
        self._preferred_memory = self._trace = self._left = self._taker = None

    def inputs(self):
        return self._inputs

    def request_id(self):
        return self._request_id

    def correlation_id(self):
        return self._correlation_id

    def requested_output_names(self):
        return self._requested

    def model_name(self):
        return self._model_name

    def model_version(self):
        return self._model_version

    def flags(self):
        return self._flags

    def set_flags(self, flags):
        self._flags = flags

    def timeout(self):
        return self._timeout

    def parameters(self):
        return self._parameters

    def preferred_memory(self):
        return self._preferred_memory

    def trace(self):
        return self._trace

    def is_cancelled(self):
        return self._left is not None and self._left()

    def set_release_flags(self, flags):
        pass

    def get_response_sender(self):
        if self._taker is None:
            raise TritonModelException("get_response_sender is for requests that execute was given")
        self._taker.is_used = True
        return sys.modules["downbeat_side"].InferenceResponseSender(self._taker)

    def exec(self, decoupled=False, execution_timeout=0):
        return _callers_of_model().exec(self, decoupled, execution_timeout)

    async def async_exec(self, decoupled=False, execution_timeout=0):
        return await _callers_of_model().async_exec(self, decoupled, execution_timeout)


# Runs requests to other models.
_callers = None


def _callers_of_model():
    if _callers is None:
        raise TritonModelException("requests to other models are for models in service")
    return _callers


class InferenceResponse:
    """The answer to a request: outputs, or an error."""

    def __init__(self, output_tensors=(), error=None, parameters=None):
        self._outputs = _listed("InferenceResponse", "output_tensors", output_tensors)
        for tensor in self._outputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(
                    f"output_tensors must be a list of pb_utils.Tensor, and has a {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(error)
        self._error, self._parameters = error, _checked_parameters(parameters)

    def output_tensors(self):
        return self._outputs

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error

    def parameters(self):
        return self._parameters or "{}"


def _checked_parameters(parameters):
    """The parameters of a response as JSON; None: there are none."""
    if isinstance(parameters, str):
        parameters = json.loads(parameters)
    if parameters is None or parameters == {}:
        return None
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return json.dumps(parameters)


def get_input_tensor_by_name(request, name):
    """The input of this name; None: the request has none."""
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response, name):
    """The output of this name; None: the response has none."""
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def _config_by_name(model_config, side, name):
    if isinstance(model_config, str):
        model_config = json.loads(model_config)
    return next((tensor for tensor in model_config.get(side) or [] if tensor["name"] == name), None)


def get_input_config_by_name(model_config, name):
    return _config_by_name(model_config, "input", name)


def get_output_config_by_name(model_config, name):
    return _config_by_name(model_config, "output", name)


def using_decoupled_model(model_config):
    policy = model_config.get("model_transaction_policy") or {}
    return bool(policy.get("decoupled", False))


# The longer name is Triton's own.
using_decoupled_model_transaction_policy = using_decoupled_model


def triton_to_numpy_type(data_type):
    """The numpy type of a datatype's number or name."""
    if isinstance(data_type, str):
        return triton_string_to_numpy(data_type)
    return _BY_NUMBER.get(int(data_type))


def triton_string_to_numpy(triton_type_string):
    if triton_type_string in _BY_CONFIG_NAME:
        return _BY_CONFIG_NAME[triton_type_string][1]
    return _BY_PROTOCOL.get(triton_type_string)


def numpy_to_triton_type(data_type):
    """The number of a numpy type's datatype."""
    dtype = np.dtype(data_type)
    if dtype.kind in "SU":
        dtype = np.dtype(np.object_)
    return _NUMBERS[dtype]


def serialize_byte_tensor(input_tensor):
    """The elements of an array of strings, each behind its length."""
    if input_tensor.size == 0:
        return None
    return np.frombuffer(_packed(input_tensor), dtype=np.uint8)


def deserialize_bytes_tensor(encoded_tensor):
    """The strings in an array of bytes, as an array of objects."""
    return _unpacked(memoryview(np.ascontiguousarray(encoded_tensor)).cast("B"))


def _packed(array):
    parts = []
    for element in array.ravel(order="C").tolist():
        if isinstance(element, str):
            element = element.encode("utf-8")
        elif not isinstance(element, (bytes, bytearray)):
            element = str(element).encode("utf-8")
        parts.append(struct.pack("<I", len(element)))
        parts.append(element)
    return b"".join(parts)


def _unpacked(data):
    strings, at, end, data = [], 0, len(data), bytes(data)
    while at < end:
        begin = at + 4
        at = begin + int.from_bytes(data[at:begin], "little")
        strings.append(data[begin:at])
    array = np.empty(len(strings), dtype=np.object_)
    array[:] = strings
    return array


def get_model_dir():
    """The folder of the model's version."""
    return _model_dir


def is_model_ready(model_name, model_version=""):
    raise TritonModelException("this server does not tell models about other models")


def load_model(model_name, files=None, config=None):
    raise TritonModelException("a model cannot load other models on this server")


def unload_model(model_name, unload_dependents=False):
    raise TritonModelException("a model cannot unload other models on this server")


class ModelConfig:
    """The configuration that auto_complete_config completes."""

    _ALLOWED = {
        "input": {"name", "data_type", "dims", "optional", "allow_ragged_batch"},
        "output": {"name", "data_type", "dims"},
    }

    def __init__(self, model_config):
        self._model_config = json.loads(model_config)
        self._model_config.setdefault("input", [])
        self._model_config.setdefault("output", [])
        self._model_config.setdefault("max_batch_size", 0)

    def as_dict(self):
        return self._model_config

    def set_max_batch_size(self, max_batch_size):
        written = self._model_config["max_batch_size"]
        if written > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size: {written}, but in auto_complete_config the model sets "
                f"max_batch_size to {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self):
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict):
        unknown = [key for key in transaction_policy_dict if key != "decoupled"]
        if unknown:
            raise ValueError(f"model transaction policy has the unknown property '{unknown[0]}'; it has 'decoupled'")
        written = self._model_config.get("model_transaction_policy") or {}
        wanted = transaction_policy_dict.get("decoupled", False)
        if written.get("decoupled") and not wanted:
            raise ValueError("configuration specified decoupled: true, but auto_complete_config sets it to false")
        self._model_config["model_transaction_policy"] = {"decoupled": wanted}

    def add_input(self, input):
        self._add("input", input)

    def add_output(self, output):
        self._add("output", output)

    def _add(self, side, tensor):
        unknown = [key for key in tensor if key not in self._ALLOWED[side]]
        if unknown:
            raise ValueError(f"{side} '{tensor.get('name', '')}' has the unknown property '{unknown[0]}'")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{side} '{tensor.get('name', '')}' lacks the property '{key}'")
        for written in self._model_config[side]:
            if written["name"] != tensor["name"]:
                continue
            for key, value in tensor.items():
                said = written.get(key)
                value = list(value) if key == "dims" else value
                if not said or said == "TYPE_INVALID":
                    written[key] = value
                elif said != value:
                    raise ValueError(
                        f"model '{self._model_config.get('name', '')}', {side} '{tensor['name']}': {key} {value} of "
                        f"auto_complete_config differs from {said} in the configuration"
                    )
            return
        self._model_config[side].append({**tensor, "dims": list(tensor["dims"])})


_metrics_lock = threading.Lock()
# The changes that the server has not heard of, by family and labels.
_changed = {}
_families = {}


def _take_metering():
    with _metrics_lock:
        changed = list(_changed.values())
        _changed.clear()
    return changed


class _Series:
    """The value that all metrics of one family with the same labels share."""

    def __init__(self, family, labels, buckets):
        self.family, self.labels, self.value, self.buckets = family, labels, 0.0, buckets

    def change(self):
        """The change for the server, under the lock."""
        key = (self.family._name, tuple(sorted(self.labels.items())))
        change = _changed.get(key)
        if change is None:
            family = self.family
            change = {"name": family._name, "description": family._description, "kind": family._kind}
            change.update(labels=self.labels, value=self.value if family._kind == MetricFamily.GAUGE else 0.0)
            if family._kind == MetricFamily.HISTOGRAM:
                change.update(buckets=[[bound, 0] for bound in self.buckets], count=0)
            _changed[key] = change
        return change


class Metric:
    """A metric with its labels. MetricFamily.Metric makes it."""

    def __init__(self, family, labels=None, buckets=None):
        labels = dict(labels or {})
        for key, value in labels.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TritonModelException("the labels of a metric must be a dict of strings")
        buckets = _checked_buckets(family._kind, buckets)
        with _metrics_lock:
            new = _Series(family, labels, buckets)
            self._series = family._series.setdefault(tuple(sorted(labels.items())), new)
            self._series.change()
        self._family = family

    def value(self):
        if self._family._kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram has no single value")
        return self._series.value

    def increment(self, value):
        if self._family._kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram observes values")
        if self._family._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter cannot be incremented by a negative value")
        with _metrics_lock:
            self._series.value += float(value)
            change = self._series.change()
            is_gauge = self._family._kind == MetricFamily.GAUGE
            change["value"] = self._series.value if is_gauge else change["value"] + float(value)

    def set(self, value):
        if self._family._kind != MetricFamily.GAUGE:
            raise TritonModelException("only a gauge can be set")
        with _metrics_lock:
            self._series.value = float(value)
            self._series.change()["value"] = float(value)

    def observe(self, value):
        if self._family._kind != MetricFamily.HISTOGRAM:
            raise TritonModelException("only a histogram observes values")
        with _metrics_lock:
            change = self._series.change()
            change["count"] += 1
            change["value"] += float(value)
            for bucket in change["buckets"]:
                bucket[1] += bool(value <= bucket[0])


def _checked_buckets(kind, buckets):
    if kind != MetricFamily.HISTOGRAM:
        if buckets is not None:
            raise TritonModelException("only a histogram has buckets")
        return []
    if buckets is None:
        raise TritonModelException("a histogram needs the argument buckets")
    buckets = [float(bound) for bound in buckets]
    if any(bound >= later for bound, later in zip(buckets, buckets[1:])):
        raise TritonModelException("the bounds of buckets must ascend")
    return buckets


class MetricFamily:
    """A metric of the model's own, which appears at /metrics. Families of one name are one family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"

    def __init__(self, name, description, kind):
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise TritonModelException("a MetricFamily is of the kind COUNTER, GAUGE or HISTOGRAM")
        self._name, self._description, self._kind = str(name), str(description), kind
        with _metrics_lock:
            known = _families.setdefault(self._name, self)
        if known._kind != kind:
            raise TritonModelException(f"the metric family '{name}' exists already, as a {known._kind}")
        # The series by their labels; a series that no metric holds is forgotten.
        self._series = weakref.WeakValueDictionary() if known is self else known._series
        self._description = known._description

    def Metric(self, labels=None, buckets=None):
        return Metric(self, labels, buckets)
