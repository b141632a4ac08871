"""The sources in `cc/` follow the include rules of their folders."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CC = ROOT / "cc"

# Each folder of the core may include itself and the folders listed before it.
CORE = [
    "base",
    "memory",
    "simd",
    "ids",
    "rows",
    "tables",
    "interactions",
    "keys",
    "vocabulary",
    "optimizers",
    "steps",
    "engine",
    "servers",
    "served_keys",
    "exchange",
    "collectives",
]

INCLUDE = re.compile(r'^#include "cc/core/(\w+)/', re.M)


def core_files(folder: str) -> list[pathlib.Path]:
    """Returns the files of a folder except tests, which have no rule."""
    return sorted(
        path
        for path in (CC / "core" / folder).iterdir()
        if path.suffix in (".h", ".cc") and "_test." not in path.name
    )


def test_every_folder_of_the_core_is_listed():
    found = {path.name for path in (CC / "core").iterdir() if path.is_dir()}
    assert found == set(CORE)
    assert not [
        path for path in (CC / "core").iterdir() if path.suffix in (".h", ".cc")
    ]


@pytest.mark.parametrize("folder", CORE)
def test_core_folders_include_only_earlier_folders(folder):
    files = core_files(folder)
    assert files
    allowed = set(CORE[: CORE.index(folder) + 1])
    for path in files:
        # Sources that are compiled per instruction set may also include the
        # update rules.
        rules = {"optimizers"} if path.name.endswith("_isa.cc") else set()
        included = set(INCLUDE.findall(path.read_text(encoding="utf-8")))
        assert included <= allowed | rules, path


def test_the_design_page_lists_every_folder_of_the_core():
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert not [name for name in CORE if f"`{name}/`" not in page]
