"""Public names and entries in docs/api match one to one."""

import inspect
import pathlib
import re
import types

import tf_layoutmap as tlm

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "api"
SPACES = [
    tlm,
    tlm.layers,
    tlm.layers.tf_keras,
    tlm.layout,
    tlm.distribution,
    tlm.dtensor,
    tlm.emulation,
    tlm.deltas,
    tlm.vocabulary,
    tlm.planning,
    tlm.partitioners,
    tlm.process,
    tlm.serving,
    tlm.optimizers,
    tlm.ops,
    tlm.ps,
]


def public_names(space: types.ModuleType) -> list[str]:
    """Returns `__all__`, or the public names that a module defines."""
    return getattr(space, "__all__", None) or [
        name
        for name, value in vars(space).items()
        if not name.startswith("_") and inspect.getmodule(value) is space
    ]


def path_of(space: types.ModuleType) -> str:
    """Returns the path under which users import a module."""
    return {
        tlm.partitioners: "tf_layoutmap.partitioners",
        tlm.optimizers: "tf_layoutmap.optimizers",
    }.get(space, space.__name__)


def test_each_public_name_has_one_entry():
    expected = {
        f"{path_of(space)}.{name}"
        for space in SPACES
        for name in public_names(space)
    }
    entries = [
        name
        for page in sorted(PAGES.glob("*.md"))
        for name in re.findall(r"^\.\. public:: (\S+)$", page.read_text(), re.M)
    ]
    assert sorted(entries) == sorted(expected)


def test_all_public_modules_are_checked():
    """Fails if `SPACES` does not contain every public module."""
    modules = {
        id(value)
        for space in SPACES
        for name in public_names(space)
        if isinstance(value := getattr(space, name), types.ModuleType)
    }
    assert modules == {id(space) for space in SPACES[1:]}
