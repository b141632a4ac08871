"""The mesh of the current trace, the stage of the trace, and pinned layouts.

`default_mesh` sets the mesh and the axis that shards batches. A `TraceStage`
describes how a `tf.function` of user code is traced. When the function first
reads a weight on a mesh, the trace ends, and the function is traced again for
this mesh (`require_mesh`). When the function reaches a loop that cannot be
unrolled, the trace ends, and the function is traced again with all tensors
replicated (`require_replication`).

Some ops fail or return another shape if a sample is sharded. Because DTensor
propagates layouts backwards from the consumers of a result, a sample can become
sharded although the inputs are not sharded. `pin_*` functions fix ("pin") the
layout of a tensor with a relayout.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.layout.mesh import device_mesh, errors
from tf_layoutmap.layout.mesh.device_mesh import (
    Mesh,
    is_registered,
    prepare_process,
)

dtensor = tf.experimental.dtensor

# Part of the name of DTensor's device. `dtensor.device_name()` returns the
# full name, but creates the device if it does not exist.
DEVICE = "CUSTOM"

# Attributes that Keras sets on tensors: the mask, and the logits of a softmax
# or sigmoid, which losses use instead of the tensor.
_KERAS_ATTRIBUTES = ("_keras_mask", "_keras_logits")


# Name scope of the ops of `with_layout_of_producer`.
LAYOUT_OF_PRODUCER = "layoutmap_layout_of_producer"


def pin_unsharded_samples(x: Any, mesh: Mesh | None) -> Any:
    """Returns `x` with unsharded dimensions, except the first dimension.

    The first dimension keeps its sharding.

    Args:
      x: A symbolic tensor of a function for `mesh`, or an eager tensor on a
        mesh. Other values are returned unchanged.
      mesh: `dtensor.Mesh` of a symbolic tensor. Ignored for eager tensors.
    """
    return _pinned(x, mesh, lambda _: dtensor.MATCH)


def pin_replicated(x: Any, mesh: Mesh | None) -> Any:
    """Returns `x` replicated; see `pin_unsharded_samples` for the arguments."""
    return _pinned(x, mesh, lambda _: dtensor.UNSHARDED)


def pin_sharded(x: Any, mesh: Mesh | None, axes: Sequence[str | None]) -> Any:
    """Returns `x` with the layout `axes`, and gives its gradient this layout.

    The layout of the first dimension is also set. If the first dimension kept
    its sharding, the layout could contain the same axis twice, which ends the
    process. TensorFlow's own gradient of a relayout has the previous layout of
    `x`, which DTensor cannot always infer.
    """
    if not can_be_pinned(x):
        return x
    specs = [dtensor.UNSHARDED if axis is None else axis for axis in axes]

    @tf.custom_gradient
    def pinned(x: Any) -> Any:
        return _relayout(x, specs, mesh), (
            lambda dy: _relayout(dy, specs, mesh)
        )

    return pinned(x)


def with_layout_of_producer(x: Any) -> Any:
    """Returns `x`; later operations cannot change the layout of the argument.

    Args:
      x: A symbolic tensor of a function for a mesh. A tensor for which
        `can_keep_layout` returns False is returned unchanged.
    """
    if not tf.is_symbolic_tensor(x) or not can_keep_layout(x):
        return x
    # See `layout.ops.relayouts`.
    with tf.name_scope(LAYOUT_OF_PRODUCER):
        return dtensor.relayout_like(x, x)


def can_keep_layout(x: Any) -> bool:
    """Returns whether `with_layout_of_producer` supports a tensor.

    The tensor must be numeric, and its shape must be static, because DTensor
    cannot shard a dimension of unknown size.
    """
    return has_known_size(x) and not x.dtype.is_bool


def has_known_size(x: Any) -> bool:
    """Returns whether `x` is a tensor of numbers or bools of static size.

    A scalar has no dimension that could be sharded, and returns False.
    """
    return (
        bool(x.shape.rank)
        and x.shape.is_fully_defined()
        and (
            x.dtype.is_floating
            or x.dtype.is_integer
            or x.dtype.is_complex
            or x.dtype.is_bool
        )
    )


def pin_keeping_rows(
    pin: Callable[[Any, Mesh | None], Any], x: Any, mesh: Mesh | None
) -> Any:
    """Returns `pin(x, mesh)`, whose gradient stays `tf.IndexedSlices`.

    DTensor's gradient of a relayout converts `tf.IndexedSlices` to a dense
    tensor, which sums the gradients of repeated ids. Keras' optimizers on
    TensorFlow apply the gradients of repeated ids one by one, so an optimizer
    that squares gradients would compute a different update.

    Args:
      pin: `pin_replicated` or `pin_unsharded_samples`.
      x: A tensor of any rank.
      mesh: `dtensor.Mesh` of a symbolic tensor.
    """
    if not can_be_pinned(x) or not x.shape.rank or not x.dtype.is_floating:
        return pin(x, mesh)

    @tf.custom_gradient
    def pinned(x: Any) -> Any:
        def gradient(dy: Any) -> Any:
            return (
                dy
                if isinstance(dy, tf.IndexedSlices)
                else (dtensor.relayout_like(dy, x))
            )

        return pin(x, mesh), gradient

    # The ops of the relayout are created in a separate name scope, so that the
    # names of other ops do not change.
    with tf.name_scope("layoutmap_keeping_rows"):
        return pinned(x)


def pin_like_a_batch(x: Any, mesh: Mesh | None, batch_dim: str | None) -> Any:
    """Returns `x` sharded along `batch_dim`, like the batches of `fit`."""
    return _pinned(
        x,
        mesh,
        lambda size: (
            batch_dim
            if batch_dim is not None
            and size is not None
            and mesh is not None
            and size % mesh.dim_size(batch_dim) == 0
            else dtensor.UNSHARDED
        ),
    )


def axis_of_samples(
    x: Any, mesh: Mesh, batch_dim: str | None, *other_axes: str | None
) -> str | None:
    """Returns the mesh axis that shards the samples of `x`, or None.

    Args:
      x: A tensor whose first dimension contains the samples. The sharding of an
        eager tensor on a mesh replaces `batch_dim`.
      mesh: `dtensor.Mesh` of `x`.
      batch_dim: Mesh axis that shards batches, or None.
      *other_axes: Mesh axes of other dimensions, which cannot shard the
        samples.
    """
    if tf.executing_eagerly() and on_mesh(x):
        spec = dtensor.fetch_layout(x).sharding_specs[0]
        batch_dim = None if spec == dtensor.UNSHARDED else spec
    if (
        batch_dim is None
        or batch_dim in other_axes
        or x.shape[0] % mesh.dim_size(batch_dim)
    ):
        return None
    return batch_dim


def pin_images(x: Any, mesh: Mesh, batch_dim: str | None) -> Any:
    """Returns `x` and its gradient sharded along `batch_dim`.

    See `pin_like_a_batch`. TensorFlow's own gradient of a relayout has the
    previous layout of `x`, which DTensor cannot always infer.
    """
    if not can_be_pinned(x) or not x.shape.rank:
        return x
    if not x.dtype.is_floating:
        return pin_like_a_batch(x, mesh, batch_dim)
    size = x.shape[0]
    is_sharded = (
        batch_dim is not None
        and size is not None
        and size % mesh.dim_size(batch_dim) == 0
    )
    pinned = pin_sharded(
        x,
        mesh,
        [batch_dim if is_sharded else None, *[None] * (x.shape.rank - 1)],
    )
    for name in _KERAS_ATTRIBUTES:
        attribute = getattr(x, name, None)
        if attribute is not None:
            setattr(pinned, name, pin_images(attribute, mesh, batch_dim))
    return pinned


def on_mesh(value: Any) -> bool:
    """Returns whether `value` is an eager tensor on a mesh."""
    # The device name is checked first because this check is fast, and every
    # eager slice calls this function.
    return (
        tf.is_tensor(value)
        and not tf.is_symbolic_tensor(value)
        and DEVICE in (getattr(value, "device", None) or "")
        and dtensor.is_dtensor(value)
    )


def on_registered_mesh(value: Any) -> bool:
    """Returns whether `value` is an eager tensor on a registered mesh."""
    return on_mesh(value) and is_registered(dtensor.fetch_layout(value).mesh)


def can_be_pinned(x: Any) -> bool:
    # During tracing, an eager tensor is a constant of the graph and cannot be
    # pinned. In `dtensor.call_with_layout`, every eager result gets the same
    # layout, so a relayout to a different layout fails.
    return tf.is_symbolic_tensor(x) or (
        tf.executing_eagerly()
        and on_mesh(x)
        and not tf_private.has_output_layout()
    )


def _pinned(
    x: Any, mesh: Mesh | None, first: Callable[[int | None], str]
) -> Any:
    if not can_be_pinned(x) or not x.shape.rank:
        return x
    pinned = _relayout(
        x, [first(x.shape[0]), *[dtensor.UNSHARDED] * (x.shape.rank - 1)], mesh
    )
    for name in _KERAS_ATTRIBUTES:
        attribute = getattr(x, name, None)
        if attribute is not None and pinned is not x:
            setattr(pinned, name, _pinned(attribute, mesh, first))
    return pinned


def _relayout(x: Any, axes: Sequence[str], mesh: Mesh | None) -> Any:
    if not tf.is_symbolic_tensor(x):
        current = dtensor.fetch_layout(x)
        mesh, axes = (
            current.mesh,
            [
                spec if axis == dtensor.MATCH else axis
                for spec, axis in zip(current.sharding_specs, axes)
            ],
        )
        if axes == current.sharding_specs:
            return x
    return dtensor.relayout(x, dtensor.Layout(axes, mesh))


_T = TypeVar("_T")


class ThreadValue(Generic[_T]):
    """A thread-local value with a default.

    >>> level = ThreadValue(0)
    >>> with level.set_to(2):
    ...     level.get()
    2
    >>> level.get()
    0
    """

    def __init__(self, default: _T):
        self._default = default
        self._thread = threading.local()

    def get(self) -> _T:
        """Returns the value of this thread."""
        return getattr(self._thread, "value", self._default)

    @contextlib.contextmanager
    def set_to(self, value: _T) -> Generator[None]:
        """Sets the value of this thread to `value` inside the context."""
        before = self.get()
        self._thread.value = value
        try:
            yield
        finally:
            self._thread.value = before


# The mesh, and the mesh axis that shards batches.
_trace: ThreadValue[tuple[Mesh | None, str | None]] = ThreadValue((None, None))


@contextlib.contextmanager
def default_mesh(
    mesh: device_mesh.AnyMesh, batch_dim: str | None = None
) -> Iterator[None]:
    """Sets the default mesh of DTensor and traces functions for this mesh.

    Use this context manager around the step of a custom training loop. Unlike
    TensorFlow's `dtensor.default_mesh`, the default mesh is reset after an
    error, and layers of this package can fix the layouts of functions that are
    traced inside the context.

    ```python
    with tlm.layout.default_mesh(mesh):
        loss = step(x, y)
    ```

    Args:
      mesh: `tlm.distribution.DeviceMesh`, `keras.distribution.DeviceMesh` or
        `dtensor.Mesh`.
      batch_dim: Mesh axis that shards batches; None if they are replicated.

    Raises:
      TypeError: If `mesh` has another type.
    """
    mesh = device_mesh.to_dtensor_mesh(mesh)
    prepare_process(mesh)
    error = None
    errors.complete_groups(mesh)
    with (
        dtensor.default_mesh(mesh),
        device_mesh.grappler_disabled(),
        ops.hide_info_logs(),
        _trace.set_to((mesh, batch_dim)),
    ):
        try:
            yield
        except BaseException as raised:
            error = raised
    if error is not None:
        # `errors_once` encloses the scope, because `errors_once` runs
        # operations that read queued errors from the devices.
        with errors.errors_once(mesh):
            raise error


@contextlib.contextmanager
def off_mesh() -> Iterator[None]:
    """Runs and traces operations on single devices inside `default_mesh`."""
    with tf.device("CPU:0"), _trace.set_to((None, None)):
        yield


def traced_for_mesh() -> bool:
    """Returns whether this thread is inside `default_mesh` of this module."""
    return mesh_of_trace() is not None


def mesh_of_trace() -> Mesh | None:
    """Returns the mesh of the innermost `default_mesh`, or None."""
    return _trace.get()[0]


def mesh_of_operation() -> Mesh | None:
    """Returns the mesh on which a new operation runs, or None.

    The mesh of TensorFlow's own `default_mesh` is also returned if it was
    passed to this package. Functions of `tf.data` run on the host, so the
    result is None.
    """
    mesh = mesh_of_trace()
    # If an error occurs, TensorFlow's `default_mesh` resets the device, but
    # does not reset the default mesh.
    if mesh is None and DEVICE in tf_private.current_device():
        mesh = dtensor.get_default_mesh()
        if mesh is not None and not is_registered(mesh):
            return None
    return None if mesh is not None and is_in_dataset_function() else mesh


def batch_dim_of_trace() -> str | None:
    """Returns the mesh axis that shards the batches of a step, or None."""
    return _trace.get()[1]


def with_replicated_batches() -> contextlib.AbstractContextManager[None]:
    """Replicates the batches of functions that are traced in the context."""
    return _trace.set_to((mesh_of_trace(), None))


def is_in_dataset_function() -> bool:
    """Returns whether a function of `tf.data` is being traced."""
    # `Dataset.map(parse)` names its function `Dataset_map_parse`, for example.
    return any(
        getattr(graph, "name", "").startswith("Dataset_")
        for graph in tf_private.graphs_around()
    )


class TraceStage(enum.Enum):
    """Specifies how a function is traced."""

    UNKNOWN = 1
    """Traced for one device; the function may not use a mesh."""
    ON_MESH = 2
    """Traced for a mesh, with the corrections of `layout.ops`."""
    NOT_SPLIT = 4
    """Traced under `default_mesh`; not yet split at its loops."""
    REPLICATED = 3
    """Traced for a mesh with all tensors replicated, without corrections."""


# The base class is not Exception, because AutoGraph and Keras catch exceptions
# of this class and raise different exceptions with longer messages.
class TraceAgain(BaseException):
    """Ends a trace because the function must be traced differently.

    Attributes:
      mesh: Mesh of the function.
      is_strict: Whether the layout map raises an error if an op cannot be
        sharded.
      why: Reason why the function must be replicated; None if it must be
        traced again for another reason.
      context: Context of the weight that was read, or None.
    """

    def __init__(
        self,
        mesh: Mesh,
        is_strict: bool,
        why: str | None = None,
        context: Any = None,
    ):
        super().__init__()
        self.context = context
        self.mesh = mesh
        self.is_strict = is_strict
        self.why = why


# The stage of the trace, and whether the layout map raises an error if an op
# cannot be sharded.
_stage: ThreadValue[tuple[TraceStage | None, bool]] = ThreadValue((None, False))


def at_stage(
    stage: TraceStage, is_strict: bool = False
) -> AbstractContextManager[None]:
    """Sets the stage of functions that are traced inside the context."""
    return _stage.set_to((stage, is_strict))


def require_mesh(mesh: Mesh, is_strict: bool, context: Any = None) -> None:
    """Ends the current trace if it is not for a mesh.

    Called when a weight on a mesh is read, and by `distribute_tensor`.

    Args:
      mesh: Mesh of the weight or of the layout.
      is_strict: Whether the layout map of the weight is strict.
      context: `MeshContext` of the weight, or None.

    Raises:
      TraceAgain: If the function is traced for one device.
    """
    if _stage.get()[0] is TraceStage.UNKNOWN and not (
        tf.executing_eagerly()
        or tf_private.in_save_context()
        or mesh_of_operation() is not None
    ):
        raise TraceAgain(mesh, is_strict, context=context)


def require_replication(mesh: Mesh, why: str) -> None:
    """Ends the current trace if the function can be replicated instead.

    Called when a function contains an op that DTensor cannot shard.

    Raises:
      TraceAgain: If the function is a `tf.function` of user code.
    """
    stage, is_strict = _stage.get()
    if stage is TraceStage.ON_MESH:
        raise TraceAgain(mesh, is_strict, why)


def require_split(mesh: Mesh) -> None:
    """Ends the current trace if the function can be split at its loops.

    Called when a function contains a loop with an unknown number of steps.

    Raises:
      TraceAgain: If the function was called under `default_mesh`, and has not
        been split.
    """
    stage, is_strict = _stage.get()
    if stage is TraceStage.NOT_SPLIT:
        raise TraceAgain(mesh, is_strict)


def is_replicated() -> bool:
    """Returns whether the function that is traced is fully replicated."""
    return _stage.get()[0] is TraceStage.REPLICATED
