"""Each guide begins with the task that it describes."""

import pathlib

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
