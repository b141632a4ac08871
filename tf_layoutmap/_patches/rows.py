"""A row of the table of replaced names of TensorFlow, Keras and tf_keras."""

import dataclasses
from collections.abc import Callable
from typing import Any

TENSORFLOW = "TensorFlow 2.21"
KERAS = "Keras 3.15"
TF_KERAS = "tf_keras 2.21"

# Called as `ours(original, *args, **kwargs)`.
Replacement = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Patch:
    """One name of TensorFlow, Keras or tf_keras that is replaced.

    Attributes:
      group: Group of the row; all rows of a group are installed together.
      owner: `"module"` or `"module:attribute"` of the module or class that has
        the name. Private ones are named by the module of ours that checks them.
      name: The attribute of `owner`.
      ours: Function that is called as `ours(original, *args, **kwargs)`.
      why: What goes wrong without it.
      seen_in: The version that this was seen in.
      test: The file of tests that fails without it.
      make: Function that returns the replacement, as `make(original, ours)`,
        where `ours` already has its `original`; None for a plain call of
        `ours`.
      base: Owner and name of the function that `ours` is given for `original`
        where that has other arguments than the name itself.
      everywhere: Whether all modules of TensorFlow that hold the same function
        by this name get the replacement, too.
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

    @property
    def key(self) -> tuple[str, str]:
        """Owner and name, which identify the replaced name."""
        return self.owner, self.name
