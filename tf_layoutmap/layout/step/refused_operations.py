"""A step that DTensor refuses to divide is traced again, with more of it whole.

TensorFlow says at which operation it stopped; that one gets whole samples, and
if that is refused as well, whole inputs and results.
"""

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import error_messages
from tf_layoutmap.layout.tf_ops import computed_whole
from tf_layoutmap.layout.tf_ops.computed_whole import Extent, Marks

_NAME = re.compile(computed_whole.NAME_ATTRIBUTE + r' = "([^"]+)"')
_SHAPES = re.compile(r"_global_shape = \[([^\]]*)\]")


class RefusedOperations:
    """What DTensor refused of one function of a model, and why."""

    def __init__(self):
        self.marks = Marks()
        self._why: dict[str, str] = {}

    def mark(self, error: tf.errors.OpError, graph: Callable[[], Any]) -> bool:
        """Marks the operation that `error` stopped at.

        Args:
          error: Of the first call of a function on a mesh.
          graph: Gives its graph, or None.

        Returns:
          Whether the function should be traced again.
        """
        finding = error_messages.finding_of(str(error))
        if finding is None:
            return False
        operation = error_messages.stopped_at(str(error))
        graph = graph()
        if operation is None or graph is None:
            return False
        name = self._name(str(error), operation, graph)
        is_first, self.marks.refused = not self.marks.refused, True
        if name is None and is_first:
            # The next error names it.
            return True
        names = [
            op.name for op in graph.get_operations() if op.type == operation
        ]
        if name is not None:
            names = computed_whole.named_alike(name, names) or [name]
        # Otherwise DTensor stopped at an operation that it created itself,
        # which has the type of the original and no name: all of that type.
        extents = self.marks.extents
        extent = (
            Extent.ALL
            if any(one in extents for one in names)
            else Extent.SAMPLES
        )
        if all(extents.get(one) == extent for one in names):
            return False
        for alike in names:
            extents[alike] = extent
            self._why[alike] = finding
        return True

    def _name(self, error: str, operation: str, graph: Any) -> str | None:
        named = _NAME.search(error)
        if named is not None:
            return named.group(1)
        shapes = _SHAPES.search(error)
        if shapes is None:
            return None
        fitting = [
            op.name
            for op in graph.get_operations()
            if op.type == operation and _shapes(op) == shapes.group(1)
        ]
        if not fitting or len(
            computed_whole.named_alike(fitting[0], fitting)
        ) < len(fitting):
            return None
        return fitting[0]

    def why(self, name: str) -> str | None:
        """Returns what DTensor said of operation `name`; None if nothing."""
        return self._why.get(name)


def _shapes(op: Any) -> str:
    """Returns the shapes of results as the compiler writes them."""
    return ", ".join(
        "#tf_type.shape<"
        + "x".join("?" if size is None else str(size) for size in x.shape)
        + ">"
        if x.shape.rank is not None
        else "#tf_type.shape<*>"
        for x in op.outputs
    )
