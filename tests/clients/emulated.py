"""Models that compute nothing and take a time of their own, for the engine `emulated`."""
import pathlib


def write(folder, name, latency, items=1):
    """Writes a model of so many FP32 an item into a repository; `latency`: lines of its file, such as `alpha_ms = 1`."""
    version = pathlib.Path(folder) / name / "1"
    version.mkdir(parents=True)
    tensor = '[[{}]]\nname = "{}"\ndatatype = "FP32"\ndims = [-1, {}]\n'
    (version / "model.emulated.toml").write_text(latency + tensor.format("inputs", "x", items) + tensor.format("outputs", "y", 1))
