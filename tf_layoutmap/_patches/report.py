"""`tlm.patches()`, which lists the names that are currently replaced."""

import dataclasses

from tf_layoutmap._patches import engine


@dataclasses.dataclass(frozen=True)
class AppliedPatch:
    """A name of TensorFlow, Keras or tf_keras that is currently replaced.

    Attributes:
      name: Full name, such as `"keras.src.layers.layer.Layer.__call__"`.
      group: Group of the name; all names of a group are replaced together.
      replacement: Full name of the function of this package.
      why: Problem that occurs without the replacement.
      seen_in: Version in which the problem was observed.
    """

    name: str
    group: str
    replacement: str
    why: str
    seen_in: str


def patches() -> tuple[AppliedPatch, ...]:
    """Returns the names that tf_layoutmap has replaced in this process so far.

    Importing tf_layoutmap does not replace any name. The package replaces names
    when user code creates a scope, a mesh or a layer that requires the
    replacements. For all other objects, the replaced functions behave as
    before.

    ```python
    for patch in tlm.patches():
        print(patch.name, "-", patch.why)
    ```

    Returns:
      One `AppliedPatch` per replaced name, in a fixed order.
    """
    return tuple(
        AppliedPatch(
            name=engine.display_name(engine.owner_of(row), row.name),
            group=row.group,
            replacement=f"{row.ours.__module__}.{row.ours.__qualname__}",
            why=row.why,
            seen_in=row.seen_in,
        )
        for row in engine.installed_rows()
    )
