"""The mesh for which the current thread traces, and the stage of the trace.

`default_mesh` sets the mesh and the axis that shards batches. A `TraceStage`
describes how a `tf.function` of user code is traced. The trace shows that the
function runs on a mesh when the function first reads a weight (`require_mesh`).
It shows that the function must be replicated when it reaches a loop that cannot
be unrolled (`require_replication`).
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import errors, graph_optimizer, pinning
from tf_layoutmap.layout.mesh.device_mesh import (
    Mesh,
    is_registered,
    prepare_process,
)

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


dtensor = tf.experimental.dtensor

# The mesh, and the mesh axis that shards batches.
_trace: ThreadValue[tuple[Mesh | None, str | None]] = ThreadValue((None, None))


@contextlib.contextmanager
def default_mesh(mesh: Mesh, batch_dim: str | None = None) -> Iterator[None]:
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
      mesh: `dtensor.Mesh`.
      batch_dim: Mesh axis that shards batches; None if they are replicated.
    """
    prepare_process(mesh)
    error = None
    errors.complete_groups(mesh)
    with (
        dtensor.default_mesh(mesh),
        graph_optimizer.switched_off(),
        _trace.set_to((mesh, batch_dim)),
    ):
        try:
            yield
        except BaseException as raised:
            error = raised
    if error is not None:
        # The error is raised outside of the scope, because `errors_once` runs
        # operations to read queued errors from the devices.
        with errors.errors_once(mesh):
            raise error


def traced_for_mesh() -> bool:
    """Returns whether this thread is inside `default_mesh` of this module."""
    return mesh_of_trace() is not None


def mesh_of_trace() -> Mesh | None:
    """Returns the mesh of the innermost `default_mesh`, or None."""
    return _trace.get()[0]


def mesh_of_operation() -> Mesh | None:
    """Returns the mesh for which an operation is created, or None.

    TensorFlow's own `default_mesh` is included if the mesh was passed to this
    package. Functions of `tf.data` run on the host, so the result is None.
    """
    mesh = mesh_of_trace()
    # After an error, TensorFlow resets the device but not the default mesh.
    if mesh is None and pinning.DEVICE in tf_private.current_device():
        mesh = dtensor.get_default_mesh()
        if mesh is not None and not is_registered(mesh):
            return None
    return None if mesh is not None and _is_in_dataset_function() else mesh


def batch_dim_of_trace() -> str | None:
    """Returns the mesh axis that shards the batches of a step, or None."""
    return _trace.get()[1]


def with_replicated_batches() -> contextlib.AbstractContextManager[None]:
    """Replicates the batches of functions traced inside the context."""
    return _trace.set_to((mesh_of_trace(), None))


def _is_in_dataset_function() -> bool:
    """Returns whether a function of `tf.data` is being traced."""
    # `Dataset.map(parse)` names its function `Dataset_map_parse`, for example.
    return any(
        getattr(graph, "name", "").startswith("Dataset_")
        for graph in tf_private.graphs_around()
    )


class TraceStage(enum.Enum):
    """The way in which a function is traced."""

    UNKNOWN = 1
    """Traced for one device; the function may not use a mesh."""
    ON_MESH = 2
    """Traced for a mesh, with the corrections of `layout.ops`."""
    REPLICATED = 3
    """Traced for a mesh with all tensors replicated, without corrections."""


# The base class is not Exception, because AutoGraph and Keras catch these and
# raise other exceptions with longer messages.
class TraceAgain(BaseException):
    """Ends a trace because the function must be traced in another way.

    Attributes:
      mesh: Mesh of the function.
      is_strict: Whether the layout map raises if an op cannot be sharded.
      why: Reason why the function must be replicated; None if it need not be.
    """

    def __init__(self, mesh: Mesh, is_strict: bool, why: str | None = None):
        super().__init__()
        self.mesh = mesh
        self.is_strict = is_strict
        self.why = why


# The stage, and whether the layout map raises if an op cannot be sharded.
_stage: ThreadValue[tuple[TraceStage | None, bool]] = ThreadValue((None, False))


def at_stage(
    stage: TraceStage, is_strict: bool = False
) -> AbstractContextManager[None]:
    """Sets the stage of functions that are traced inside the context."""
    return _stage.set_to((stage, is_strict))


def require_mesh(mesh: Mesh, is_strict: bool) -> None:
    """Ends the current trace if it is not for a mesh.

    Called when a weight on a mesh is read.

    Raises:
      TraceAgain: If the function is traced for one device.
    """
    if _stage.get()[0] is TraceStage.UNKNOWN and not (
        tf.executing_eagerly()
        or tf_private.in_save_context()
        or mesh_of_operation() is not None
    ):
        raise TraceAgain(mesh, is_strict)


def require_replication(mesh: Mesh, why: str) -> None:
    """Ends the current trace if the function can be replicated instead.

    Called when a function contains an op that DTensor cannot shard.

    Raises:
      TraceAgain: If the function is a `tf.function` of user code.
    """
    stage, is_strict = _stage.get()
    if stage is TraceStage.ON_MESH:
        raise TraceAgain(mesh, is_strict, why)


def is_replicated() -> bool:
    """Returns whether the function that is traced is fully replicated."""
    return _stage.get()[0] is TraceStage.REPLICATED
