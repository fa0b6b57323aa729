#!/usr/bin/env python3
"""The pages of the project as a site.

    tools/book.py                                   checks the pages: the table of contents, links and headings
    tools/book.py --build target/book [--source URL]    checks them, and builds the site with mdBook

docs/SUMMARY.md must name each Markdown file of the project exactly once. A link must lead to a file of the
project, and `#heading` to a heading of that file. The same holds for a page that the sources name, such as
`docs/guide/triton.md#sequences` in a message of the program. The site has the pages alone. A link from a page to another
file, such as a source file, leads to URL (the address of the project's files on a forge) or is plain text.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

SUMMARY = "docs/SUMMARY.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A page that a source file names, in a message or a comment.
POINTER = re.compile(r"(?<![\w/.-])(docs/[\w/-]+\.md)(?:#([\w-]+))?")


def files(root):
    """The project's files, except ignored ones."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True)
    return sorted(name for name in listed.stdout.splitlines() if (root / name).is_file())


def prose(text):
    """The lines outside of blocks of code, with their numbers."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, line


def headings(text):
    """The anchors of a page's headings, as mdBook and forges make them."""
    anchors, seen = set(), {}
    for _, line in prose(text):
        if title := re.match(r"#+ +(.*)", line):
            plain = re.sub(r"[`*\[\]]", "", re.sub(r"\]\([^)]*\)", "", title[1])).strip().lower()
            anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            seen[anchor] = seen.get(anchor, -1) + 1
            anchors.add(anchor if seen[anchor] == 0 else f"{anchor}-{seen[anchor]}")
    return anchors


def target(page, link):
    """The file of the project that a link of a page leads to, and the heading; None for another site."""
    if re.match(r"[a-z]+:", link):
        return None
    path, _, heading = link.partition("#")
    return os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page, heading


def stray_pointers(root, names, anchors):
    """The faults of the sources: pages and headings that they name and that do not exist."""
    for name in names:
        if not name.endswith(".rs"):
            continue
        for number, line in enumerate((root / name).read_text().splitlines(), 1):
            for page, heading in POINTER.findall(line):
                if page not in anchors:
                    yield f"{name}:{number}: there is no {page}"
                elif heading and heading not in anchors[page]:
                    yield f"{name}:{number}: {page} has no heading #{heading}"


def check(root):
    """The faults of the pages, a line each."""
    names = files(root)
    texts = {name: (root / name).read_text() for name in names if name.endswith(".md")}
    folders = {parent.as_posix() for name in names for parent in pathlib.PurePosixPath(name).parents}
    anchors = {name: headings(text) for name, text in texts.items()}
    faults = []
    for page, text in texts.items():
        for number, line in prose(text):
            for link in LINK.findall(line):
                file, heading = target(page, link) or (page, "")
                if file not in names and file not in folders:
                    faults.append(f"{page}:{number}: {link}: there is no {file}")
                elif heading and file in anchors and heading not in anchors[file]:
                    faults.append(f"{page}:{number}: {link}: {file} has no such heading")
    faults.extend(stray_pointers(root, names, anchors))
    named = [target(SUMMARY, link)[0] for link in LINK.findall(texts.get(SUMMARY, ""))]
    for page in texts:
        if page != SUMMARY and named.count(page) != 1:
            faults.append(f"{SUMMARY}: names {page} {named.count(page)} times, and must name it once")
    return faults


def on_site(page):
    """The name of a page for mdBook, which makes a folder's page of its `index.md`."""
    return re.sub(r"README\.md$", "index.md", page)


def site_link(page, link, names, source):
    """A link of a page as the site has it; None: the site has no such page, and no address of the file is known."""
    found = target(page, link)
    if found is None or found[0].endswith(".svg"):
        return link
    if found[0] == SUMMARY:
        # The site shows the contents beside each page.
        return None
    if found[0].endswith(".md"):
        return link.replace("README.md", "index.md")
    kind = "blob" if found[0] in names else "tree"
    return f"{source.rstrip('/')}/{kind}/HEAD/{found[0]}" if source else None


def staged(page, text, names, source):
    """The text of a page for mdBook."""
    def replace(match):
        link = site_link(page, match[2], names, source)
        return match[1] if link is None else f"[{match[1]}]({link})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


def stage(root, folder, source):
    """Copies the pages and pictures to `folder`, for mdBook."""
    names = set(files(root))
    for name in names:
        if name.endswith(".svg"):
            to = folder / "pages" / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, to)
        elif name.endswith(".md") and name != SUMMARY:
            to = folder / "pages" / on_site(name)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(staged(name, (root / name).read_text(), names, source))
    # mdBook wants the table of contents beside all pages.
    contents = LINK.sub(lambda match: f"]({on_site(target(SUMMARY, match[1])[0])})", (root / SUMMARY).read_text())
    (folder / "pages/SUMMARY.md").write_text(contents)
    shutil.copyfile(root / "docs/book.toml", folder / "book.toml")


def broken(site):
    """Links of the built site that lead nowhere."""
    for page in sorted(site.rglob("*.html")):
        for link in re.findall(r'href="([^"#?]+)', page.read_text()):
            if not re.match(r"[a-z]+:|//", link) and page.name not in ("404.html", "print.html", "toc.html"):
                if not (page.parent / link).exists():
                    yield f"{page.relative_to(site)}: {link}"


def build(root, folder, source):
    """Builds the site in `folder`; returns the broken links."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stage(root, folder, source)
    subprocess.run(["mdbook", "build", folder], check=True)
    return list(broken(folder / "book"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--build", type=pathlib.Path, metavar="FOLDER", help="build the site in FOLDER/book")
    parser.add_argument("--source", metavar="URL", help="address of the project on its forge")
    options = parser.parse_args()
    faults = check(options.root)
    if options.build and not faults:
        faults = build(options.root, options.build.resolve(), options.source)
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
