"""Writes crates/engine-ort/src/install/wheels.txt: the wheels that `downbeat engine install` fetches, with
the hashes that it requires.

    python tools/pin_wheels.py 1.31.1

Asks pip, as it is configured, for the wheels of that version of onnxruntime, and for NVIDIA's
wheels that its build for GPUs needs. Fetches none of onnxruntime's wheels. Run it when
`install::VERSION` changes, and look at the difference.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
MACHINES = ["x86_64", "aarch64"]
GLIBCS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014"]
TARGET = pathlib.Path(__file__).parent.parent / "crates/engine-ort/src/install/wheels.txt"


def resolved(requirement, python, machine, *options):
    """(name, version, hash) of all that pip would install; nothing if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        platforms = [word for glibc in GLIBCS for word in ("--platform", f"{glibc}_{machine}")]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", "--target", folder, "--python-version", python, "--report", str(report)]
        done = subprocess.run([*command, *platforms, *options, requirement], capture_output=True, text=True)
        if done.returncode:
            if "No matching distribution" in done.stderr:
                return []
            sys.exit(done.stderr)
        items = json.loads(report.read_text())["install"]
    hashes = [item["download_info"]["archive_info"]["hashes"]["sha256"] for item in items]
    return [(item["metadata"]["name"], item["metadata"]["version"], sha) for item, sha in zip(items, hashes)]


def main():
    version = sys.argv[1]
    wheels = {}
    for package in ["onnxruntime", "onnxruntime-gpu"]:
        for machine in MACHINES:
            for python in PYTHONS:
                for name, its_version, sha in resolved(f"{package}=={version}", python, machine, "--no-deps"):
                    wheels.setdefault((package, its_version), []).append(sha)
    newest = PYTHONS[-2]
    for machine in MACHINES:
        for name, its_version, sha in resolved(f"onnxruntime-gpu[cuda,cudnn]=={version}", newest, machine):
            if name.startswith("nvidia-"):
                wheels.setdefault((name, its_version), []).append(sha)
    lines = ["# What `downbeat engine install` fetches. Written by tools/pin_wheels.py."]
    for (name, its_version), hashes in wheels.items():
        words = [f"--hash=sha256:{sha}" for sha in dict.fromkeys(hashes)]
        lines.append(" ".join([f"{name}=={its_version}", *words]))
    TARGET.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
