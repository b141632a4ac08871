"""Checks the order of the pages: guides first, details on other pages."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


def test_each_guide_begins_with_a_task():
    first_paragraphs = {
        path.name: path.read_text().split("\n\n")[1]
        for path in GUIDES.glob("*.md")
    }
    assert first_paragraphs
    assert not [
        name
        for name, text in first_paragraphs.items()
        if not text.startswith("This guide shows how to ")
    ]


@pytest.mark.parametrize("name", ["several_processes", "open_vocabulary"])
def test_a_guide_with_reference_pages_is_short(name):
    text = (GUIDES / f"{name}.md").read_text()
    assert len(text.split()) <= 1_500
    assert len(re.findall(r"!\[[^\]]+\]\(\.\./images/", text)) == 1
    assert re.findall(r"^## (.*)", text, re.M)[-1] == "Limits"
    assert len(set(re.findall(r"\(\.\./reference/(\w+)\.md", text))) >= 4


def test_snippets_create_meshes_with_the_names_of_keras_distribution():
    """Other names are on the page for users of tf_keras."""
    pages = [
        page
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        if page.name not in ("tf_keras_dtensor.md", "upstream.md")
    ]
    found = {
        str(page.relative_to(ROOT)): names
        for page in pages
        for code in re.findall(
            r"^ *```(?:py|python|{code-cell}).*?\n(.*?)^ *```$",
            page.read_text(),
            re.M | re.S,
        )
        if (
            names := re.findall(
                r"tlm\.LayoutMap|create_(?:distributed_)?mesh|dtensor\.Layout",
                code,
            )
        )
    }
    assert not found
    layout_maps = (GUIDES / "layout_maps.md").read_text()
    assert "tlm.distribution.DeviceMesh(" in layout_maps


def pages_of_trees(page: pathlib.Path) -> list[pathlib.Path]:
    """Returns the pages that the tables of contents of a page list."""
    trees = re.findall(
        r"^```{toctree}\n(.*?)^```$", page.read_text(), re.M | re.S
    )
    entries = re.findall(r"^(?:.*<)?([\w/.]+)>?$", "\n".join(trees), re.M)
    return [(page.parent / f"{entry}.md").resolve() for entry in entries]


@pytest.mark.parametrize(
    "name",
    [
        "benchmarks",
        "design",
        "dtensor_problems",
        "ops",
        "real_programs",
        "replaced_names",
        "scaling",
        "tpu_compilation",
    ],
)
def test_a_page_about_internals_is_listed_as_such_only(name):
    docs = ROOT / "docs"
    listed = [
        page.relative_to(docs).as_posix()
        for page in docs.rglob("*.md")
        if docs / f"{name}.md" in pages_of_trees(page)
    ]
    assert listed == ["internals/index.md"]
