"""Files and headings that README.md and the pages refer to exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST_FILE = re.compile(r"`((?:\w+/)*test_\w+\.py)`")
TEST_FILES = [
    str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")
]


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors that GitHub and Sphinx create for the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading))
        .lower()
        .replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_point_to_files_and_headings(page):
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not heading or heading in anchors(target), link


def test_links_are_found():
    """Checks that links exist, because the test above passes without any."""
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 50
    assert "the-main-job-make-demo" in anchors(
        ROOT / "docs" / "getting_started.md"
    )


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_test_files_named_on_a_page_exist(page):
    named = set(TEST_FILE.findall(page.read_text()))
    assert not [
        name
        for name in named
        if not any(f"/{path}".endswith(f"/{name}") for path in TEST_FILES)
    ]
    if page.name == "dtensor_problems.md":
        assert len(named) > 10


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)
def test_no_page_has_markup_that_github_shows_literally(page):
    """GitHub shows Sphinx directives in backquotes literally."""
    assert ":::" not in page.read_text()
