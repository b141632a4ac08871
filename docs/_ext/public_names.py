"""Sphinx directive that generates the API entry of a public name.

    .. public:: tf_layoutmap.NAME

The directive imports the package to find the object with this name, so pages
do not contain the path of the module that defines it. Members that TensorFlow
or Keras define are omitted.

Options:
  `:no-members:`: The entry omits the members of the class, because another
    entry documents them.
"""

import importlib
import inspect
from typing import Any

import docstring_markdown
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util import inspect as sphinx_inspect
from sphinx.util.docutils import SphinxDirective

PACKAGE = "tf_layoutmap"


def find(name: str) -> Any:
    """Returns the object with the given dotted public name."""
    value = importlib.import_module(PACKAGE)
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def own_members(cls: type) -> list[str]:
    """Returns the documented public members that this package defines."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith(PACKAGE):
            continue
        # The docstring of a data class, a NamedTuple or an ExtensionType
        # documents its fields.
        is_record = hasattr(base, "_fields") or hasattr(
            base, "_tf_extension_type_fields"
        )
        fields = {
            *getattr(base, "__dataclass_fields__", ()),
            *(vars(base).get("__annotations__", ()) if is_record else ()),
        }
        for name, member in vars(base).items():
            if name in fields:
                continue
            documented = inspect.getdoc(getattr(member, "fget", member))
            if not name.startswith("_") and documented:
                names.setdefault(name)
    return list(names)


def member_kind(cls: type, name: str) -> str:
    """Returns the autodoc directive for a member of a class."""
    static = inspect.getattr_static(cls, name)
    if isinstance(static, property):
        return "autoproperty"
    if inspect.isroutine(static):  # Includes class and static methods.
        return "automethod"
    return "autoattribute"


def entry(name: str, with_members: bool) -> list[str]:
    """Returns the lines of reStructuredText that document a name."""
    value = find(name)
    if inspect.ismodule(value):
        docstring = inspect.cleandoc(value.__doc__).split("\n")
        return [
            f".. py:module:: {name}",
            "",
            *docstring_markdown.to_rst(docstring),
        ]
    if inspect.isclass(value):
        lines = [f".. autoclass:: {name}"]
        for member in own_members(value) if with_members else []:
            kind = member_kind(value, member)
            lines += ["", f"   .. {kind}:: {name}.{member}"]
        return lines
    kind = "autofunction" if inspect.isroutine(value) else "autodata"
    return [f".. {kind}:: {name}"]


def named_arguments(cls: type) -> inspect.Signature | None:
    """Returns the signature of the first constructor with named arguments.

    Only classes of this package are searched, in the order of the base
    classes. A constructor with only `*args` and `**kwargs` is skipped.
    """
    for base in cls.__mro__:
        if "__init__" in vars(base) and base.__module__.startswith(PACKAGE):
            signature = sphinx_inspect.signature(
                base.__init__, bound_method=True
            )
            if any(
                parameter.kind
                not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                for parameter in signature.parameters.values()
            ):
                return signature
    return None


def show_arguments(
    app: Any,
    what: str,
    name: str,
    value: Any,
    options: Any,
    arguments: str | None,
    returned: str | None,
) -> Any:
    """Returns the signature to show for a class, or None for the default.

    By default, Sphinx shows `(*args, **kwargs)` if a class has Keras'
    `__new__` or a constructor that passes all arguments to another constructor.
    """
    if what == "class" and (arguments or "").startswith("(*args"):
        signature = named_arguments(value)
        if signature is not None:
            return sphinx_inspect.stringify_signature(
                signature, unqualified_typehints=True
            ), None
    return None


class Public(SphinxDirective):
    """The directive `public`, whose argument is a public name."""

    required_arguments = 1
    option_spec = {"no-members": directives.flag}

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        lines = entry(name, "no-members" not in self.options)
        parent = nodes.section()
        parent.document = self.state.document
        self.state.nested_parse(
            StringList(lines, name), self.content_offset, parent
        )
        return parent.children


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.connect("autodoc-process-signature", show_arguments)
    return {"parallel_read_safe": True}
