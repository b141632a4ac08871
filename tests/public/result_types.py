"""Finds the classes of this package whose objects public calls return.

A user receives an object of such a class without naming the class, so the list
of public names and the API reference must contain the class.
"""

import ast
import functools
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

PACKAGE = "tf_layoutmap"
# The aliases of this module describe arguments.
ARGUMENT_TYPES = f"{PACKAGE}._core.types"


class Union:
    """A union whose members may be aliases, which `|` does not accept.

    A subscript of an alias, such as `Nested[Layout]`, is a union of the alias
    and of its arguments.
    """

    def __init__(self, *members: Any):
        self.members = members

    def __or__(self, other: Any) -> "Union":
        return Union(self, other)

    __ror__ = __getitem__ = __or__

    def __call__(self) -> None:
        """Exists because `typing` requires callable type arguments."""


def is_own(cls: type) -> bool:
    """Whether a module of this package defines a class."""
    return cls.__module__.split(".")[0] == PACKAGE


@functools.cache
def aliases() -> dict[int, tuple[str, str]]:
    """Returns `(module, text)` of each alias `X: TypeAlias = "..."`, by id."""
    return {
        id(value): (path, value)
        for path, module in list(sys.modules.items())
        if path.split(".")[0] == PACKAGE
        for name, kind in vars(module).get("__annotations__", {}).items()
        if kind in ("TypeAlias", typing.TypeAlias)
        and isinstance(value := getattr(module, name), str)
    }


@functools.cache
def names_of(module: str) -> dict[str, Any]:
    """Returns the names that the annotations of a module can use.

    Names that a module imports only for type checkers are imported here, which
    `typing.get_type_hints` does not do.
    """
    names = dict(vars(sys.modules[module]))
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(
            node.test
        ):
            imports = ast.Module(node.body, [])
            exec(compile(imports, module, "exec"), names)
    for name, value in names.items():
        if isinstance(value, str) and id(value) in aliases():
            source, text = aliases()[id(value)]
            names[name] = (
                Union()
                if source == ARGUMENT_TYPES
                else Union(typing.ForwardRef(text, module=source))
            )
    return names


def classes_in(annotation: Any, module: str) -> Iterator[type]:
    """Yields the classes of this package in an annotation of `module`."""
    if isinstance(annotation, typing.ForwardRef):
        module = annotation.__forward_module__ or module
        annotation = annotation.__forward_arg__
    value = (
        eval(annotation, names_of(module))
        if isinstance(annotation, str)
        else annotation
    )
    if isinstance(value, Union):
        inner = value.members
    elif isinstance(value, list | tuple):
        inner = tuple(value)
    elif typing.get_origin(value) is typing.Literal:
        inner = ()
    elif typing.get_args(value):
        inner = (typing.get_origin(value), *typing.get_args(value))
    else:
        inner = ()
        # An object of a protocol has another class, and an object of a
        # `TypedDict` is a dict.
        if (
            isinstance(value, type)
            and is_own(value)
            and not getattr(value, "_is_protocol", False)
            and not typing.is_typeddict(value)
        ):
            yield value
    for one in inner:
        if isinstance(one, str | typing.ForwardRef) or one is not value:
            yield from classes_in(one, module)


def returned_by(function: Any) -> Iterator[type]:
    """Yields the classes in the return annotation of a function."""
    function = inspect.unwrap(function)
    result = getattr(function, "__annotations__", {}).get("return")
    if result is not None:
        yield from classes_in(result, function.__module__)


def returned_by_members(cls: type) -> Iterator[tuple[str, type]]:
    """Yields the classes of results of methods, properties and attributes."""
    for base in filter(is_own, cls.__mro__):
        for name, member in vars(base).items():
            if name.startswith("_") and name != "__call__":
                continue
            function = (
                getattr(member, "fget", None)
                or getattr(member, "func", None)
                or getattr(member, "__func__", member)
            )
            if inspect.isfunction(function):
                for one in returned_by(function):
                    yield name, one
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if not name.startswith("_"):
                for one in classes_in(annotation, base.__module__):
                    yield name, one


def reachable(public: Mapping[str, Any]) -> dict[type, str]:
    """Returns the classes whose objects public names return.

    Args:
      public: Public functions and classes by path.

    Returns:
      A path such as `tlm.LayoutMap.explain` for each class, also for the public
      classes themselves.
    """
    paths: dict[type, str] = {}
    todo: list[tuple[str, type]] = []
    for path, value in public.items():
        if isinstance(value, type):
            todo.append((path, value))
        elif inspect.isfunction(value):
            todo += [(path, cls) for cls in returned_by(value)]
    while todo:
        path, cls = todo.pop(0)
        if cls not in paths and is_own(cls):
            paths[cls] = path
            todo += [
                (f"{path}.{name}", one)
                for name, one in returned_by_members(cls)
            ]
    return paths
