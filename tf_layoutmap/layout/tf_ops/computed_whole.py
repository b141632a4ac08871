"""Operations that are computed whole, where DTensor refuses to divide them.

DTensor has a rule for an operation, but refuses some layouts; which ones it
finds is known only when it compiles a function. So a step that was refused is
traced again with that operation marked: its inputs and its results are then
given a layout that leaves samples, or all of it, whole.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import pinning
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.mesh.thread_value import ThreadValue
from tf_layoutmap.layout.tf_ops.known_values import as_constant, is_shape

# The attribute that carries an operation's name into the compiler's errors.
NAME_ATTRIBUTE = "_layoutmap_name"
# Operations without inputs that a layout could be asked of.
_NEVER = frozenset(("Placeholder", "NoOp", "Const"))
# Operations whose gradients are, or can be, `tf.IndexedSlices`.
_ROW_GRADIENTS = frozenset(("Gather", "GatherV2", "Identity", "IdentityN"))

_trace: ThreadValue[_Trace | None] = ThreadValue(None)


class Extent(enum.IntEnum):
    """How much of its inputs and results an operation gets whole."""

    SAMPLES = 1
    """All but the first dimension, which stays as it is."""
    ALL = 2


class Marks:
    """The operations of one function that are computed whole.

    Attributes:
      extents: By name in the graph of the function.
      refused: Whether the function was refused before, so that its operations
        carry their names.
    """

    def __init__(self):
        self.extents: dict[str, Extent] = {}
        self.refused = False

    def applied(self, mesh: Mesh) -> AbstractContextManager[None]:
        """While open, functions that this thread traces heed these marks."""
        return _trace.set_to(_Trace(self, mesh) if self.refused else None)


class _Trace:
    """One trace of a function with marks.

    A result is pinned again for each of its uses. It cannot be pinned when its
    operation is created, because the gradient of the operation is recorded
    after that. And a copy that one use creates must not serve another one: it
    is unknown to each `tf.GradientTape` that did not record while it was
    created (`tf.stop_gradient` stops all of them, and a tape can start to
    watch the result later), which would lose the gradient.
    """

    def __init__(self, marks: Marks, mesh: Mesh):
        self.marks = marks
        self.mesh = mesh
        # By the identity of a result, which the value keeps alive.
        self.results: dict[int, tuple[Any, Extent]] = {}

    def result(self, x: Any, keeps_rows: bool) -> Any:
        """Returns an input, pinned if it is the result of a marked one."""
        _, extent = self.results.get(id(x), (None, None))
        return (
            x if extent is None else _pinned(x, extent, self.mesh, keeps_rows)
        )


def create(
    original: Callable[..., Any],
    graph: Any,
    op_type: str,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes an operation of a graph; pins inputs and results of marked ones.

    Args:
      original: `FuncGraph._create_op_internal`.
      graph: The graph that the operation is for.
      op_type: As in TensorFlow's registry.
      inputs: Its inputs.
      *args: `dtypes, input_types, name, attrs, op_def, compute_device`.
      **kwargs: The same by name.
    """
    trace = _trace.get()
    if trace is None or op_type in _NEVER:
        return original(graph, op_type, inputs, *args, **kwargs)
    given = (
        dict(
            zip(
                (
                    "dtypes",
                    "input_types",
                    "name",
                    "attrs",
                    "op_def",
                    "compute_device",
                ),
                args,
            )
        )
        | kwargs
    )
    name = given.get("name") or op_type
    name = (
        name[:-1]
        if name.endswith("/")
        else graph.unique_name(name, mark_as_used=False)
    )
    extent = trace.marks.extents.get(name)
    keeps_rows = op_type in _ROW_GRADIENTS
    inputs = [as_constant(trace.result(x, keeps_rows)) for x in inputs]
    if extent is not None:
        inputs = [_pinned(x, extent, trace.mesh, keeps_rows) for x in inputs]
    given["attrs"] = {
        **(given.get("attrs") or {}),
        NAME_ATTRIBUTE: tf.compat.v1.AttrValue(s=name.encode()),
    }
    made = original(graph, op_type, inputs, **given)
    if extent is not None:
        for x in made.outputs:
            trace.results[id(x)] = x, extent
    return made


def _pinned(x: Any, extent: Extent, mesh: Mesh, keeps_rows: bool) -> Any:
    # DTensor folds what says positions and shapes, and must still know it.
    if x.dtype in (tf.resource, tf.variant, tf.string) or is_shape(x):
        return x
    # What is relaid must not be relaid for it again.
    with _trace.set_to(None):
        pin = pinning.whole if extent == Extent.ALL else pinning.whole_samples
        return (
            pinning.keeping_rows(pin, x, mesh) if keeps_rows else pin(x, mesh)
        )


def named_alike(name: str, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that differ from `name` in numbers only.

    The layers of a stack have the same operations: what is refused in one of
    them is refused in all.
    """

    def shape(one: str) -> str:
        return re.sub(r"_?\d+", "", one)

    wanted = shape(name)
    return [one for one in names if shape(one) == wanted]
