"""One exported model: the file, inputs for it, and the answers of the framework that it comes from."""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import shutil

import numpy as np
import onnx

# Everything that is drawn is drawn with this seed.
SEED = 7
# Single precision: both sides round each sum of some hundred terms in an order of their own.
FP32 = (1e-4, 1e-5)


@dataclasses.dataclass
class Export:
    """A model as a user would have it. `outputs` are the source framework's, never ONNX Runtime's.
    `tolerance` is (relative, absolute), and `because` says why."""

    framework: str
    exporter: str
    packages: tuple
    model: object
    inputs: dict
    outputs: dict
    how: str
    tolerance: tuple = FP32
    because: str = "single precision, sums in another order"

    def save(self, folder):
        """Writes the folder of the model: model.onnx, inputs.npz, outputs.npz and about.json."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, (str, pathlib.Path)):
            for file in sorted(pathlib.Path(self.model).iterdir()):
                shutil.copy(file, folder / file.name)
        else:
            onnx.save(self.model, folder / "model.onnx")
        np.savez_compressed(folder / "inputs.npz", **self.inputs)
        np.savez_compressed(folder / "outputs.npz", **self.outputs)
        (folder / "about.json").write_text(json.dumps(self.about(folder), indent=1) + "\n")

    def about(self, folder):
        """What about.json says."""
        saved = onnx.load(folder / "model.onnx", load_external_data=False)
        opsets = {}
        # Some files name a domain twice.
        for entry in saved.opset_import:
            opsets[entry.domain or "ai.onnx"] = max(entry.version, opsets.get(entry.domain or "ai.onnx", 0))
        return {
            "framework": self.framework,
            "exporter": self.exporter,
            "versions": {name: importlib.metadata.version(name) for name in self.packages} | {"python": platform.python_version()},
            "how": self.how,
            "ir": saved.ir_version,
            "opset": opsets,
            "tolerance": {"relative": self.tolerance[0], "absolute": self.tolerance[1], "because": self.because},
        }


class Group(dict):
    """Functions that each make one `Export`, by the name of the model."""

    def model(self, function):
        self[function.__name__] = function
        return function
