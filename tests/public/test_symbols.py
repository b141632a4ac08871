"""Public names are listed in one file and visible to type checkers."""

import ast
import difflib

import pytest

import tf_layoutmap as tlm
from tests.public import result_types, symbols, type_checking_blocks
from tf_layoutmap import planning

UPDATE = "If this is meant, run `python -m tests.public.symbols` and commit."

PACKAGES = type_checking_blocks.lazy_packages()


def test_the_public_names_match_the_list():
    listed = symbols.GOLDEN.read_text(encoding="utf-8").splitlines()
    difference = "\n".join(
        difflib.unified_diff(
            listed,
            symbols.lines(),
            "golden/public_symbols.txt",
            "the package",
            lineterm="",
            n=0,
        )
    )
    assert not difference, f"{difference}\n{UPDATE}"


def test_the_classes_of_results_are_public():
    """A user gets objects of these classes, and can read how to use them."""
    public = symbols.public_names()
    names = {id(value) for value in public.values()}
    hidden = {
        f"{cls.__module__}.{cls.__qualname__}": path
        for cls, path in result_types.reachable(public).items()
        if id(cls) not in names
    }
    assert not hidden, (
        f"These classes are not public, but are results of: {hidden}. List "
        "them in the package of the call, or return another type."
    )


def test_annotations_of_results_are_followed():
    """Also through aliases, containers and imports for type checkers."""
    plan = planning.Plan
    results = {
        cls.__name__: path
        for cls, path in result_types.reachable(
            {"LayoutMap": tlm.LayoutMap, "scope": tlm.layout_map_scope}
        ).items()
    }
    assert results["Match"] == "LayoutMap.find"
    assert results["ReplicatedOp"] == "LayoutMap.explain.replicated_ops"
    assert set(result_types.returned_by(tlm.plan)) == {plan}
    assert set(result_types.returned_by(tlm.distribution.distribution)) == {
        tlm.distribution.Distribution
    }


def test_each_kind_of_name_has_a_line():
    class Base:
        def hidden(self):
            """Belongs to a class outside the package."""

    class Public(Base):
        number = 3

        def __init__(self, a, *, b=len):
            """Has two arguments."""

        def __call__(self, ids):
            """Is the call method."""

        def verb(self, row=0):
            """Is a method."""

        @classmethod
        def made_of(cls, text):
            """Is a class method."""

        @property
        def size(self):
            """Is a property."""

        def _private(self):
            """Is not public."""

    Public.__module__ = "tf_layoutmap.somewhere"
    assert list(symbols.lines_of("tlm.Public", Public)) == [
        "class tlm.Public(a, *, b=<len>)",
        "def tlm.Public.__call__(ids)",
        "classmethod tlm.Public.made_of(text)",
        "value tlm.Public.number: int",
        "property tlm.Public.size",
        "def tlm.Public.verb(row=0)",
    ]
    assert list(symbols.lines_of("tlm.x", 1.5)) == ["value tlm.x: float"]


def test_dir_shows_public_names_only():
    modules = symbols.public_modules()
    assert {"tlm", "tlm.partitioners", "tlm.layers.tf_keras"} <= set(modules)
    for path, module in modules.items():
        assert dir(module) == sorted(module.__all__), path
        assert all(hasattr(module, name) for name in module.__all__), path
        assert not [
            name
            for name in module.__all__
            if name.startswith("_") and name != "__version__"
        ], path


def test_the_top_level_has_at_most_26_names():
    """A new name belongs in a module, such as `tlm.deltas`."""
    names = set(symbols.public_modules()["tlm"].__all__) - {"__version__"}
    assert len(names) <= 26


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checking_blocks_match_the_lazy_imports(package):
    source = type_checking_blocks.source_of(package).read_text(encoding="utf-8")
    assert source == type_checking_blocks.rewritten(package), (
        f"In {package}/__init__.py the block `if TYPE_CHECKING:` or `__all__` "
        f"differs from `_HOMES`. {UPDATE}"
    )
    # Maps each name in the generated block to the module from which it is
    # imported.
    imported = {}
    for node in ast.walk(
        ast.parse(
            type_checking_blocks.block(type_checking_blocks.homes_of(package))
        )
    ):
        if isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {
                alias.asname or alias.name: f"{node.module}:{alias.name}"
                for alias in node.names
            }
    assert imported == type_checking_blocks.homes_of(package)


def test_every_package_with_lazy_imports_is_compared():
    calls = {
        ".".join(path.parent.relative_to(type_checking_blocks.ROOT).parts)
        for path in (type_checking_blocks.ROOT / "tf_layoutmap").rglob("*.py")
        if "_lazy.exports(" in path.read_text(encoding="utf-8")
    }
    assert calls == set(PACKAGES)
