"""What functions on a mesh replicate, and the traces of these functions.

A `Replication` belongs to one function, and is kept when the function is traced
again. It holds the operations whose inputs and results are gathered, with their
`Extent`, and whether the full function is replicated. A fully replicated
function gathers sharded variables when it reads them (`gathered_value`). A
`Trace` is one trace of the function, which `Replication.traced` sets for the
current thread.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import errors, tracing
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.mesh.variable import PaddedVariable
from tf_layoutmap.layout.ops.corrections import is_shape

dtensor = tf.experimental.dtensor

# Operations whose gradients are, or can be, `tf.IndexedSlices`.
_ROW_GRADIENTS = frozenset(("Gather", "GatherV2", "Identity", "IdentityN"))
# The shapes of results in an error of the compiler.
_SHAPES = re.compile(r"_global_shape = \[([^\]]*)\]")
# Operations that DTensor can compute with the layouts of their inputs. They
# fail only because later operations change the layout of the result.
_KEEPING_LAYOUTS = frozenset(
    ("Transpose", "Sum", "Mean", "Prod", "Max", "Min", "All", "Any")
    + ("Reshape", "BatchMatMulV2", "MatMul", "Einsum")
    + ("GatherV2",)
)


class Extent(enum.IntEnum):
    """The dimensions of inputs and results that are gathered."""

    NOTHING = 0
    """No dimensions. Later operations do not change the layout of the tensors,
    so nothing is replicated."""
    SAMPLES = 1
    """All dimensions except the first one, which keeps its sharding."""
    ALL = 2
    """All dimensions: the tensors are replicated."""


class Replication:
    """What one function on a mesh replicates, and why.

    Attributes:
      extents: Maps the name of an operation in the graph to its extent.
      is_named: Whether operations get an attribute with their name. The flag is
        set after the first error of the function.
      why_full: Reason why the full function is replicated, or None.
      gathered_bytes: Unsharded size of each variable that the fully replicated
        function gathers, in bytes, by `id`.
      keeps_layouts: Whether the results of the function keep their layouts; see
        `keep_layouts`.
    """

    def __init__(self):
        self.extents: dict[str, Extent] = {}
        self.is_named = False
        self.why_full: str | None = None
        self.gathered_bytes: dict[int, int] = {}
        self.keeps_layouts = False
        self._why: dict[str, str] = {}

    @contextlib.contextmanager
    def traced(self, mesh: Mesh) -> Iterator[None]:
        """Replicates in the functions that are traced in the context."""
        with (
            _current.set_to(Trace(self, mesh)),
            contextlib.nullcontext()
            if self.why_full is None
            else tracing.with_replicated_batches(),
        ):
            yield

    def replicate_fully(self, why: str) -> None:
        """Replicates the full function in the next trace."""
        self.why_full = why
        self.extents.clear()

    def why(self, name: str) -> str | None:
        """Returns why operation `name` is replicated; None if it is not."""
        return self._why.get(name)

    def extend(
        self, error: tf.errors.OpError, get_graph: Callable[[], Any]
    ) -> bool:
        """Marks the operation that is named in an error of the compiler.

        Args:
          error: Error of the first call of a function on a mesh.
          get_graph: Function that returns the graph of the function, or None.

        Returns:
          Whether the function should be traced again.
        """
        finding = errors.finding_of(str(error))
        if finding is None:
            return False
        operation = errors.stopped_at(str(error))
        graph = get_graph()
        if operation is None or graph is None:
            return False
        name = _name_in(str(error), operation, graph)
        is_first, self.is_named = not self.is_named, True
        if name is None and is_first:
            # In the next trace, operations have an attribute with their name,
            # so the next error contains the name.
            return True
        names = [
            op.name for op in graph.get_operations() if op.type == operation
        ]
        if name is not None:
            names = _same_scope_ops(name, names) or [name]
        keeping = [
            marked
            for marked, extent in self.extents.items()
            if extent == Extent.NOTHING
        ]
        if (
            operation == "RelayoutLike"
            and keeping
            and (name is None or tracing.LAYOUT_OF_PRODUCER in name)
        ):
            # DTensor did not find consistent layouts, so that the results of
            # marked operations cannot keep their layouts.
            self._mark(keeping, Extent.SAMPLES, finding)
            return True
        # If the error contains no name, DTensor itself created the operation,
        # as a replacement for an operation of the same type. Therefore, all
        # operations of this type are marked.
        extent = self._next_extent(operation, names)
        if all(self.extents.get(marked) == extent for marked in names):
            return False
        self._mark(names, extent, finding)
        return True

    def _mark(self, names: Sequence[str], extent: Extent, why: str) -> None:
        for name in names:
            self.extents[name] = extent
            if extent != Extent.NOTHING:
                self._why[name] = why

    def _next_extent(self, op_type: str, names: Sequence[str]) -> Extent:
        """Returns the extent for operations that failed with their extent."""
        before = [self.extents[name] for name in names if name in self.extents]
        if not before and op_type in _KEEPING_LAYOUTS:
            return Extent.NOTHING
        if not before or max(before) == Extent.NOTHING:
            return Extent.SAMPLES
        return Extent.ALL


class Trace:
    """One trace of a function.

    A result of a marked operation is pinned separately for each of its uses. A
    result cannot be pinned when its operation is created, because the gradient
    of the operation is recorded afterwards. Two uses must not share a pinned
    copy. A `tf.GradientTape` that did not record when the copy was created
    would lose the gradient. For example, `tf.stop_gradient` stops all tapes
    while it runs, and a tape can start to watch the result later.

    Attributes:
      replication: What the function replicates.
    """

    def __init__(self, replication: Replication, mesh: Mesh):
        self.replication = replication
        self._mesh = mesh
        # Maps the `id` of a result to the result and its extent. The reference
        # to the result ensures that the id stays unique.
        self._results: dict[int, tuple[Any, Extent]] = {}

    def extent_of(self, name: str) -> Extent | None:
        """Returns the extent of an operation, or None if it is not marked."""
        return self.replication.extents.get(name)

    def input(self, x: Any, op_type: str) -> Any:
        """Returns an input, pinned if a marked operation created it."""
        _, extent = self._results.get(id(x), (None, None))
        return x if extent is None else self.pinned(x, extent, op_type)

    def add_results(self, results: Sequence[Any], extent: Extent) -> None:
        """Records the results of a marked operation."""
        for x in results:
            self._results[id(x)] = x, extent

    def pinned(self, x: Any, extent: Extent, op_type: str) -> Any:
        """Returns an input of an operation, gathered to an extent."""
        # Positions and shapes are not pinned, because DTensor must evaluate
        # them, and cannot evaluate a constant after a relayout.
        if x.dtype in (tf.resource, tf.variant, tf.string) or is_shape(x):
            return x
        pin: Callable[[Any, Mesh | None], Any] = (
            tracing.pin_replicated
            if extent == Extent.ALL
            else tracing.pin_unsharded_samples
            if extent == Extent.SAMPLES
            else lambda x, _: tracing.with_layout_of_producer(x)
        )
        # Ops of the relayout must not be pinned themselves.
        with _current.set_to(None):
            return (
                tracing.pin_keeping_rows(pin, x, self._mesh)
                if op_type in _ROW_GRADIENTS
                else pin(x, self._mesh)
            )


_current: ThreadValue[Trace | None] = ThreadValue(None)


def current() -> Trace | None:
    """Returns the trace of the function that this thread traces, or None."""
    return _current.get()


def is_fully_replicated() -> bool:
    """Returns whether the function that is traced is fully replicated.

    See also `tracing.is_replicated`, which is true only for functions of user
    code, in which no operations are corrected.
    """
    trace = _current.get()
    return trace is not None and trace.replication.why_full is not None


def keep_layouts() -> None:
    """Returns results of the current function with the layouts they have.

    By default, a call outside of a mesh returns results that are readable
    without a mesh, which are replicated. A function that sets layouts itself
    calls this function while it is traced.
    """
    trace = _current.get()
    if trace is not None:
        trace.replication.keeps_layouts = True


def gathered_value(
    variable: Any, read: Callable[[], tf.Tensor] | None = None
) -> tf.Tensor:
    """Returns the value of a DVariable in a fully replicated function.

    Args:
      variable: `dtensor.DVariable`.
      read: Function that reads the sharded value; None uses
        `tf.convert_to_tensor`.

    Returns:
      The value, replicated on every device.
    """
    layout = variable.layout
    # A read of a padded variable already returns a replicated tensor.
    axes = (
        set()
        if isinstance(variable, PaddedVariable)
        else {*layout.sharding_specs} - {dtensor.UNSHARDED}
    )
    trace = _current.get()
    if axes and trace is not None:
        trace.replication.gathered_bytes[id(variable)] = (
            variable.dtype.size * variable.shape.num_elements()
        )
    # The relayout is created outside of loops and branches. In a loop or
    # branch, some relayouts crash DTensor's compiler and end the process.
    with tf_private.outermost_graph().as_default():
        value = tf.convert_to_tensor(variable) if read is None else read()
        return (
            gathered_along(axes, value, layout, shards_gradient=False)
            if axes
            else value
        )


def gathered_along(
    axes: set[str],
    tensor: tf.Tensor,
    layout: Layout,
    shards_gradient: bool = True,
) -> tf.Tensor:
    """Returns `tensor` gathered along the mesh axes `axes`.

    The gradient of a lookup stays `tf.IndexedSlices`. The gradient of DTensor's
    relayout would sum the gradients of repeated ids, but Keras' optimizers
    square the gradient of each occurrence of an id separately.

    Args:
      axes: Mesh axes along which to gather.
      tensor: Value of a variable.
      layout: Layout of the variable.
      shards_gradient: Whether DTensor may shard the computation of the
        gradient.
    """
    gathered = dtensor.Layout(
        [
            dtensor.UNSHARDED if axis in axes else axis
            for axis in layout.sharding_specs
        ],
        layout.mesh,
    )

    @tf.custom_gradient
    def relayout(value: tf.Tensor) -> Any:
        def gradient(dy: Any) -> Any:
            if isinstance(dy, tf.IndexedSlices):
                return dy
            if not shards_gradient:
                return dtensor.relayout(dtensor.relayout(dy, gathered), layout)
            # The gradient is first sharded along the other axes. Otherwise
            # DTensor may compute it unsharded.
            dy = dtensor.relayout(dy, gathered)
            # This op is also DTensor's own gradient of a relayout.
            return dtensor.relayout_like(dy, value)

        return dtensor.relayout(value, gathered), gradient

    return relayout(tensor)


def _name_in(error: str, operation: str, graph: Any) -> str | None:
    """Returns the name of the operation at which the compiler stopped."""
    named = errors.operation_named_in(error)
    if named is not None:
        return named
    shapes = _SHAPES.search(error)
    if shapes is None:
        return None
    fitting = [
        op.name
        for op in graph.get_operations()
        if op.type == operation and _shapes(op) == shapes.group(1)
    ]
    if not fitting or len(_same_scope_ops(fitting[0], fitting)) < len(fitting):
        return None
    return fitting[0]


def _shapes(op: Any) -> str:
    """Returns the shapes of results in the format of the compiler."""
    return ", ".join(
        "#tf_type.shape<"
        + "x".join("?" if size is None else str(size) for size in x.shape)
        + ">"
        if x.shape.rank is not None
        else "#tf_type.shape<*>"
        for x in op.outputs
    )


def _same_scope_ops(name: str, names: Sequence[str]) -> list[str]:
    """Returns the elements of `names` that differ from `name` only in digits.

    If only the digits of their names differ, operations usually belong to
    repeated layers. DTensor rejects the operation in each of these layers.
    """

    def without_numbers(text: str) -> str:
        return re.sub(r"_?\d+", "", text)

    expected = without_numbers(name)
    return [other for other in names if without_numbers(other) == expected]
