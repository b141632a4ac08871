"""Old names of what was renamed, which work for one more version.

>>> class Match:
...     shadowed = ("d.*",)
...     losers = renamed_property("losers", "shadowed")
>>> with warnings.catch_warnings(record=True) as caught:
...     warnings.simplefilter("always")
...     print(Match().losers)
('d.*',)
>>> print(caught[0].message)
`Match.losers` is now `Match.shadowed`; the old name goes in version 0.2.
"""

import warnings
from collections.abc import Callable
from typing import Any

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
