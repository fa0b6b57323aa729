"""Serves ONNX models by PyTriton, which is Triton with its backend for Python: the Triton that pip installs.

    python tools/peers/pytriton_onnx.py 8000 8001 8002 mlp=mlp.onnx

The ports are those of HTTP, gRPC and metrics on the loopback address. The models run by ONNX Runtime, with one thread
each. All other settings stay at their defaults.
"""
import sys

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def tensors(arguments):
    """Tensors without their batch dimension; -1 stands for a size that varies."""
    return [Tensor(name=a.name, dtype=TYPES[a.type], shape=tuple(s if isinstance(s, int) else -1 for s in a.shape[1:])) for a in arguments]


def bind(triton, name, path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    names = [output.name for output in session.get_outputs()]

    @batch
    def infer(**inputs):
        return session.run(names, inputs)

    triton.bind(model_name=name, infer_func=infer, inputs=tensors(session.get_inputs()), outputs=tensors(session.get_outputs()),
                config=ModelConfig(max_batch_size=128))


def main():
    http, grpc, metrics, *models = sys.argv[1:]
    config = TritonConfig(http_port=int(http), grpc_port=int(grpc), metrics_port=int(metrics), http_address="127.0.0.1", grpc_address="127.0.0.1")
    with Triton(config=config) as triton:
        for model in models:
            bind(triton, *model.split("=", 1))
        triton.serve()


if __name__ == "__main__":
    main()
