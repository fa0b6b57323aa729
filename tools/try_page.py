#!/usr/bin/env python3
"""Does what a page tells its reader to do, and compares the answers with the page's.

    tools/try_page.py docs/tutorial.md --path target/release --path .venv/bin

runs the page in a new folder. The page has these parts:

- A block behind a line `Save ... `NAME`:` is the file NAME.
- A block `console` has commands, each behind `$ `, and the lines that each command prints. Lines may be left out where the
  page has a line `...`, and the beginning of a line where the page has `... ` in its place.
- `<!-- stays -->` before a block: its command is a server, which runs until the end of the page. `<!-- replaces -->`: the
  server takes the place of the one before.
- `<!-- numbers vary -->` before a block: its numbers need not be those of the page. Else a number may differ by a
  thousandth.
- `<!-- fails -->` before a block: its last command ends with an error.

PATH begins with the folders of `--path`. `$ROOT` in a command is the project's folder.
"""
import argparse
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A server may first measure its models, and other programs start for a long time.
MOST_SECONDS = 180
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*Z?|\b\d\d:\d\d:\d\d\b(?:[.,]\d+)?")
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][0B]?")


class Wrong(Exception):
    """The page and the program disagree."""


@dataclasses.dataclass
class Step:
    """A command with the lines that it prints, or a file to write."""
    line: int
    text: str
    file: str = ""
    expected: list = dataclasses.field(default_factory=list)
    marks: frozenset = frozenset()
    # The picture that follows the command's block in the page.
    picture: str = ""


def is_open(command):
    """Whether a command goes on in the next line."""
    return command.endswith("\\") or command.count("'") % 2 == 1


def commands(line, lines, marks):
    """The steps of a block of commands that begins at a line of the page."""
    steps = []
    for offset, text in enumerate(lines):
        if text.startswith("$ "):
            steps.append(Step(line + offset, text[2:], marks=marks))
        elif steps and is_open(steps[-1].text):
            steps[-1].text += "\n" + text
        elif steps:
            steps[-1].expected.append(text)
        else:
            raise Wrong(f"line {line + offset}: a block of commands begins with '$ '")
    return steps


def steps_of(page):
    """The steps of a page's text, in order."""
    steps, block, marks, named = [], None, set(), ""
    for number, line in enumerate(page.splitlines(), 1):
        if block is None and (mark := re.fullmatch(r"<!-- (.*) -->", line)):
            marks |= set(mark[1].split(", "))
        elif block is None and line.startswith("```"):
            block = (line[3:].strip(), number + 1, [])
        elif block is not None and line.startswith("```"):
            kind, first, lines = block
            if kind == "console":
                steps += commands(first, lines, frozenset(marks))
            elif named:
                steps.append(Step(first, "\n".join(lines) + "\n", file=named))
            block, marks, named = None, set(), ""
        elif block is not None:
            block[2].append(line)
        elif picture := re.match(r"!\[.*\]\((.*\.svg)\)", line):
            if steps:
                steps[-1].picture = picture[1]
        elif line.strip():
            named = file[1] if (file := re.search(r"\bSave\b.*`([^`]+)`:$", line)) else ""
    return steps


def agree(expected, printed, varies):
    """Whether a printed line is that of the page."""
    # Columns of a table are as wide as their numbers, and no time of the day repeats itself.
    expected, printed = (" ".join(TIME.sub("TIME", line).split()) for line in (expected, printed))
    if expected.startswith("... "):
        expected = expected[4:]
        printed = " ".join(printed.split(" ")[-len(expected.split(" ")):])
    if NUMBER.sub("0", expected) != NUMBER.sub("0", printed):
        return False
    pairs = zip(NUMBER.findall(expected), NUMBER.findall(printed))
    value = lambda text: float(text.replace(",", ""))
    return varies or all(abs(value(a) - value(b)) <= abs(value(a)) / 1000 for a, b in pairs)


