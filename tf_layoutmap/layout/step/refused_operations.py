"""A step that DTensor refuses to divide is traced again, with more of it whole.

TensorFlow says at which operation it stopped; that one gets whole samples, and
if that is refused as well, whole inputs and results.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import error_messages
from tf_layoutmap.layout.tf_ops import computed_whole
from tf_layoutmap.layout.tf_ops.computed_whole import Extent, Marks

_NAME = re.compile(computed_whole.NAME_ATTRIBUTE + r' = "([^"]+)"')
_SHAPES = re.compile(r"_global_shape = \[([^\]]*)\]")


@dataclasses.dataclass(frozen=True)
class ComputedWhole:
    """An operation that every device computes whole.

    Attributes:
      operation: Its type, as `"GatherV2"`.
      layer: Name of the innermost layer it is in; None outside of layers.
      why: What DTensor says, or that it has no rule.
      bytes_per_device: Of its inputs and results where their sizes are known.
    """

    operation: str
    layer: str | None
    why: str
    bytes_per_device: int


class RefusedOperations:
    """What DTensor refused of one function of a model, and why."""

    def __init__(self):
        self.marks = Marks()
        self._why: dict[str, str] = {}

    def mark(self, error: tf.errors.OpError,
             graph: Callable[[], Any]) -> bool:
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
        if name is None:
            # The next error names it.
            again, self.marks.refused = not self.marks.refused, True
            return again
        self.marks.refused = True
        extents = self.marks.extents
        extent = (Extent.SAMPLES if name not in extents else Extent.ALL)
        if extents.get(name) == extent:
            return False
        names = [op.name for op in _all_operations(graph)
                 if op.type == operation]
        for alike in computed_whole.named_alike(name, names) or [name]:
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
        fitting = [op.name for op in _all_operations(graph)
                   if op.type == operation and _shapes(op) == shapes.group(1)]
        if not fitting or len(computed_whole.named_alike(
                fitting[0], fitting)) < len(fitting):
            return None
        return fitting[0]

    def report(self, graph: Any, model: Any,
               without_rule: Callable[[str], bool]) -> list[ComputedWhole]:
        """Returns what every device computes whole in the graph of a step.

        Args:
          graph: Of a step that was compiled.
          model: Whose layers are named.
          without_rule: Whether DTensor has no rule of its own for a type of
            operation, and computes it whole by ours.
        """
        found = []
        for op in _all_operations(graph):
            if op.name in self.marks.extents:
                why = self._why[op.name]
            elif without_rule(op.type):
                why = "DTensor has no rule for it"
            else:
                continue
            found.append(ComputedWhole(
                op.type, error_messages.layer_of(op.name, model), why,
                sum(map(_num_bytes, [*op.inputs, *op.outputs]))))
        return found


def _all_operations(graph: Any) -> Iterable[Any]:
    return graph.get_operations()


def _shapes(op: Any) -> str:
    """Returns the shapes of results as the compiler writes them."""
    return ", ".join(
        "#tf_type.shape<" + "x".join(
            "?" if size is None else str(size) for size in x.shape) + ">"
        if x.shape.rank is not None else "#tf_type.shape<*>"
        for x in op.outputs)


def _num_bytes(x: Any) -> int:
    if not x.shape.is_fully_defined():
        return 0
    try:
        size = x.dtype.size
    except TypeError:
        return 0
    return int(np.prod(x.shape, dtype=np.int64)) * (size or 0)
