"""`Patch`, an entry of the table of replaced names."""

import dataclasses
from collections.abc import Callable
from typing import Any

TENSORFLOW = "TensorFlow 2.21"
KERAS = "Keras 3.15"
TF_KERAS = "tf_keras 2.21"

# A function that is called as `ours(original, *args, **kwargs)`.
Replacement = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Patch:
    """One name of TensorFlow, Keras or tf_keras that is replaced.

    Attributes:
      group: Group of the patch. All patches of a group are installed together.
      owner: Module or class whose attribute is replaced, as `"module"` or
        `"module:attribute"`. If the owner is private, `module` is the module of
        this package that imports it.
      name: Attribute of `owner` that is replaced.
      ours: Function that is called as `ours(original, *args, **kwargs)`.
      why: Problem that occurs without the replacement.
      seen_in: Version in which the problem was observed.
      test: Test file that fails without the replacement.
      make: Function that is called as `make(original, ours)` and returns the
        replacement. The first argument of `ours` is already bound to `original`
        in this call. If `make` is None, the replacement only calls `ours`.
      base: Owner and name of the function that is passed to `ours` as
        `original`. None passes the replaced function. `base` is set if `ours`
        does not support the arguments of the replaced function.
      everywhere: Whether the name is also replaced in all other modules of
        TensorFlow that hold the same function under this name.
      is_missing: Whether the owner does not have the name. The entry then adds
        the name, and `original` raises `AttributeError`.
    """

    group: str
    owner: str
    name: str
    ours: Replacement
    why: str
    seen_in: str
    test: str
    make: Replacement | None = None
    base: tuple[str, str] | None = None
    everywhere: bool = False
    is_missing: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Owner and name, which together identify the replaced function."""
        return self.owner, self.name


def unwrapped(original: Any, replacement: Callable[..., Any]) -> Any:
    """Returns `replacement` without a wrapper, as the argument `make`.

    A wrapper would take time in each eager op.
    """
    del original
    return replacement
