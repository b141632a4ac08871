"""Lists every public name with its signature on a separate line.

    python -m tests.public.symbols

The command writes golden/public_symbols.txt, and the `if TYPE_CHECKING:` blocks
and `__all__` of the packages with lazy imports. The diff of a commit then shows
each change of the public API.
"""

import dataclasses
import importlib
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from tests.public import type_checking_blocks

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/public_symbols.txt"


def public_modules() -> dict[str, types.ModuleType]:
    """Returns the public modules by the name that user code imports."""
    package = importlib.import_module("tf_layoutmap")
    found = {"tlm": package}
    todo = [("tlm", package)]
    while todo:
        path, module = todo.pop(0)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                found[f"{path}.{name}"] = value
                todo.append((f"{path}.{name}", value))
    return found


def public_names() -> dict[str, Any]:
    """Returns the public functions, classes and values by path."""
    return {
        f"{path}.{name}": value
        for path, module in public_modules().items()
        for name in module.__all__
        if not isinstance(value := getattr(module, name), types.ModuleType)
    }


def signature(function: Any, *, bound: bool = False) -> str:
    """Returns the signature of a function without annotations.

    >>> def f(a, *, b: int = 2, c=len): pass
    >>> signature(f)
    '(a, *, b=2, c=<len>)'
    """
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[bound:]
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.default
            if parameter.default is parameter.empty
            else _Shown(parameter.default),
        )
        for parameter in parameters
    ]
    return str(
        found.replace(parameters=parameters, return_annotation=found.empty)
    )


class _Shown:
    """Default value of an argument, with the same text in every process."""

    def __init__(self, value: Any):
        text = repr(value)
        # The `repr` of functions and objects contains their address, so their
        # name or type is used instead.
        self._text = (
            text
            if " at 0x" not in text and "<" not in text
            else (f"<{getattr(value, '__name__', type(value).__name__)}>")
        )

    def __repr__(self) -> str:
        return self._text


def lines_of(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield f"module {path}"
    elif isinstance(value, type):
        yield from _lines_of_class(path, value)
    elif callable(value):
        yield f"def {path}{signature(value)}"
    else:
        yield f"value {path}: {type(value).__name__}"


def _lines_of_class(path: str, cls: type) -> Iterator[str]:
    # Inherited members of TensorFlow and Keras classes are not listed.
    ours = [
        base
        for base in cls.__mro__
        if base.__module__.split(".")[0] == "tf_layoutmap"
    ]
    made_by = next(
        (
            name
            for base in ours
            for name in ("__init__", "__new__")
            if name in vars(base)
        ),
        None,
    )
    arguments = made_by and signature(getattr(cls, made_by), bound=True)
    yield f"class {path}{arguments or ''}"
    members = {
        name
        for base in ours
        for name in vars(base)
        if not name.startswith("_") or name == "__call__"
    }
    if dataclasses.is_dataclass(cls):
        members |= {
            field.name
            for field in dataclasses.fields(cls)
            if not field.name.startswith("_")
        }
    for name in sorted(members):
        member = inspect.getattr_static(cls, name, None)
        if isinstance(member, classmethod | staticmethod):
            kind = type(member).__name__
            yield f"{kind} {path}.{name}{signature(getattr(cls, name))}"
        elif inspect.isroutine(member):
            yield f"def {path}.{name}{signature(member, bound=True)}"
        elif inspect.isdatadescriptor(member) or member is None:
            yield f"property {path}.{name}"
        else:
            yield f"value {path}.{name}: {type(member).__name__}"


def lines() -> list[str]:
    """Returns one line per public name, without the members of aliases."""
    found = []
    first = {}
    for path, module in public_modules().items():
        for name in sorted(module.__all__):
            value = getattr(module, name)
            full = f"{path}.{name}"
            # Plain values, such as strings, are not treated as aliases if they
            # are equal.
            if hasattr(value, "__module__"):
                if id(value) in first:
                    found.append(f"alias {full} = {first[id(value)]}")
                    continue
                first[id(value)] = full
            found += lines_of(full, value)
    return found


def main() -> None:
    changed = type_checking_blocks.write()
    for package in changed:
        print(f"Written: {type_checking_blocks.source_of(package)}", flush=True)
    if changed:
        # A new process is started, because this process has imported the
        # packages before the change.
        os.execv(sys.executable, [sys.executable, "-m", "tests.public.symbols"])
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    print(f"Written: {GOLDEN}")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
