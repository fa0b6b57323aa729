"""The output that a user sees in a terminal."""
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

from serving import EXAMPLES, environment, free_ports

CLEARED = re.compile(rb"\r|\x1b\[2K|\x1b\[1A|\x1b\[0?J")
STYLE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


def shown(binary, folder):
    """The output of `downbeat serve` on a terminal until it is ready, with models measured."""
    ports = [str(port) for port in free_ports(3)]
    flags = [flag for pair in zip(("--http-port", "--grpc-port", "--metrics-port"), ports) for flag in pair]
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [str(binary), "serve", str(EXAMPLES / "models"), "--host", "127.0.0.1", "--engine", "rten", *flags]
    env = environment(folder, "rten") | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env, cwd=folder)
    os.close(end)
    said, until = b"", time.monotonic() + 180
    try:
        while b"ready models=3" not in STYLE.sub(b"", said) and time.monotonic() < until:
            if select.select([terminal], [], [], 1)[0]:
                said += os.read(terminal, 65536)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(terminal)
    return said


def test_lines_of_the_log_leave_no_half_bars_behind(binary, tmp_path):
    said = shown(binary, tmp_path)
    assert b"[=" in said, "there are bars while models are measured"
    lines = [STYLE.sub(b"", CLEARED.split(line.rstrip(b"\r"))[-1]) for line in said.split(b"\n")]
    log = [line for line in lines if b" INFO " in line]
    assert any(b"engine" in line for line in log) and any(b"ready" in line for line in log), said
    for line in log:
        assert re.match(rb"\d{4}-\d\d-\d\dT", line.strip()), f"a bar is left before the line: {line}"
    assert not [line for line in lines[:-1] if b"[=" in line], "a bar is left between lines"


def watch(command, env, until, keys=b""):
    """What a program draws on a terminal of 120 columns until it has drawn this text; then these keys are sent. Its exit status too."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env | {"TERM": "xterm"}, start_new_session=True)
    os.close(end)
    drawn, deadline = b"", time.monotonic() + 60
    try:
        while until not in STYLE.sub(b"", drawn) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                drawn += os.read(terminal, 65536)
        os.write(terminal, keys)
        # All that is drawn is read, or the program would wait for a reader. The error comes behind the last byte of a program that has ended.
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                if select.select([terminal], [], [], 0.2)[0]:
                    drawn += os.read(terminal, 65536)
        return drawn, process.wait(10)
    finally:
        if process.poll() is None:
            process.kill()
        os.close(terminal)


def test_top_shows_models_and_ends_by_a_key(binary, examples, tmp_path):
    env = environment(tmp_path)
    drawn, status = watch([str(binary), "top", examples.url, "--interval", "0.2"], env, b"digits", b"jpq")
    assert status == 0, drawn
    # The program moves the cursor over spaces that are there already.
    text = "".join(STYLE.sub(b"", drawn).decode(errors="replace").split())
    for shown in ("Devices, busy share", "In time, each second", "Models, last 10 s", "q quits"):
        assert "".join(shown.split()) in text, text
    # The screen of before is back, and the cursor is shown.
    assert drawn.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in drawn, drawn[-100:]


def test_top_prints_one_picture_for_a_pipe(binary, examples, tmp_path):
    top = lambda *flags: subprocess.run([str(binary), "top", *flags], env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    before = examples.metric("nv_inference_request_success", model="digits")
    done = top(examples.url, "--interval", "0.1", "--once")
    assert done.returncode == 0, done.stderr
    assert "digits 1" in done.stdout and "\x1b" not in done.stdout, done.stdout
    assert examples.metric("nv_inference_request_success", model="digits") == before, "it sends no inferences"
    done = top(examples.url)
    assert done.returncode != 0 and "--once" in done.stderr, done.stderr
    nobody, = free_ports(1)
    done = top(f"http://127.0.0.1:{nobody}", "--once")
    assert done.returncode != 0 and "is `downbeat serve` running there?" in done.stderr, done.stderr
