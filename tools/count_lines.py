#!/usr/bin/env python3
"""Lines of product code by crate: `crates/*/src` without tests, blank lines and comments.

    python tools/count_lines.py [REVISION] [FOLDER...]     # FOLDER: crates (the default), lab
"""

import collections
import re
import subprocess
import sys


def code_lines(text):
    """Counts lines outside comments and outside items under #[cfg(test)]."""
    lines, count, index, in_comment = text.split("\n"), 0, 0, False
    while index < len(lines):
        line = lines[index].strip()
        if re.match(r"#\[cfg\((all\()?test", line):
            index = end_of_item(lines, index + 1)
        elif in_comment or line.startswith("/*"):
            in_comment = "*/" not in line
        elif line and not line.startswith("//"):
            count += 1
        index += 1
    return count


def end_of_item(lines, index):
    """The last line of the item that begins at or after `index`."""
    while index < len(lines) and lines[index].strip().startswith("#["):
        index += 1
    depth, has_body = 0, False
    for end in range(index, len(lines)):
        code = re.sub(r'"(\\.|[^"\\])*"', '""', re.sub(r"//.*", "", lines[end]))
        code = re.sub(r"'[{}]'", "''", code)
        depth += code.count("{") - code.count("}")
        has_body |= "{" in code
        if (has_body and depth <= 0) or (not has_body and code.rstrip().endswith(";")):
            return end
    return len(lines)


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def count(revision, folders):
    counts = collections.Counter()
    for path in git("ls-tree", "-r", "--name-only", revision, *folders).split():
        crate, _, file = path.partition("/src/")
        if file.endswith(".rs") and not re.search(r"(^|/)tests?(/|\.rs$)", file):
            counts[crate] += code_lines(git("show", f"{revision}:{path}"))
    return counts


def main():
    revision, *folders = sys.argv[1:] or ["HEAD"]
    counts = count(revision, folders or ["crates"])
    for crate, lines in sorted(counts.items()):
        print(f"{crate:24}{lines:8,}")
    print(f"{'all':24}{sum(counts.values()):8,}")


if __name__ == "__main__":
    main()
