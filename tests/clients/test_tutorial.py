"""docs/tutorial.md does as it says; tools/try_page.py finds a page that does not."""
import os
import pathlib
import sys

import pytest

from serving import ROOT, environment, free_ports

sys.path.insert(0, str(ROOT / "tools"))
import try_page  # noqa: E402

PORTS = {"HTTP": 8000, "GRPC": 8001, "METRICS": 8002}


@pytest.fixture
def reader(binary, tmp_path):
    """A reader with a new folder, the program, this Python, and ports of its own."""
    used = dict(zip(PORTS.values(), free_ports(len(PORTS))))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "downbeat").symlink_to(binary)
    variables = {f"DOWNBEAT_{name}_PORT": str(used[port]) for name, port in PORTS.items()}
    folder = tmp_path / "reader"
    folder.mkdir()
    path = [programs, pathlib.Path(sys.executable).parent]
    with try_page.Reader(folder, path, used, **environment(tmp_path), **variables) as reader:
        yield reader


def test_the_tutorial_does_as_it_says(reader):
    steps = try_page.steps_of((ROOT / "docs/tutorial.md").read_text())
    # `downbeat bench` takes the server by an argument, and the page needs none for the default.
    port = reader.ports[8000]
    for step in steps:
        step.text = step.text.replace("downbeat bench ", f"downbeat bench -u localhost:{port} ")
        reader.do(step)
    assert sum("stays" in step.marks or "replaces" in step.marks for step in steps) == 2


def test_the_pictures_of_the_tutorial_exist_and_fetch_nothing():
    pictures = [step.picture for step in try_page.steps_of((ROOT / "docs/tutorial.md").read_text()) if step.picture]
    assert len(pictures) >= 3
    for picture in pictures:
        text = (ROOT / "docs" / picture).read_text()
        assert text.startswith("<svg") and "url(\"http" not in text and "@font-face" not in text and "href" not in text


@pytest.mark.parametrize("page", ["docs/tutorial.md", *sorted(os.path.relpath(page, ROOT) for page in (ROOT / "docs/guide").glob("from_*.md"))])
def test_a_page_has_steps(page):
    """The pages about other servers need these servers: tools/peers/migrate_check.sh runs them."""
    steps = try_page.steps_of((ROOT / page).read_text())
    if "```console" in (ROOT / page).read_text():
        assert any(not step.file and step.expected for step in steps)


PAGE = """# A page

Save this as `a/b.txt`:

```
one
```

{marks}

```console
$ cat a/b.txt && echo 'two
    2.0004 lines'
one
{says}
```
"""


@pytest.mark.parametrize("marks, says, fault", [
    ("", "two\n    2.0 lines", ""),
    ("", "...\n3 lines", "the page has"),
    ("", "...", ""),
    ("", "two\n... 2.0 lines", ""),
    ("", "two\n    3.0 lines", "the page has"),
    ("<!-- numbers vary -->", "two\n    3.0 lines", ""),
    ("<!-- numbers vary -->", "two\n    3.0 words", "the page has"),
    ("", "two", "the page has"),
    ("<!-- fails -->", "two\n    2.0 lines", "ended with 0"),
    ("<!-- stays -->", "two\n    2.0 lines", "ended, and printed"),
])
def test_a_page_that_is_wrong_is_found(tmp_path, marks, says, fault):
    with try_page.Reader(tmp_path, []) as reader:
        try:
            for step in try_page.steps_of(PAGE.format(marks=marks, says=says)):
                reader.do(step)
        except try_page.Wrong as wrong:
            assert fault and fault in str(wrong), wrong
        else:
            assert not fault
