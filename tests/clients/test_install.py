"""The wheel and the archive of packaging/build.sh, installed as a user installs them.

`DOWNBEAT_WHEEL` and `DOWNBEAT_ARCHIVE` name the files. Without them these tests are skipped, and with
`DOWNBEAT_REQUIRE_PACKAGES=1` (in CI) they fail.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

import onnxruntime
import pytest
import requests

from serving import EXAMPLES, ROOT, START_TIMEOUT_S, Server, onnxruntime_library


def given(variable):
    """The package that a variable names."""
    path = os.environ.get(variable)
    if not path:
        missing = pytest.fail if os.environ.get("DOWNBEAT_REQUIRE_PACKAGES") else pytest.skip
        missing(f"{variable} names no package; packaging/build.sh makes the packages")
    return pathlib.Path(path).resolve(strict=True)


@pytest.fixture(scope="module")
def wheel():
    return given("DOWNBEAT_WHEEL")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel and what it depends on. The version of onnxruntime is that of these tests, whose
    answers are compared elsewhere."""
    folder = tmp_path_factory.mktemp("wheel") / "env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, wheel, f"onnxruntime=={onnxruntime.__version__}", "--constraint", pathlib.Path(__file__).parent / "constraints.txt"], check=True)
    return folder


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The archive, unpacked."""
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(given("DOWNBEAT_ARCHIVE")) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


def serve(program, folder, repository=EXAMPLES / "models"):
    """A server with an engine of its own choice, and without a variable that names a library."""
    return Server(program, repository, folder, engine="auto")


def engine_line(server):
    """The line of the log that names the engine."""
    (line,) = re.findall(r"^.* engine engine=.*$", server.log, re.MULTILINE)
    return line


def classifies(server):
    """Whether the server knows the digit of examples/digit.json."""
    answer = requests.post(f"{server.url}/v2/models/digits/infer", data=(EXAMPLES / "digit.json").read_bytes(), timeout=60)
    assert answer.status_code == 200, answer.text
    return re.fullmatch(r"0\.97\d*:7:seven", answer.json()["outputs"][0]["data"][0])


def fake_environment(folder, program, library, name):
    """An environment of two links, whose onnxruntime has this library under this name."""
    capi = folder / "lib/python3.12/site-packages/onnxruntime/capi"
    capi.mkdir(parents=True)
    (folder / "bin").mkdir()
    # A link would lead the program back to its own environment.
    shutil.copy2(program, folder / "bin/downbeat")
    (capi / name).symlink_to(library)
    return folder / "bin/downbeat"


def test_the_wheel_serves_with_onnxruntime_at_once(installed, tmp_path):
    with serve(installed / "bin/downbeat", tmp_path) as server:
        assert classifies(server)
        line = engine_line(server)
    assert re.search(r'engine="?onnxruntime', line), line
    assert re.search(rf"library=.?{re.escape(str(installed))}/lib/python3\.\d+/site-packages/onnxruntime/capi/libonnxruntime\.so\.", line), line


def test_the_wheel_has_the_package_for_ray_which_names_its_extra(installed):
    ended = subprocess.run([installed / "bin/python", "-I", "-c", "import downbeat.autoscaler, downbeat.ray"], capture_output=True, text=True)
    assert "ImportError: downbeat.ray needs Ray" in ended.stderr and "pip install 'downbeat-server[ray]'" in ended.stderr, ended.stderr


def test_a_link_to_the_program_finds_the_environment_as_with_pipx_and_uv(installed, tmp_path):
    link = tmp_path / "bin/downbeat"
    link.parent.mkdir()
    link.symlink_to(installed / "bin/downbeat")
    listed = subprocess.run([link, "engine", "list"], check=True, capture_output=True, text=True, env={"HOME": str(tmp_path), "PATH": "/nowhere"}).stdout
    assert re.search(rf"^onnxruntime .*{re.escape(str(installed))}/lib/", listed, re.MULTILINE), listed


def test_a_library_that_is_too_old_or_broken_is_one_line_and_the_built_in_engine_serves(installed, tmp_path):
    text = tmp_path / "text"
    text.write_text("no library")
    program = fake_environment(tmp_path / "env", installed / "bin/downbeat", text, "libonnxruntime.so.1.10.0")
    with serve(program, tmp_path) as server:
        assert classifies(server)
        assert "rten" in engine_line(server)
        (line,) = [line for line in server.log.splitlines() if "rten is the slower engine" in line]
    assert "libonnxruntime.so.1.10.0 (in the Python environment that this program is installed in)" in line, line
    assert "it is no library. `pip install --upgrade 'onnxruntime>=1.24'` there mends it" in line, line


def test_a_library_that_is_named_wins_over_the_environment(installed, tmp_path):
    named = tmp_path / "libonnxruntime.so"
    named.symlink_to(onnxruntime_library())
    listed = subprocess.run([installed / "bin/downbeat", "engine", "list"], check=True, capture_output=True, text=True,
                            env={"HOME": str(tmp_path), "ORT_DYLIB_PATH": str(named)}).stdout
    assert re.search(rf"^onnxruntime .*{re.escape(str(named))}$", listed, re.MULTILINE), listed


def test_the_wheel_says_what_it_is(wheel):
    assert re.fullmatch(r"downbeat_server-[\d.]+-py3-none-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        lines = files.read(metadata).decode().splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist:")]
    assert [need for need in needs if "extra ==" not in need] == ["onnxruntime>=1.24,<2"]
    assert any(re.fullmatch(r"ray\S+ ?; extra == .ray.", need) for need in needs), needs
    assert "License-Expression: Apache-2.0" in lines


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump (binutils)")
def test_the_program_asks_no_newer_glibc_than_it_says(unpacked):
    symbols = subprocess.run(["objdump", "-T", unpacked / "downbeat"], check=True, capture_output=True, text=True).stdout
    versions = {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", symbols)}
    assert max(versions) <= (2, 28), max(versions)
    needed = subprocess.run(["objdump", "-p", unpacked / "downbeat"], check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"NEEDED +(\S+?)\.so", needed)) <= {"libc", "libm", "libdl", "libpthread", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}, needed


def test_the_archive_serves_its_own_examples(unpacked, tmp_path):
    with serve(unpacked / "downbeat", tmp_path, unpacked / "examples/models") as server:
        assert classifies(server)
        answer = subprocess.run([unpacked / "downbeat", "infer", "digits", unpacked / "examples/digit.png", "--url", server.url],
                                check=True, capture_output=True, text=True).stdout
    assert "seven" in answer


def test_the_archive_has_manual_completions_and_licence(unpacked):
    assert "downbeat\\-serve" in (unpacked / "man/downbeat-serve.1").read_text()
    assert {file.name for file in (unpacked / "completions").iterdir()} == {"downbeat.bash", "_downbeat", "downbeat.fish"}
    assert "Apache License" in (unpacked / "LICENSE").read_text()
    components = json.loads((unpacked / "downbeat.cyclonedx.json").read_text())["components"]
    assert {"rustls", "tokio"} <= {component["name"] for component in components}
    readme = (unpacked / "README.md").read_text()
    named = re.findall(r"^\| `([^`]+)`", readme, re.MULTILINE)
    assert named and all(list(unpacked.glob(name)) for name in named), named


def test_the_wheel_and_the_archive_have_the_same_program_without_debug_information(wheel, unpacked):
    program = (unpacked / "downbeat").read_bytes()
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith("/scripts/downbeat")]
        assert files.read(name) == program
        assert files.getinfo(name).external_attr >> 16 & 0o111, "the program can be started"
    assert b"\0.gnu_debuglink\0" in program and b"\0.debug_line\0" not in program
    debug = given("DOWNBEAT_ARCHIVE").name.replace(".tar.gz", "-debug.tar.gz")
    with tarfile.open(given("DOWNBEAT_ARCHIVE").with_name(debug)) as archive:
        assert [pathlib.PurePath(name).name for name in archive.getnames()][1:] == ["downbeat.debug"]


def test_the_image_without_docker_has_the_settings_of_the_dockerfile():
    script, dockerfile = (ROOT / "packaging/image.sh").read_text(), (ROOT / "Dockerfile").read_text()
    last = dockerfile.rpartition("\nFROM ")[2]
    variables = set(re.search(r"^ENV (.*)", last, re.MULTILINE).group(1).split())
    assert set(re.findall(r"--config\.env (\S+)", script)) - {"PATH=/usr/local/bin"} == variables
    assert re.search(r"^USER (.*)", last, re.MULTILINE).group(1) == re.search(r"--config\.user (\S+)", script).group(1)
    assert re.search(r"^EXPOSE (.*)", last, re.MULTILINE).group(1) == re.search(r"for port in ([\d ]+);", script).group(1)
    assert "FROM debian:trixie-slim" in dockerfile and "suite=trixie" in script


def test_the_services_options_are_options_of_the_program(unpacked, tmp_path):
    """The file of the Debian package, with other places: the unit gives it to the program as it is."""
    text = (ROOT / "packaging/debian/downbeat.toml").read_text()
    repository = tmp_path / "models"
    repository.mkdir()
    options = tmp_path / "downbeat.toml"
    options.write_text(text.replace("/var/lib/downbeat/models", str(repository)))
    with Server(unpacked / "downbeat", repository, tmp_path, "--config", str(options), engine="rten") as server:
        shutil.copytree(EXAMPLES / "models/digits", tmp_path / "digits")
        (tmp_path / "digits").rename(repository / "digits")
        deadline = time.monotonic() + START_TIMEOUT_S
        while requests.get(f"{server.url}/v2/models/digits/ready", timeout=10).status_code != 200:
            assert time.monotonic() < deadline, f"the new model was not seen:\n{server.log}"
            time.sleep(0.1)
        assert classifies(server)
    unit = (ROOT / "packaging/debian/downbeat.service").read_text()
    assert "\nExecStart=/usr/bin/downbeat serve --config /etc/downbeat/downbeat.toml\n" in unit
