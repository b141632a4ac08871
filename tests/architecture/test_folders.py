"""Folders that show the architecture: small, named in the plan, no circles.

Only sources are read; nothing is imported.
"""

import ast
import pathlib
import re

import pytest

from tests.architecture import test_levels

ROOT = pathlib.Path(__file__).parents[2]
# "About 14" files, the package's own `__init__.py` and BUILD not counted.
MOST_FILES = 25
SOURCES = {".py", ".cc", ".h"}


def folders():
    return sorted(
        folder
        for top in ("tf_layoutmap", "cc", "tests", "examples", "benchmarks")
        for folder in [ROOT / top, *(ROOT / top).rglob("*")]
        if folder.is_dir() and folder.name != "__pycache__"
    )


@pytest.mark.parametrize(
    "folder", folders(), ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_folder_can_be_read_at_a_glance(folder):
    # What the build writes into the package is no source.
    files = [
        p.name
        for p in folder.iterdir()
        if p.suffix in SOURCES
        and p.name not in ("__init__.py", "_build_info.py")
    ]
    assert len(files) <= MOST_FILES, (
        f"{len(files)} files lie flat in it: find its parts"
    )


def imports():
    """Module -> modules of ours that it imports, also inside functions.

    And for type checkers only, except in packages: those name what is imported
    when it is used.
    """
    found = {}
    for module in test_levels.modules():
        tree, names = test_levels.read(module)
        if (
            test_levels.source_of(module).name != "__init__.py"
            and module not in test_levels.ROW_MODULES
        ):
            names = test_levels.imports_of(tree, module, False, walk=ast.walk)
        found[module] = {
            target
            for name in names
            if (target := test_levels.own_module(name)) is not None
        } - {module}
    return found


def circles(graph):
    """Groups of modules that reach each other (Tarjan's algorithm)."""
    index, low, stack, found = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph.get(module, ()):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def test_the_search_finds_circles():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_no_import_goes_in_a_circle():
    assert not circles(imports())


def test_the_design_describes_every_package_once():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("## Packages\n")[2].partition("\n## ")[0]
    described = re.findall(r"^\| `([\w/]+)/` \|", section, re.MULTILINE)
    packages = [
        str(path.parent.relative_to(test_levels.PACKAGE.parent))
        for path in test_levels.PACKAGE.rglob("__init__.py")
    ]
    assert sorted(described) == sorted(packages)


KERAS = {"keras", "tf_keras"}


@pytest.mark.parametrize(
    "module",
    [
        m
        for m in test_levels.modules()
        if m.startswith(("layout.mesh.", "layout.ops."))
    ],
)
def test_tensors_on_a_mesh_know_no_keras(module):
    _, imported = test_levels.read(module)
    assert not {name.split(".")[0] for name in imported} & KERAS
    assert not [name for name in imported if "_keras_private" in name]
