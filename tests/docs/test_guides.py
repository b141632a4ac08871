"""Each guide begins with its task; two guides have details on other pages."""

import pathlib
import re

import pytest

GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"


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
