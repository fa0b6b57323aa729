"""The output that a user sees in a terminal."""
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
