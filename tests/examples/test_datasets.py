"""Programs and pages read no dataset that autotunes.

In TensorFlow 2.21, deleting an iterator that autotunes can take a minute. This
test only reads sources, because tests/conftest.py disables autotuning while
tests run.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
SWITCHED_OFF = "autotune.enabled = False"
# Patterns of code that creates a dataset, and of loops that read a dataset.
MAKES = re.compile(
    r"tf\.data\.(?:Dataset\.\w+|\w+Dataset)\(|\.as_dataset\(|as_numpy\("
)
READS = re.compile(
    r"\bfor [^\n]* in [^\n]*(?:dataset|batches|data\b)|"
    r"\biter\(\w*(?:data|strat)"
)
SNIPPET = re.compile(
    r"^ *```py(?:thon)?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)
LOOPS = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    # The programs of this page only show bugs of other packages.
    if page.name != "upstream.md"
    and any(
        MAKES.search(code) and READS.search(code)
        for code in SNIPPET.findall(page.read_text())
    )
]
PAGES_OF_LOOPS = [
    "guides/layout_maps",
    "reference/parameter_servers",
    "guides/tpu_embedding",
    "guides/emulation",
]


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if MAKES.search(path.read_text())],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_an_example_that_makes_datasets_switches_autotuning_off(path):
    assert SWITCHED_OFF in path.read_text()


def test_the_examples_with_datasets_are_found():
    found = {
        str(path.relative_to(ROOT / "examples"))
        for path in EXAMPLES
        if MAKES.search(path.read_text())
    }
    assert {
        "clicks/criteo.py",
        "clicks/run.py",
        "transformer/training.py",
        "completion/data/movielens.py",
    } <= found


@pytest.mark.parametrize(
    "page", LOOPS, ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_with_a_custom_loop_switches_autotuning_off(page):
    assert SWITCHED_OFF in page.read_text()


@pytest.mark.parametrize("page", PAGES_OF_LOOPS)
def test_the_pages_about_custom_loops_say_why(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    reason = r"autotuning\s+can\s+take\s+up\s+to\s+a\s+minute"
    assert re.search(reason, text.replace("# ", ""))
