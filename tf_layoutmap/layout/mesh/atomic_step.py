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

# DOC-MERGE: A variable on a mesh whose writes wait for the gradients of a step.
# DOC-MERGE: Dependencies between operations that DTensor's compiler keeps.
#
# DTensor drops control dependencies, so an operation waits for its inputs alone.
# A value that has to wait passes through one `IdentityN` with what it waits for,
# or has a token subtracted: a zero that is computed from what it waits for.
#
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh

dtensor = tf.experimental.dtensor

_sinks_lock = threading.Lock()


def token_sink(mesh: Mesh) -> Any:
    """Returns a variable that tokens of `mesh` are written to."""
    key = mesh.to_string()
    with _sinks_lock, tf.init_scope():
        sinks = tf_private.kept_with_device("sinks")
        if key not in sinks:
            sinks[key] = dtensor.DVariable(
                transfer.to_mesh(
                    np.zeros([], np.float32), dtensor.Layout.replicated(mesh, 0)
                ),
                trainable=False,
            )
        return sinks[key]


def after_token(token: Any, value: Any) -> Any:
    """Returns `value`, to the bit, once `token`, a zero, is there."""
    if value.dtype == tf.bool:
        return value | tf.cast(token, tf.bool)
    if value.dtype == tf.string:
        return value
    # Not a sum, which would make a zero of a negative zero.
    return value - tf.cast(token, value.dtype)


# None of Keras' optimizers has more operations between a gradient and what is
# written. Where there are more, the token is subtracted once more, in vain.
_FAR = 200


def is_waiting(value: Any, token: Any, written: set[int]) -> bool:
    """Whether `value` is computed from what waited already."""
    seen, todo = {id(value.op)}, [value.op]
    while todo and len(seen) < _FAR:
        op = todo.pop()
        if op is token.op:
            return True
        if op.type == "ReadVariableOp" and id(op.inputs[0]) in written:
            return True
        for tensor in op.inputs:
            if id(tensor.op) not in seen:
                seen.add(id(tensor.op))
                todo.append(tensor.op)
    return False


def with_dependency(tensors: list[Any], mesh: Mesh) -> list[Any]:
    """Returns `tensors`, and a zero, once all are there on all devices."""
    names = mesh.dim_names
    zeros = tf.zeros([mesh.dim_size(name) for name in names])
    # A part on each device.
    zeros = dtensor.relayout(zeros, dtensor.Layout(names, mesh))
    *tensors, zeros = tf.identity_n([*tensors, zeros])
    return tf.identity_n([*tensors, tf.reduce_sum(zeros)])


_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def may_wait_for(token: Any) -> bool:
    """Whether what is traced now belongs to the graph of `token`.

    Another function could be called again, outside of this one.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not token.graph and type(graph).__name__ in _BRANCHES:
        graph = graph.outer_graph
    return graph is token.graph


def tensors_of_gradient(gradient: Any) -> list[Any]:
    """Returns the tensors that a gradient is made of."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        # Its shape stays a constant, which DTensor must know.
        return [gradient.values, gradient.indices]
    return [tf.convert_to_tensor(gradient)]


