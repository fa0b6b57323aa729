#!/usr/bin/env python3
"""Measures the resident memory of this process while lanes of a model run together on ONNX Runtime (E²bird §6).

    python tools/lane_memory.py MODEL.onnx --lanes 1,1,2,4,8,16              # one session: weights and arena are shared
    python tools/lane_memory.py MODEL.onnx --lanes 1,1,2,4,8,16 --sessions   # a session for each lane (NM-Ebird)
    python tools/lane_memory.py MODEL.onnx --lanes 32                        # one batch (TF-Serving's way)

The model has one input of FP32. Sizes that vary, but the batch, are 1. Prints MiB over the start.
"""
import argparse
import threading

import numpy as np
import onnxruntime

ROUNDS = 3


def memory(line):
    """A line of this process's status, in MiB."""
    with open("/proc/self/status") as status:
        return next(int(text.split()[1]) for text in status if text.startswith(line + ":")) / 1024


def session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lanes", default="1,1,2,4,8,16", help="the items of each lane's batches")
    parser.add_argument("--sessions", action="store_true", help="each lane has a session of its own")
    args = parser.parse_args()
    lanes = [int(size) for size in args.lanes.split(",")]
    start = memory("VmRSS")
    sessions = [session(args.model) for _ in (lanes if args.sessions else lanes[:1])]
    loaded = memory("VmRSS") - start
    # From here on the system counts the most memory anew.
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    entry = sessions[0].get_inputs()[0]
    sizes = [size if isinstance(size, int) else 1 for size in entry.shape[1:]]
    together = threading.Barrier(len(lanes))

    def run(own, rows):
        feed = {entry.name: np.ones([rows, *sizes], dtype=np.float32)}
        for _ in range(ROUNDS):
            together.wait()
            own.run(None, feed)

    threads = [threading.Thread(target=run, args=(sessions[i % len(sessions)], rows)) for i, rows in enumerate(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    most, kept = memory("VmHWM") - start, memory("VmRSS") - start
    print(f"lanes {args.lanes}, {len(sessions)} sessions: {loaded:.0f} MiB loaded, {most:.0f} at most, {kept:.0f} kept")


if __name__ == "__main__":
    main()
