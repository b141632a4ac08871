"""Public names that are imported when they are first used.

So the pure modules work, and report their errors, without TensorFlow, and
`import tf_layoutmap` costs nothing. What needs a package that is not installed
says so, and how to install it. Type checkers run nothing: they read the block
next to each call, which `python -m tests.public.symbols` writes.
"""

# DOC-MERGE: Old names of what was renamed, which work for one more version.
#
# >>> class Match:
# ...     shadowed = ("d.*",)
# ...     losers = renamed_property("losers", "shadowed")
# >>> with warnings.catch_warnings(record=True) as caught:
# ...     warnings.simplefilter("always")
# ...     print(Match().losers)
# ('d.*',)
# >>> print(caught[0].message)
# `Match.losers` is now `Match.shadowed`; the old name goes in version 0.2.
#
import difflib
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

from tf_layoutmap._core import requirements


def exports(
    package: str, homes: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package.

    `dir()` names what `__all__` names, and nothing of what the package itself
    imports.

    Args:
      package: Its `__name__`.
      homes: Each public name and where it lives: `"module:attribute"`, or
        `"module"` for a module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            # Without `obj`, or Python would add a suggestion of its own.
            raise AttributeError(
                f"Module {package!r} has no attribute {name!r}. "
                + _advice(package, homes, name),
                name=name,
                obj=None,
            )
        module_name, _, attribute = homes[name].partition(":")
        try:
            value = importlib.import_module(module_name)
        except ImportError as error:
            refusal = requirements.refusal(f"{package}.{name}", error)
            if refusal is None:
                raise
            # Without the traceback of what Keras or this package imported
            # until then, which is long and says no more.
            raise refusal.with_traceback(None) from None
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, names


def _advice(package: str, homes: dict[str, str], name: str) -> str:
    """Returns the public name that is similar, or all if none is."""
    known = {_simplified(one): one for one in homes}
    if "." not in package and not name.startswith("_"):
        # `tlm.ShardedEmbedding` is `tlm.layers.ShardedEmbedding`. These modules
        # are cheap to import: they need neither TensorFlow nor Keras.
        for child, home in homes.items():
            if ":" not in home:
                for one in importlib.import_module(home).__all__:
                    known.setdefault(_simplified(one), f"{child}.{one}")
    found = difflib.get_close_matches(_simplified(name), known, n=1, cutoff=0.7)
    if found:
        return f"Did you mean '{package}.{known[found[0]]}'?"
    return f"Its public names are: {', '.join(sorted(homes))}."


def _simplified(name: str) -> str:
    return name.replace("_", "").lower()


_GOES_IN = "0.2"


def _warn(owner: Any, old: str, new: str) -> None:
    name = type(owner).__name__
    warnings.warn(
        f"`{name}.{old}` is now `{name}.{new}`; the old name goes in version "
        f"{_GOES_IN}.",
        DeprecationWarning,
        stacklevel=3,
    )


def renamed_property(old: str, new: str) -> property:
    """Returns a property `old` that warns and gives the attribute `new`."""

    def get(self: Any) -> Any:
        _warn(self, old, new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated: the old name of `{new}`.")


def renamed_method(old: str, new: str) -> Callable[..., Any]:
    """Returns a method `old` that warns and calls the method `new`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _warn(self, old, new)
        return getattr(self, new)(*args, **kwargs)

    call.__name__ = old
    call.__doc__ = f"Deprecated: the old name of `{new}`."
    return call