def rebuilt_gradient(gradient: Any, parts: Iterator[Any]) -> Any:
    """Returns a gradient like this one, made of the next of `parts`."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = next(parts), next(parts)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return next(parts)


def wait_for(tensors: list[Any]) -> None:
    """Raises the error of whatever made these eager tensors."""
    for tensor in tensors:
        if dtensor.is_dtensor(tensor):
            for part in dtensor.unpack(tensor):
                part.numpy()


# Of this thread: `step` (traced now), `applying` (the token that writes wait
# for) and `written` (handles of variables whose writes waited).
step_state = threading.local()


class AtomicStep:
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
        *passed, self.token = with_dependency([*new, *tensors], self.mesh)
        for (variable, _), value in zip(kept, passed):
            variable.write_now("assign", value)
        # TensorFlow prunes outputs of an IdentityN that nobody uses.
        token_sink(self.mesh).assign(self.token)
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
            variable.write_now("assign", after_token(self.token, value))

    def release_ungated(self, variable: Any) -> None:
        """Writes one variable now: a function inside of this one needs it."""
        kept = self.kept.pop(id(variable), None)
        if kept is not None:
            with self.graph.as_default():
                variable.write_now("assign", kept[1])


def traced_step() -> AtomicStep | None:
    """Returns the step that this thread traces now, if any."""
    return getattr(step_state, "step", None)


@contextlib.contextmanager
def full_step(mesh: Mesh) -> Iterator[None]:
    """Keeps what is written until gradients are applied, or to the end.

    For a function that is being traced; eagerly nothing is kept.
    """
    if tf.executing_eagerly():
        yield
        return
    before = traced_step()
    step = step_state.step = AtomicStep(mesh, tf.compat.v1.get_default_graph())
    try:
        yield
        step.finish()
    finally:
        step_state.step = before


@contextlib.contextmanager
def applying(mesh: Mesh | None, gradients: Any) -> Iterator[Any]:
    """Gives `gradients`, with which all that is written here must wait.

    Args:
      mesh: `dtensor.Mesh` of the variables, or None to change nothing.
      gradients: Tensors, `tf.IndexedSlices` or None, nested.

    Yields:
      The same structure, to be applied.
    """
    if mesh is None or getattr(step_state, "applying", None) is not None:
        yield gradients
        return
    flat = tf.nest.flatten(gradients)
    dense = [part for gradient in flat for part in tensors_of_gradient(gradient)]
    step = traced_step()
    if tf.executing_eagerly():
        wait_for(dense)
        yield gradients
        return
    if step is None or step.graph is not tf.compat.v1.get_default_graph():
        step = AtomicStep(mesh, tf.compat.v1.get_default_graph())
    passed = iter(step.release(dense))
    flat = [rebuilt_gradient(gradient, passed) for gradient in flat]
    step_state.applying, step_state.written = step.token, set()
    try:
        yield tf.nest.pack_sequence_as(gradients, flat)
    finally:
        step_state.applying = None


_NEVER_KEPT = "_written_in_inner_functions"


class AllOrNothingVariable(dtensor.DVariable):
    """A variable whose writes wait for the gradients of a step."""

    @property
    def handle(self) -> Any:
        """TensorFlow's; asked for by all that reads or writes."""
        step = traced_step()
        if (
            step is not None
            and not tf.executing_eagerly()
            and (self._kept_here(step) is not None)
        ):
            step.release([])
        return super().handle

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        step = traced_step()
        if step is not None and not tf.executing_eagerly():
            kept = self._kept_here(step)
            # Tapes watch variables, not what will be written to them.
            if kept is not None and not self.trainable:
                return kept
        return super()._read_variable_op(no_copy)

    def _kept_here(self, step: AtomicStep) -> Any:
        """Returns what this variable will be, or None without it."""
        if step.graph is tf.compat.v1.get_default_graph():
            return step.kept.get(id(self), (None, None))[1]
        # A function in the step, or a branch. It may be called again without
        # being traced, and then what it reads and writes is not known.
        setattr(self, _NEVER_KEPT, True)
        step.release_ungated(self)
        return None

    def assign(
        self,
        value: Any,
        use_locking: Any = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._written("assign", lambda: value, value, name, read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: Any = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._written(
            "assign_add", lambda: self + delta, delta, name, read_value
        )

    def assign_sub(
        self,
        delta: Any,
        use_locking: Any = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._written(
            "assign_sub", lambda: self - delta, delta, name, read_value
        )

    def write_now(self, how: str, value: Any, **options: Any) -> Any:
        """Writes as a plain DVariable; `how` is the name of its method."""
        return getattr(super(), how)(value, **options)

    def _written(
        self, how: str, new: Any, value: Any, name: str | None, read_value: bool
    ) -> Any:
        options = {"name": name, "read_value": read_value}
        if tf.executing_eagerly():
            return self.write_now(how, value, **options)
        token = getattr(step_state, "applying", None)
        step = traced_step()
        if token is None and step is not None:
            self._kept_here(step)
            if step.graph is tf.compat.v1.get_default_graph() and (
                not hasattr(self, _NEVER_KEPT)
            ):
                kept = dtensor.relayout(
                    tf.convert_to_tensor(new(), self.dtype), self.layout
                )
                step.kept[id(self)] = self, kept
                return kept if read_value else kept.op
            token = step.token
        if token is not None and may_wait_for(token):
            value = tf.convert_to_tensor(value, self.dtype)
            written = getattr(step_state, "written", set())
            if not is_waiting(value, token, written):
                value = after_token(token, value)
            result = self.write_now(how, value, **options)
            if value.graph is token.graph:
                written.add(id(value.graph.capture(self.handle)))
            return result
        return self.write_now(how, value, **options)
