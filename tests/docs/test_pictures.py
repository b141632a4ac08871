"""The committed pictures match the pages that show them."""

import importlib
import pathlib
import re

import pytest

from benchmarks import extrapolation

ROOT = pathlib.Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "shards.svg"


def texts_of(picture: pathlib.Path) -> list[str]:
    """Returns the texts, which Matplotlib also writes as comments."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text())


def test_the_picture_of_the_readme_shows_its_numbers():
    readme = (ROOT / "README.md").read_text()
    texts = texts_of(PICTURE)
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


def test_the_picture_of_a_vocabulary_matches_a_new_run(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(PICTURE.parent))
    steps = importlib.import_module("guide_pictures").run_vocabulary()
    assert [step.evicted for step in steps] == [[], [], [], ["hen"]]
    shown = [
        text
        for text in texts_of(PICTURE.parent / "vocabulary.svg")
        if text.startswith("row ")
    ]
    assert shown == [
        f"row {row}: {key or 'free'}"
        for step in steps
        for row, key in enumerate(step.rows)
    ]


def test_the_page_of_scaling_limits_shows_the_numbers_of_its_program():
    network, tables = extrapolation.Network(), extrapolation.Tables()
    picture = PICTURE.parent / "scaling.svg"
    assert picture.read_text() == extrapolation.picture(network)
    page = (ROOT / "docs" / "scaling.md").read_text()
    steps = [tables.step(n, network) for n in extrapolation.SERVERS]
    cells = " | ".join(f"{step:.0f}" for step in steps)
    assert f"| **step** | {cells} |" in page
    for devices in extrapolation.DEVICES:
        step = extrapolation.DECODER_STEP.step(devices, network)
        token = extrapolation.DECODER_TOKEN.step(devices, network)
        (row,) = re.findall(rf"^\| {devices} \|.*$", page, re.M)
        assert f"| {step:.0f} ms |" in row
        assert f"| {token:.2g} ms |" in row
