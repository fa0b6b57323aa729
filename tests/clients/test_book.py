"""tools/book.py: the faults of pages that it must report. CI runs the tool on the project's own pages."""
import subprocess
import sys

import pytest

from serving import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import book  # noqa: E402

PAGES = {
    "README.md": "# Start\n\nSee [the guide](docs/guide.md#first-step) and [the code](src/).\n",
    "docs/guide.md": "# Guide\n\n## First step\n\n    [no link](in/code.md)\n",
    "docs/SUMMARY.md": "# Summary\n\n[Start](../README.md)\n\n- [Guide](guide.md)\n",
    "src/main.rs": 'fn main() {}\nconst PAGE: &str = "see docs/guide.md#first-step";\n',
}


@pytest.fixture
def project(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    for name, text in PAGES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_good_pages_have_no_faults(project):
    assert book.check(project) == []


@pytest.mark.parametrize("page, text, fault", [
    ("docs/new.md", "# New\n", "docs/SUMMARY.md: names docs/new.md 0 times"),
    ("docs/SUMMARY.md", PAGES["docs/SUMMARY.md"] + "- [Again](guide.md)\n", "names docs/guide.md 2 times"),
    ("docs/SUMMARY.md", PAGES["docs/SUMMARY.md"] + "- [Gone](gone.md)\n", "docs/SUMMARY.md:6: gone.md: there is no docs/gone.md"),
    ("docs/guide.md", "# Guide\n\n## Second step\n", "README.md:3: docs/guide.md#first-step: docs/guide.md has no such heading"),
    ("docs/guide.md", "# Guide\n\n## Second step\n", "src/main.rs:2: docs/guide.md has no heading #first-step"),
    ("src/main.rs", "// see docs/gone.md\n", "src/main.rs:1: there is no docs/gone.md"),
])
def test_a_fault_is_reported(project, page, text, fault):
    (project / page).write_text(text)
    assert any(fault in line for line in book.check(project)), book.check(project)


def test_a_staged_page_links_to_pages_and_to_the_forge(project, tmp_path):
    text = (project / "README.md").read_text()
    assert "[the guide](docs/guide.md#first-step) and the code." in book.staged("README.md", text, set(book.files(project)), None)
    assert "[the code](https://forge/tree/HEAD/src)" in book.staged("README.md", text, set(book.files(project)), "https://forge")
    (project / "docs/book.toml").write_text("")
    book.stage(project, tmp_path / "site", None)
    assert "[Start](index.md)" in (tmp_path / "site/pages/SUMMARY.md").read_text()
    assert (tmp_path / "site/pages/docs/guide.md").is_file()
