"""What is known of a user's `tf.function` while it is traced.

That it is for a mesh is found out when it first reads a weight. That nothing of
it can be divided is found out at a loop that cannot be unrolled.
"""

import enum
from contextlib import AbstractContextManager

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.layout.mesh import trace_context
from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.mesh.thread_value import ThreadValue


class Stage(enum.Enum):
    """How a function is traced."""

    UNKNOWN = 1
    """As for one device: it may have nothing to do with a mesh."""
    ON_MESH = 2
    """For a mesh, with what DTensor gets wrong corrected."""
    WHOLE = 3
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
_now: ThreadValue[tuple[Stage | None, bool]] = ThreadValue((None, False))


def at(stage: Stage, is_strict: bool = False) -> AbstractContextManager[None]:
    """While open, functions that this thread traces are at this stage."""
    return _now.set_to((stage, is_strict))


def needs_mesh(mesh: Mesh, is_strict: bool) -> None:
    """Is called where a weight on a mesh is read.

    Raises:
      TraceAgain: The function is traced as for one device.
    """
    if _now.get()[0] is Stage.UNKNOWN and not (
        tf.executing_eagerly()
        or _tf_private.in_save_context()
        or trace_context.mesh_of_operation() is not None
    ):
        raise TraceAgain(mesh, is_strict)


def cannot_be_divided(mesh: Mesh, why: str) -> None:
    """Is called where a function has what DTensor cannot divide.

    Raises:
      TraceAgain: The function is a user's.
    """
    stage, is_strict = _now.get()
    if stage is Stage.ON_MESH:
        raise TraceAgain(mesh, is_strict, why)


def is_whole() -> bool:
    """Whether nothing of what is traced is divided."""
    return _now.get()[0] is Stage.WHOLE
