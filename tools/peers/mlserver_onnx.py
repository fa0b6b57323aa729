"""An MLServer runtime for ONNX models, which MLServer has none of.

    python tools/peers/mlserver_onnx.py FOLDER 8080 8081 mlp=mlp.onnx encoder=encoder.onnx

writes the settings of a server with these ports and models into FOLDER. All other settings stay at their defaults.
"""

import json
import pathlib
import sys

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

DATATYPES = {"tensor(float)": "FP32", "tensor(int64)": "INT64"}


class OnnxModel(MLModel):
    """Runs each request through one session of one thread."""

    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(self.settings.parameters.uri, options)
        self.names = [output.name for output in self.session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        feeds = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        answers = self.session.run(self.names, feeds)
        outputs = [NumpyCodec.encode_output(name, values) for name, values in zip(self.names, answers)]
        return InferenceResponse(model_name=self.name, outputs=outputs)


def tensors(arguments):
    """Names, types and shapes as MLServer's metadata has them; -1 stands for a size that varies."""
    shape = lambda sizes: [size if isinstance(size, int) else -1 for size in sizes]
    return [{"name": a.name, "datatype": DATATYPES[a.type], "shape": shape(a.shape)} for a in arguments]


def write_settings(folder, http_port, grpc_port, models):
    server = {"host": "127.0.0.1", "http_port": http_port, "grpc_port": grpc_port, "metrics_endpoint": None}
    (folder / "settings.json").write_text(json.dumps(server))
    for name, path in models.items():
        session = onnxruntime.InferenceSession(path)
        settings = {
            "name": name,
            "implementation": "mlserver_onnx.OnnxModel",
            "inputs": tensors(session.get_inputs()),
            "outputs": tensors(session.get_outputs()),
            "parameters": {"uri": str(path), "version": "1"},
        }
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "model-settings.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    place, http, grpc, *named = sys.argv[1:]
    write_settings(pathlib.Path(place), int(http), int(grpc), dict(word.split("=", 1) for word in named))
