"""Generates the `if TYPE_CHECKING:` blocks of the packages that use `_lazy`.

Type checkers and editors do not run code, so each `__init__.py` with `_HOMES`
repeats its lazy imports as plain imports in such a block.
`python -m tests.public.symbols` generates the block from `_HOMES`.
"""

import importlib
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)*?(?=else:\n)", re.M)
ALL = re.compile(r"^__all__ = \[.*?\]\n", re.M | re.S)


def lazy_packages() -> list[str]:
    """Returns the full names of the packages that have `_HOMES`."""
    found = []
    for path in sorted((ROOT / "tf_layoutmap").rglob("__init__.py")):
        if re.search(r"^_HOMES = ", path.read_text(encoding="utf-8"), re.M):
            found.append(".".join(path.parent.relative_to(ROOT).parts))
    return found


def source_of(package: str) -> pathlib.Path:
    return ROOT.joinpath(*package.split("."), "__init__.py")


def homes_of(package: str) -> dict[str, str]:
    return importlib.import_module(package)._HOMES


def block(homes: dict[str, str]) -> str:
    """Returns the imports that bind each name to its entry in `homes`.

    >>> print(block({"b": "a.b", "c": "a.x", "D": "m:D", "E": "m:E"}), end="")
    if TYPE_CHECKING:
        import a.b as b
        import a.x as c
        from m import D, E
    """
    modules, members = [], {}
    for name, home in homes.items():
        module, _, attribute = home.partition(":")
        if attribute:
            members.setdefault(module, []).append(
                name if attribute == name else f"{attribute} as {name}"
            )
        else:
            modules.append(f"import {module} as {name}")
    lines = sorted(modules)
    for module, names in sorted(members.items()):
        line = f"from {module} import {', '.join(names)}"
        if len(names) > 1:
            # The names are sorted as ruff sorts them: constants, classes, other
            # names.
            names.sort(
                key=lambda name: (
                    not name.isupper(),
                    not name[0].isupper(),
                    name,
                )
            )
            line = f"from {module} import {', '.join(names)}"
        if len(line) > 76:
            line = (
                f"from {module} import (\n"
                + "".join(f"    {name},\n" for name in names)
                + ")"
            )
        lines.append(line)
    return "if TYPE_CHECKING:\n" + textwrap.indent(
        "\n".join(lines) + "\n", "    "
    )


def all_names(package: str, homes: dict[str, str]) -> str:
    """Returns the assignment of `__all__`, which must be a literal."""
    names = [*(["__version__"] if package == "tf_layoutmap" else []), *homes]
    return (
        "__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"
    )


def rewritten(package: str) -> str:
    """Returns the source of `package` after updating its generated parts."""
    homes = homes_of(package)
    source = source_of(package).read_text(encoding="utf-8")
    for pattern, text in (
        (BLOCK, block(homes)),
        (ALL, all_names(package, homes)),
    ):
        source, count = pattern.subn(lambda _, text=text: text, source)
        if count != 1:
            raise ValueError(
                f"{source_of(package)} must have one `if TYPE_CHECKING:` with "
                "an `else:`, and one `__all__ = [...]`. Received: "
                f"{count} times {pattern.pattern!r}."
            )
    return source


def write() -> list[str]:
    """Rewrites outdated sources and returns the packages that changed."""
    changed = []
    for package in lazy_packages():
        source = rewritten(package)
        if source != source_of(package).read_text(encoding="utf-8"):
            source_of(package).write_text(source, encoding="utf-8")
            changed.append(package)
    return changed
