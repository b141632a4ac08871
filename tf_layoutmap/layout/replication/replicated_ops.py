"""Operations that are computed whole, where DTensor refuses to divide them.

DTensor has a rule for an operation, but refuses some layouts; which ones it
finds is known only when it compiles a function. So a step that was refused is
traced again with that operation marked: its inputs and its results are then
given a layout that leaves samples, or all of it, whole.
"""

# DOC-MERGE: Eager operations on a mesh that DTensor refuses to divide: run whole.
from __future__ import annotations

import enum
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import errors, pinning
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops.corrections import as_constant, is_shape

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


class ReplicationMarks:
    """The operations of one function that are computed whole.

    Attributes:
      extents: By name in the graph of the function.
      refused: Whether the function was refused before, so that its operations
        carry their names.
    """

    def __init__(self):
        self.extents: dict[str, Extent] = {}
        self.is_named = False

    def applied(self, mesh: Mesh) -> AbstractContextManager[None]:
        """While open, functions that this thread traces heed these marks."""
        return _trace.set_to(_Trace(self, mesh) if self.is_named else None)


class _Trace:
    """One trace of a function with marks.

    A result is pinned again for each of its uses. It cannot be pinned when its
    operation is created, because the gradient of the operation is recorded
    after that. And a copy that one use creates must not serve another one: it
    is unknown to each `tf.GradientTape` that did not record while it was
    created (`tf.stop_gradient` stops all of them, and a tape can start to
    watch the result later), which would lose the gradient.
    """

    def __init__(self, marks: ReplicationMarks, mesh: Mesh):
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
        pin = pinning.replicated if extent == Extent.ALL else pinning.unsharded_samples
        return (
            pinning.keeping_rows(pin, x, mesh) if keeps_rows else pin(x, mesh)
        )


def same_scope_ops(name: str, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that differ from `name` in numbers only.

    The layers of a stack have the same operations: what is refused in one of
    them is refused in all.
    """

    def shape(one: str) -> str:
        return re.sub(r"_?\d+", "", one)

    wanted = shape(name)
    return [one for one in names if shape(one) == wanted]


dtensor = tf.experimental.dtensor

_is_strict = ThreadValue(False)
# Of which this process has been told.
_told: set[str] = set()

# They say where a tensor is to be, so that whole inputs do not help.
_OF_DTENSOR = frozenset(
    ("Relayout", "RelayoutLike", "CopyToMesh", "CopyToMeshGrad")
)
# A variable or an iterator stays where its parts are.
_NEVER_GATHERED = frozenset((tf.resource, tf.variant))


def strict_eager_ops(is_strict: bool) -> AbstractContextManager[None]:
    """While open, this thread runs such operations only if not `is_strict`."""
    return _is_strict.set_to(is_strict)


def can_run_replicated(
    message: str, operation: str | bytes, inputs: Sequence[Any]
) -> bool:
    """Whether an operation that failed so can be run on whole inputs.

    Args:
      message: Of its error.
      operation: Its type.
      inputs: What it was given; other values than tensors do not count.

    Returns:
      False if DTensor did not refuse to divide it, if nothing is divided, or
      if an input cannot be gathered.
    """
    operation = tf.compat.as_str(operation)
    if (
        _is_strict.get()
        or operation in _OF_DTENSOR
        or tf_private.has_output_layout()
        or errors.finding_of(message) is None
        or tf_private.op_def_of(operation) is None
    ):
        return False
    divided = [
        x
        for x in inputs
        if pinning.on_mesh(x)
        and not dtensor.fetch_layout(x).is_fully_replicated()
    ]
    return bool(divided) and not any(
        x.dtype in _NEVER_GATHERED for x in divided
    )


def replicated_inputs(
    message: str, operation: str, inputs: Sequence[Any]
) -> list[Any] | None:
    """Returns the inputs of an operation, gathered on every device.

    Args:
      message: Of its error.
      operation: Its type.
      inputs: Eager tensors.

    Returns:
      None unless `may_run_whole`.
    """
    if not can_run_replicated(message, operation, inputs):
        return None
    whole = [pinning.replicated(x, None) for x in inputs]
    if operation not in _told:
        _told.add(operation)
        warnings.warn(
            f"DTensor cannot divide an eager {operation} operation "
            f"({errors.finding_of(message)}). Every device runs such "
            "operations on all of their inputs.",
            errors.LayoutMapWarning,
            stacklevel=4,
        )
    return whole
