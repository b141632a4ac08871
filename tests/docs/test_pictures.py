"""The committed pictures match the pages that show them."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "shards.svg"


def test_the_picture_of_the_readme_shows_its_numbers():
    readme = (ROOT / "README.md").read_text()
    # Matplotlib writes each text of an SVG file as a comment, too.
    texts = re.findall(r"<!-- (.*?) -->", PICTURE.read_text())
    numbers = re.findall(r"bytes_per_device\)  # (\d+)", readme)
    assert len(numbers) == 2
    for number in numbers:
        assert f"{int(number):,} bytes per device" in texts
    (layout,) = re.findall(r"^layout_map\[.*$", readme, re.M)
    assert layout in texts


def test_the_readme_and_the_first_page_show_the_picture():
    assert "](docs/images/shards.svg)" in (ROOT / "README.md").read_text()
    assert "](images/shards.svg)" in (ROOT / "docs" / "index.md").read_text()


def test_pictures_are_small():
    assert all(
        path.stat().st_size < 100_000
        for path in PICTURE.parent.iterdir()
        if path.suffix in (".svg", ".png")
    )
