"""The Python snippets of each page run in the order in which they appear."""

import os
import pathlib
import re
import textwrap

import pytest

import tests.strategies  # noqa: F401  (splits the CPU before the first op)

ROOT = pathlib.Path(__file__).parents[2]
# The snippets of these pages register kernels permanently, so tests/emulation
# runs each page in a separate process.
EMULATION = (
    ROOT / "docs" / "guides" / "emulation.md",
    ROOT / "docs" / "guides" / "tpu_v5p_v6e.md",
    ROOT / "docs" / "howto" / "run_on_a_cloud_tpu.md",
    ROOT / "docs" / "howto" / "move_tables_between_devices.md",
)
# The programs of this page must not import tf_layoutmap, and some of them end
# the process, so test_upstream.py runs them in separate processes.
UPSTREAM = ROOT / "docs" / "upstream.md"
PAGES = (
    [*EMULATION]
    if os.environ.get("TF_LAYOUTMAP_PROGRAM")
    else [
        page
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        if page not in (*EMULATION, UPSTREAM)
    ]
)
# Snippets inside a list are indented.
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def snippets(page: pathlib.Path) -> list[tuple[int, str]]:
    """Returns each snippet with the number of its first line."""
    text = page.read_text()
    return [
        (
            text[: match.start(2)].count("\n") + 1,
            textwrap.dedent(match.group(2)),
        )
        for match in SNIPPET.finditer(text)
    ]


@pytest.mark.covering(1, 5)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if snippets(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_snippets_of_a_page_run_in_order(
    page, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippet"}
    for line, code in snippets(page):
        code = code.replace("/tmp/tlm_docs", str(tmp_path))
        # With leading blank lines, errors report the line number in the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    # A comment after a print shows the expected output.
    promised = [
        promise.strip()
        for _, code in snippets(page)
        for promise in re.findall(r"print\(.*\)\s+# (.*)", code)
    ]
    assert capsys.readouterr().out.split("\n")[: len(promised)] == promised


def test_the_readme_has_one_snippet():
    assert len(snippets(ROOT / "README.md")) == 1
