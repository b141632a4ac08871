"""A row of the table of replaced names, and all rows in their order."""

import dataclasses

TENSORFLOW = "TensorFlow 2.21"
KERAS = "Keras 3.15"
TF_KERAS = "tf_keras 2.21"


@dataclasses.dataclass(frozen=True)
class Patch:
    """One name of TensorFlow, Keras or tf_keras that is replaced.

    Attributes:
      group: What it belongs to; a group is installed as a whole.
      owner: `"module"` or `"module:attribute"` of the module or class that has
        the name. Private ones are named by the module of ours that checks them.
      name: The attribute of `owner`.
      ours: `"module:function"` below `tf_layoutmap`, called as `ours(original,
        *args, **kwargs)`.
      why: What goes wrong without it.
      seen_in: The version that this was seen in.
      test: The file of tests that fails without it.
      make: `"module:function"` below `tf_layoutmap` that returns what takes the
        place, as `make(original, ours)`, where `ours` has its `original`; None
        for a plain call of `ours`.
      base: Owner and name of the function that `ours` is given for `original`
        where that has other arguments than the name itself.
      everywhere: Whether all modules of TensorFlow that hold the same function
        by this name get the replacement, too.
    """

    group: str
    owner: str
    name: str
    ours: str
    why: str
    seen_in: str
    test: str
    make: str | None = None
    base: tuple[str, str] | None = None
    everywhere: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """What tells the replaced name from others."""
        return self.owner, self.name
