"""The folders show the architecture: small, described, without import circles.

Only sources are read; nothing is imported.
"""

import ast
import pathlib
import re

from tests.architecture import test_levels

ROOT = pathlib.Path(__file__).parents[2]
# `__init__.py` and BUILD are not counted.
MOST_FILES = 25
SOURCES = {".py", ".cc", ".h"}


def folders():
    return sorted(
        folder
        for top in ("tf_layoutmap", "cc", "tests", "examples", "benchmarks")
        for folder in [ROOT / top, *(ROOT / top).rglob("*")]
        if folder.is_dir() and folder.name != "__pycache__"
    )


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the sources in a folder, without those that the build writes."""
    return [
        path
        for path in folder.iterdir()
        if path.suffix in SOURCES
        and path.name not in ("__init__.py", "_build_info.py")
    ]


def test_a_folder_has_at_most_25_files():
    crowded = [
        f"{folder.relative_to(ROOT)}: {len(sources(folder))}"
        for folder in folders()
        if len(sources(folder)) > MOST_FILES
    ]
    assert not crowded, crowded


def packages() -> list[pathlib.Path]:
    return [path.parent for path in test_levels.PACKAGE.rglob("__init__.py")]


def test_a_package_has_at_least_four_modules_or_packages():
    small = [
        str(package.relative_to(ROOT))
        for package in packages()
        if len(sources(package))
        + sum(package == other.parent for other in packages())
        < 3
    ]
    assert not small, small


def test_a_module_has_at_most_700_lines():
    # Import lists make the door to TensorFlow's private names longer.
    long = [
        f"{path.relative_to(ROOT)}: {lines}"
        for path in test_levels.PACKAGE.rglob("*.py")
        if path.name != "tf_private.py"
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > 700
    ]
    assert not long, long


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


def test_tensors_on_a_mesh_know_no_keras():
    below = [
        module
        for module in test_levels.modules()
        if module.startswith(("layout.mesh.", "layout.ops."))
    ]
    assert below
    offenders = [
        f"{module} imports {name}"
        for module in below
        for name in test_levels.read(module)[1]
        if name.split(".")[0] in KERAS or "keras_private" in name
    ]
    assert not offenders, offenders
