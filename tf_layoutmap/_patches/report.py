"""`tlm.patches()`: what this process has changed in other packages."""

import dataclasses

from tf_layoutmap._patches import engine


@dataclasses.dataclass(frozen=True)
class AppliedPatch:
    """A name of TensorFlow, Keras or tf_keras that is replaced now.

    Attributes:
      name: Its full name, as `"keras.src.layers.layer.Layer.__call__"`.
      group: What it belongs to: a group is replaced as a whole.
      replacement: The function of ours.
      why: What goes wrong without it.
      seen_in: The version that this was seen in.
    """

    name: str
    group: str
    replacement: str
    why: str
    seen_in: str


def patches() -> tuple[AppliedPatch, ...]:
    """Returns what tf_layoutmap has replaced in this process, until now.

    Nothing is replaced by importing it. Names are replaced when a scope, a
    mesh or a layer that needs them is made, and do what they did before for
    everything else.

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
