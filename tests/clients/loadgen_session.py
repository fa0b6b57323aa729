"""MLPerf LoadGen's Server scenario on `digits`; run as a process of its own, since LoadGen is a library with threads and
global state. Arguments: gRPC address, mode (accuracy or performance), folder for LoadGen's logs."""
import pathlib
import sys

import mlperf_loadgen as loadgen
import numpy as np
import tritonclient.grpc as grpcclient

from serving import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from make_examples import digits_split  # noqa: E402

# However busy the machine is: a judgement of the server's speed is no test.
LIMIT_MS = 30_000


def main(address, mode, folder):
    _, _, images, _ = digits_split()
    client = grpcclient.InferenceServerClient(address)
    failed = []

    def issue(samples):
        for sample in samples:
            tensor = grpcclient.InferInput("image", [1, 8, 8], "FP32")
            tensor.set_data_from_numpy(images[sample.index:sample.index + 1])

            def answered(result, error, query=sample.id):
                if error is not None:
                    failed.append(str(error))
                    answer = np.array([255], np.uint8)
                else:
                    answer = result.as_numpy("probabilities").argmax(axis=1).astype(np.uint8)
                loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(query, answer.ctypes.data, answer.nbytes)])

            client.async_infer("digits", [tensor], callback=answered)

    settings = loadgen.TestSettings()
    settings.scenario = loadgen.TestScenario.Server
    settings.mode = loadgen.TestMode.AccuracyOnly if mode == "accuracy" else loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = 100
    settings.server_target_latency_ns = LIMIT_MS * 1_000_000
    settings.min_duration_ms = 2000
    settings.min_query_count = 500
    settings.max_query_count = 2000

    output = loadgen.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    log = loadgen.LogSettings()
    log.log_output = output
    log.enable_trace = False

    server = loadgen.ConstructSUT(issue, lambda: None)
    library = loadgen.ConstructQSL(len(images), len(images), lambda indices: None, lambda indices: None)
    loadgen.StartTestWithLogSettings(server, library, settings, log)
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(server)
    client.close()
    print(f"{len(failed)} failed {failed[:3]}")
    sys.exit(1 if failed else 0)


main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