def match(expected, printed, varies):
    """Whether printed lines are those of the page; a page's `...` stands for any lines."""
    if not expected:
        return not printed
    if expected[0] == "...":
        return any(match(expected[1:], printed[skipped:], varies) for skipped in range(len(printed) + 1))
    return bool(printed) and agree(expected[0], printed[0], varies) and match(expected[1:], printed[1:], varies)


class Terminal:
    """A program on a terminal of this many columns."""

    def __init__(self, command, folder, environment, columns):
        master, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.said, self.master = b"", master
        self.process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdin=end, stdout=end, stderr=end, start_new_session=True)
        os.close(end)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        # The system says that the other end is closed by an error.
        with contextlib.suppress(OSError):
            while said := os.read(self.master, 65536):
                self.said += said

    def lines(self):
        """The printed lines, without colours, and without the states of bars."""
        text = STYLE.sub("", self.said.decode(errors="replace")).replace("\r\n", "\n")
        lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
        return lines if lines[-1] else lines[:-1]

    def wait(self):
        """Waits for the end of the program; its status."""
        try:
            status = self.process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self.stop()
            raise Wrong(f"did not end within {MOST_SECONDS} s, and printed\n" + "\n".join(self.lines())) from None
        self.reader.join(5)
        return status

    def stop(self):
        """Ends the program as Ctrl-C does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Reader:
    """Does the steps of a page in a folder. `ports` are the ports to use in place of the page's, {page's: used}."""

    def __init__(self, folder, path, ports=None, columns=110, **environment):
        self.folder, self.ports, self.columns = pathlib.Path(folder), ports or {}, columns
        self.environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **environment, "ROOT": str(ROOT)}
        self.environment["PATH"] = ":".join([*(str(p) for p in path), os.environ["PATH"]])
        self.servers = []

    def used(self, text):
        """A text of the page with the ports that are used."""
        for port, used in self.ports.items():
            text = text.replace(f":{port}", f":{used}")
        return text

    def shown(self, lines):
        """Printed lines with the ports of the page."""
        for port, used in self.ports.items():
            lines = [re.sub(rf"\b{used}\b", str(port), line) for line in lines]
        return lines

    def do(self, step):
        """Does a step. Returns the terminal of a command.

        Raises Wrong if the command prints other lines than the page, or ends otherwise."""
        if step.file:
            (self.folder / step.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / step.file).write_text(self.used(step.text))
            return None
        if "replaces" in step.marks and self.servers:
            self.servers.pop().stop()
        terminal = Terminal(self.used(step.text), self.folder, self.environment, self.columns)
        try:
            self.check(step, terminal)
        except Wrong as wrong:
            raise Wrong(f"line {step.line}: $ {step.text}\n{wrong}") from None
        return terminal

    def check(self, step, terminal):
        varies = "numbers vary" in step.marks
        fits = lambda: match(step.expected, self.shown(terminal.lines()), varies)
        if step.marks & {"stays", "replaces"}:
            self.servers.append(terminal)
            until = time.monotonic() + MOST_SECONDS
            while not fits() and terminal.process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if terminal.process.poll() is not None:
                raise Wrong("ended, and printed\n" + "\n".join(terminal.lines()))
        elif (terminal.wait() != 0) != ("fails" in step.marks):
            raise Wrong(f"ended with {terminal.process.returncode}, and printed\n" + "\n".join(terminal.lines()))
        if step.expected and not fits():
            raise Wrong("printed\n" + "\n".join(self.shown(terminal.lines())) + "\nand the page has\n" + "\n".join(step.expected))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--path", action="append", default=[], type=os.path.abspath, metavar="FOLDER")
    options = parser.parse_args()
    steps = steps_of(options.page.read_text())
    with tempfile.TemporaryDirectory() as folder, Reader(folder, options.path) as reader:
        for step in steps:
            print(f"{options.page}:{step.line}: {step.file or step.text}", flush=True)
            reader.do(step)
    print(f"{options.page}: {len(steps)} steps, as the page says")


if __name__ == "__main__":
    try:
        main()
    except Wrong as fault:
        sys.exit(str(fault))
