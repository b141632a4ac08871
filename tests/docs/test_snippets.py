"""Every Python snippet of the pages runs, in the order of its page."""

import os
import pathlib
import re

import pytest

import tests.strategies  # noqa: F401  splits the CPU before the first op

ROOT = pathlib.Path(__file__).parents[2]
# It registers kernels for good: tests/emulation runs it in another process.
EMULATION = ROOT / "docs" / "emulation.md"
PAGES = ([EMULATION] if os.environ.get("TF_LAYOUTMAP_PROGRAM") else
         [page for page in (ROOT / "README.md",
                            *sorted((ROOT / "docs").glob("*.md")))
          if page != EMULATION])
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: pathlib.Path) -> list[tuple[int, str]]:
    """Each snippet with the number of its first line."""
    text = page.read_text()
    return [(text[:match.start(1)].count("\n") + 1, match.group(1))
            for match in SNIPPET.finditer(text)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if snippets(page)],
    ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_one_after_the_other(
        page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippet"}
    for line, code in snippets(page):
        code = code.replace("/tmp/tlm_readme", str(tmp_path))
        # Blank lines in front: a failure then shows the page's own line.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    # What a comment after a print promises.
    promised = [promise.strip() for _, code in snippets(page)
                for promise in re.findall(r"print\(.*\)\s+# (.*)", code)]
    assert capsys.readouterr().out.split("\n")[:len(promised)] == promised


def test_the_readme_has_snippets():
    assert len(snippets(ROOT / "README.md")) >= 3
