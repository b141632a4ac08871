"""For which mesh this thread traces, and what divides its batches."""

# DOC-MERGE: A value that every thread has of its own.
# DOC-MERGE: What is known of a user's `tf.function` while it is traced.
#
# That it is for a mesh is found out when it first reads a weight. That nothing of
# it can be divided is found out at a loop that cannot be unrolled.
#
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
from tf_layoutmap.layout.mesh.device_mesh import Mesh, is_registered, prepare_process

_T = TypeVar("_T")


class ThreadValue(Generic[_T]):
    """What a thread has set, and in all others what it was made with.

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
        """While open, `value` is that of this thread."""
        before = self.get()
        self._thread.value = value
        try:
            yield
        finally:
            self._thread.value = before


dtensor = tf.experimental.dtensor

# The mesh, and the axis that cuts batches.
_trace: ThreadValue[tuple[Mesh | None, str | None]] = ThreadValue((None, None))


@contextlib.contextmanager
def default_mesh(mesh: Mesh, batch_dim: str | None = None) -> Iterator[None]:
    """`dtensor.default_mesh(mesh)`, as layers of ours want it.

    It is reset after an error, where TensorFlow's stays set. And what is traced
    in it is known to be for DTensor, so that layers may pin layouts: use it
    around the step of a custom loop.

    ```python
    with tlm.layout.default_mesh(mesh):
        loss = step(x, y)
    ```

    Args:
      mesh: `dtensor.Mesh`.
      batch_dim: Mesh axis that cuts batches; None if none does.
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
        # Outside of the scope, where devices are asked for more of them.
        with errors.errors_once(mesh):
            raise error


def traced_for_mesh() -> bool:
    """Whether this thread is inside `default_mesh` of this module."""
    return mesh_of_trace() is not None


def mesh_of_trace() -> Mesh | None:
    """Returns the mesh of the innermost `default_mesh` here, or None."""
    return _trace.get()[0]


def mesh_of_operation() -> Mesh | None:
    """Returns the mesh that an operation is traced for now, or None.

    TensorFlow's own `default_mesh` counts, too, if the mesh was passed to this
    package. What `tf.data` traces runs on the host.
    """
    mesh = mesh_of_trace()
    # TensorFlow forgets to reset the mesh after an error, but not the device.
    if mesh is None and pinning.DEVICE in tf_private.current_device():
        mesh = dtensor.get_default_mesh()
        if mesh is not None and not is_registered(mesh):
            return None
    return None if mesh is not None and _of_a_dataset() else mesh


def batch_dim_of_trace() -> str | None:
    """Returns the mesh axis that cuts the batches of a step, or None."""
    return _trace.get()[1]


def with_replicated_batches() -> contextlib.AbstractContextManager[None]:
    """While open, no axis cuts the batches of what this thread traces."""
    return _trace.set_to((mesh_of_trace(), None))


def _of_a_dataset() -> bool:
    """Whether a function of `tf.data` is traced: it runs on the host."""
    # As `Dataset_map_parse`: what `Dataset.map(parse)` calls its function.
    return any(
        getattr(graph, "name", "").startswith("Dataset_")
        for graph in tf_private.graphs_around()
    )


class TraceStage(enum.Enum):
    """How a function is traced."""

    UNKNOWN = 1
    """As for one device: it may have nothing to do with a mesh."""
    ON_MESH = 2
    """For a mesh, with what DTensor gets wrong corrected."""
    REPLICATED = 3
    """For a mesh, with nothing divided, so that nothing needs correction."""


# Not an Exception: AutoGraph and Keras make others of these, with more words.
class TraceAgain(BaseException):
    """Ends a trace that has to be another one.

    Attributes:
      mesh: Which the function is for.
      is_strict: Whether a layout map refuses what cannot be divided.
      why: What cannot be divided; None if it is not known that anything.
    """

    def __init__(self, mesh: Mesh, is_strict: bool, why: str | None = None):
        super().__init__()
        self.mesh = mesh
        self.is_strict = is_strict
        self.why = why


# And whether a layout map refuses what cannot be divided.
_stage: ThreadValue[tuple[TraceStage | None, bool]] = ThreadValue((None, False))


def at_stage(
    stage: TraceStage, is_strict: bool = False
) -> AbstractContextManager[None]:
    """While open, functions that this thread traces are at this stage."""
    return _stage.set_to((stage, is_strict))


def require_mesh(mesh: Mesh, is_strict: bool) -> None:
    """Is called where a weight on a mesh is read.

    Raises:
      TraceAgain: The function is traced as for one device.
    """
    if _stage.get()[0] is TraceStage.UNKNOWN and not (
        tf.executing_eagerly()
        or tf_private.in_save_context()
        or mesh_of_operation() is not None
    ):
        raise TraceAgain(mesh, is_strict)


def require_replication(mesh: Mesh, why: str) -> None:
    """Is called where a function has what DTensor cannot divide.

    Raises:
      TraceAgain: The function is a user's.
    """
    stage, is_strict = _stage.get()
    if stage is TraceStage.ON_MESH:
        raise TraceAgain(mesh, is_strict, why)


def is_replicated() -> bool:
    """Whether nothing of what is traced is divided."""
    return _stage.get()[0] is TraceStage.REPLICATED
