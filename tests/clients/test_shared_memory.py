"""The system shared memory extension, with tritonclient's own utilities."""
import contextlib
import uuid

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

MODULES = [pytest.param(httpclient, id="http"), pytest.param(grpcclient, id="grpc")]


@contextlib.contextmanager
def region(size):
    key = f"/downbeat-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(key[1:], key, size)
    try:
        yield key, handle
    finally:
        shm.destroy_shared_memory_region(handle)


def connect(module, server):
    return module.InferenceServerClient(server.http if module is httpclient else server.grpc)


@pytest.mark.parametrize("module", MODULES)
def test_inputs_and_outputs_in_shared_memory(made, module):
    first, second = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    with connect(module, made) as client, region(256) as (key, handle):
        shm.set_shared_memory_region(handle, [first, second])
        client.register_system_shared_memory("data", key, 256)
        try:
            inputs = [module.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in range(2)]
            inputs[0].set_shared_memory("data", 64)
            inputs[1].set_shared_memory("data", 64, offset=64)
            outputs = [module.InferRequestedOutput(f"OUTPUT{i}") for i in range(2)]
            outputs[0].set_shared_memory("data", 64, offset=128)
            result = client.infer("simple", inputs, outputs=outputs)
            # The first output is in the region, the second in the answer.
            np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.int32, [1, 16], offset=128), first + second)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), first - second)
            assert result.get_output("OUTPUT0") is not None
        finally:
            client.unregister_system_shared_memory("data")


@pytest.mark.parametrize("module", MODULES)
def test_bytes_in_shared_memory(made, module):
    values = np.array([[b"one", b"", b"three"]], np.object_)
    from tritonclient.utils import serialize_byte_tensor

    serialized = serialize_byte_tensor(values)
    size = len(serialized.item())
    with connect(module, made) as client, region(256) as (key, handle):
        shm.set_shared_memory_region(handle, [serialized])
        client.register_system_shared_memory("strings", key, 256)
        try:
            tensor = module.InferInput("INPUT0", [1, 3], "BYTES")
            tensor.set_shared_memory("strings", size)
            got = client.infer("identity_bytes", [tensor]).as_numpy("OUTPUT0")
            assert got.tolist() == values.tolist()
        finally:
            client.unregister_system_shared_memory("strings")


@pytest.mark.parametrize("module", MODULES)
def test_status_lists_what_is_registered(made, module):
    with connect(module, made) as client, region(128) as (key, _):
        client.register_system_shared_memory("listed", key, 64, offset=32)
        options = {"as_json": True} if module is grpcclient else {}
        status = client.get_system_shared_memory_status(**options)
        entries = list(status["regions"].values()) if module is grpcclient else status
        entry = next(e for e in entries if e["name"] == "listed")
        assert (entry["key"], int(entry["offset"]), int(entry["byte_size"])) == (key, 32, 64)
        with pytest.raises(InferenceServerException, match="listed"):
            client.register_system_shared_memory("listed", key, 64)
        client.unregister_system_shared_memory()
        status = client.get_system_shared_memory_status(**options)
        assert not (status.get("regions") if module is grpcclient else status)


@pytest.mark.parametrize("module", MODULES)
def test_bad_regions_are_refused(made, module):
    with connect(module, made) as client, region(64) as (key, _):
        with pytest.raises(InferenceServerException, match="no-such-key"):
            client.register_system_shared_memory("missing", "/no-such-key", 64)
        with pytest.raises(InferenceServerException):
            client.register_system_shared_memory("climbing", "/../../etc/passwd", 64)
        with pytest.raises(InferenceServerException):
            client.register_system_shared_memory("long", key, 1 << 40)
        client.register_system_shared_memory("short", key, 64)
        try:
            for name, size, offset, word in [("short", 64, 1, "short"), ("short", 1 << 40, 0, "INPUT0"), ("unknown", 64, 0, "unknown")]:
                tensor = module.InferInput("INPUT0", [1, 16], "FP32")
                tensor.set_shared_memory(name, size, offset=offset)
                with pytest.raises(InferenceServerException, match=word):
                    client.infer("identity_fp32", [tensor])
        finally:
            client.unregister_system_shared_memory("short")
        assert client.is_server_live()


@pytest.mark.parametrize("module", MODULES)
def test_without_the_option_it_is_off(examples_rten, module):
    """As in Triton, clients may use shared memory only if the server was started with the option."""
    words = "Client shared memory is disabled. Start the server with '--shared-memory'"
    with connect(module, examples_rten) as client, region(64) as (key, _):
        calls = [
            lambda: client.register_system_shared_memory("off", key, 64),
            lambda: client.unregister_system_shared_memory(),
        ]
        options = {} if module is httpclient else {"as_json": True}
        for status in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status):
            found = status(**options)
            assert not (found.get("regions") if module is grpcclient else found), "no region is registered"
        tensor = module.InferInput("image", [1, 784], "FP32")
        tensor.set_shared_memory("off", 3136)
        calls.append(lambda: client.infer("digits", [tensor]))
        for call in calls:
            with pytest.raises(InferenceServerException, match="disabled") as error:
                call()
            assert words in error.value.message(), error.value
            assert error.value.status() in ("501", "StatusCode.UNIMPLEMENTED")
