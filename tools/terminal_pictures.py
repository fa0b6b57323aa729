#!/usr/bin/env python3
"""Makes the pictures of a page: runs the page, and draws the terminal of each command that a picture follows.

    tools/terminal_pictures.py docs/tutorial.md --path target/release --path .venv/bin

Needs the packages `pyte`, which is the terminal, and `rich`, which draws. A page's form is that of tools/try_page.py.
"""
import argparse
import io
import itertools
import os
import pathlib
import re
import sys
import tempfile

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from try_page import Reader, Wrong, steps_of

COLUMNS = 110
THEME = TerminalTheme(
    (24, 26, 31), (214, 217, 224),
    [(24, 26, 31), (224, 108, 117), (126, 189, 100), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194), (200, 204, 212)],
    [(110, 116, 130), (240, 128, 137), (150, 210, 120), (240, 205, 140), (120, 190, 250), (215, 145, 235), (110, 200, 212), (255, 255, 255)])
# Rich's picture fetches a font from another site; a picture of this project fetches nothing.
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
NAMES = {"brown": "yellow", "default": None}


def style_of(char):
    """The style of a character of the terminal."""
    colour = NAMES.get(char.fg, char.fg)
    if colour and colour.startswith("bright"):
        colour = "bright_" + NAMES.get(colour[6:], colour[6:])
    elif colour and re.fullmatch(r"[0-9a-f]{6}", colour):
        colour = "#" + colour
    return Style(color=colour, bold=char.bold, italic=char.italics, underline=char.underscore)


def screen_of(said):
    """The rows of a terminal after a program has written to it."""
    screen = pyte.Screen(COLUMNS, 400)
    pyte.ByteStream(screen).feed(said)
    rows = []
    for number in range(screen.cursor.y + 1):
        row = Text()
        chars = [screen.buffer[number][column] for column in range(COLUMNS)]
        for style, run in itertools.groupby(chars, style_of):
            row.append("".join(char.data for char in run), style)
        row.rstrip()
        rows.append(row)
    while rows and not rows[-1].plain:
        rows.pop()
    return rows


def picture(command, said, rows=24):
    """The picture of a command and its output, at most so many rows of it."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for row in screen_of(said)[:rows]:
        console.print(row, soft_wrap=True)
    svg = FONT.sub("", console.export_svg(title="", theme=THEME, unique_id="terminal"))
    return svg.replace("Fira Code", "ui-monospace, Menlo, Consolas")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--path", action="append", default=[], type=os.path.abspath, metavar="FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Reader(folder, options.path, columns=COLUMNS) as reader:
        for step in steps_of(options.page.read_text()):
            terminal = reader.do(step)
            if step.picture:
                file = options.page.parent / step.picture
                file.parent.mkdir(exist_ok=True)
                file.write_text(picture(step.text, terminal.said))
                print(file)


if __name__ == "__main__":
    try:
        main()
    except Wrong as fault:
        sys.exit(str(fault))
