"""A training step on a mesh writes all of its variables, or none of them.

Each device runs a step at its own pace, and writes a variable as soon as what
it writes is there: some are written when another part of the step fails, on
some devices and not on others. So nothing is written before all gradients are
there on all devices: what is written depends on all gradients and on a token,
the sum of a zero from each device (see `dependencies.py`).

Other state (metrics, statistics of batches, seeds) is written in the forward
pass. Inside of `fit`, what would be written is kept while the step is traced,
and goes the same way.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh.layouts import Mesh
from tf_layoutmap.layout.variables import dependencies

# Of this thread: `step` (traced now), `applying` (the token that writes wait
# for) and `written` (handles of variables whose writes waited).
state = threading.local()


class Step:
    """What a step that is being traced would write so far."""

    def __init__(self, mesh: Mesh, graph: Any):
        self.mesh = mesh
        self.graph = graph
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.token: Any = None

    def release(self, tensors: list[Any]) -> list[Any]:
        """Writes what was kept, once that and `tensors` are computed."""
        kept = list(self.kept.values())
        self.kept.clear()
        new = [value for _, value in kept]
        *passed, self.token = dependencies.passed([*new, *tensors], self.mesh)
        for (variable, _), value in zip(kept, passed):
            variable.write_now("assign", value)
        # TensorFlow prunes outputs of an IdentityN that nobody uses.
        dependencies.sink_of(self.mesh).assign(self.token)
        return passed[len(kept) :]

    def finish(self) -> None:
        """Writes what is left, after the gradients if there were any."""
        if self.token is None:
            if self.kept:
                self.release([])
            return
        kept = list(self.kept.values())
        self.kept.clear()
        for variable, value in kept:
            variable.write_now("assign", dependencies.after(self.token, value))

    def release_ungated(self, variable: Any) -> None:
        """Writes one variable now: a function inside of this one needs it."""
        kept = self.kept.pop(id(variable), None)
        if kept is not None:
            with self.graph.as_default():
                variable.write_now("assign", kept[1])


def traced_step() -> Step | None:
    """Returns the step that this thread traces now, if any."""
    return getattr(state, "step", None)


@contextlib.contextmanager
def whole_step(mesh: Mesh) -> Iterator[None]:
    """Keeps what is written until gradients are applied, or to the end.

    For a function that is being traced; eagerly nothing is kept.
    """
    if tf.executing_eagerly():
        yield
        return
    before = traced_step()
    step = state.step = Step(mesh, tf.compat.v1.get_default_graph())
    try:
        yield
        step.finish()
    finally:
        state.step = before


@contextlib.contextmanager
def applying(mesh: Mesh | None, gradients: Any) -> Iterator[Any]:
    """Gives `gradients`, with which all that is written here must wait.

    Args:
      mesh: `dtensor.Mesh` of the variables, or None to change nothing.
      gradients: Tensors, `tf.IndexedSlices` or None, nested.

    Yields:
      The same structure, to be applied.
    """
    if mesh is None or getattr(state, "applying", None) is not None:
        yield gradients
        return
    flat = tf.nest.flatten(gradients)
    dense = [
        part for gradient in flat for part in dependencies.parts_of(gradient)
    ]
    step = traced_step()
    if tf.executing_eagerly():
        dependencies.wait_for(dense)
        yield gradients
        return
    if step is None or step.graph is not tf.compat.v1.get_default_graph():
        step = Step(mesh, tf.compat.v1.get_default_graph())
    passed = iter(step.release(dense))
    flat = [dependencies.with_parts(gradient, passed) for gradient in flat]
    state.applying, state.written = step.token, set()
    try:
        yield tf.nest.pack_sequence_as(gradients, flat)
    finally:
        state.applying = None
