"""Atomic training steps: a step on a mesh writes all its variables or none.

Each device runs a step at its own speed and writes a variable as soon as the
new value is computed. If another device or op then fails, some variables are
already written, perhaps only on some devices. Therefore all writes wait for all
gradients on all devices: each written value depends on all gradients and on a
token. The token is a sum to which each device contributes a zero
(`with_dependency`).

Other state (metrics, batch statistics, seeds) is written in the forward pass.
In `fit`, these writes are collected during tracing, and they also wait for the
gradients (`full_step`).

DTensor drops control dependencies, so an operation waits only for its inputs.
To make a value wait, this module passes it through one `IdentityN` together
with the tensors for which it must wait, or subtracts the token from it.
"""

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
    """Returns the variable to which tokens of `mesh` are written.

    The write keeps TensorFlow from pruning the token.
    """
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
    """Returns a copy of `value` that waits for `token`.

    Args:
      token: Scalar that is always zero.
      value: A tensor. Strings are returned unchanged.
    """
    if value.dtype == tf.bool:
        return value | tf.cast(token, tf.bool)
    if value.dtype == tf.string:
        return value
    # A subtraction keeps a negative zero; an addition would change its sign.
    return value - tf.cast(token, value.dtype)


# Maximum number of operations that `is_waiting` visits. Keras' optimizers have
# fewer operations between a gradient and the written value. If an optimizer has
# more operations, the token is subtracted twice, which does not change the
# result.
_MAX_VISITED_OPS = 200


def is_waiting(value: Any, token: Any, written: set[int]) -> bool:
    """Returns whether `value` already depends on `token`.

    Args:
      value: A symbolic tensor.
      token: The token of the step.
      written: Ids of the handles of the variables that are written after the
        token.
    """
    seen, todo = {id(value.op)}, [value.op]
    while todo and len(seen) < _MAX_VISITED_OPS:
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
    """Returns copies of `tensors` and a token that wait for all devices.

    Args:
      tensors: Symbolic tensors of a function for `mesh`.
      mesh: `dtensor.Mesh`.

    Returns:
      Copies of `tensors`, followed by the token, a float32 scalar zero. Each
      copy is available when all of `tensors` are computed on all devices.
    """
    names = mesh.dim_names
    zeros = tf.zeros([mesh.dim_size(name) for name in names])
    # With this layout, each device holds one element of `zeros`.
    zeros = dtensor.relayout(zeros, dtensor.Layout(names, mesh))
    *tensors, zeros = tf.identity_n([*tensors, zeros])
    return tf.identity_n([*tensors, tf.reduce_sum(zeros)])


_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def may_wait_for(token: Any) -> bool:
    """Returns whether the current graph may capture `token`.

    Only the graph that contains the token, and the branches and loop bodies in
    this graph, may capture it. Another function could also be called outside of
    this graph, where the token does not exist.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not token.graph and type(graph).__name__ in _BRANCHES:
        graph = graph.outer_graph
    return graph is token.graph


def tensors_of_gradient(gradient: Any) -> list[Any]:
    """Returns the values, and the indices if any, of a gradient."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        # The dense shape is not included, because DTensor requires it to be a
        # constant.
        return [gradient.values, gradient.indices]
    return [tf.convert_to_tensor(gradient)]


def rebuilt_gradient(gradient: Any, parts: Iterator[Any]) -> Any:
    """Returns a copy of `gradient` in which `parts` replace the tensors."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = next(parts), next(parts)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return next(parts)


def wait_for(tensors: list[Any]) -> None:
    """Waits for eager tensors; raises the error if an op failed."""
    for tensor in tensors:
        if dtensor.is_dtensor(tensor):
            for part in dtensor.unpack(tensor):
                part.numpy()


# State of this thread. `step` is the step that is being traced. `applying` is
# the token for which writes wait. `written` contains the ids of the handles of
# the variables that are written after the token.
step_state = threading.local()


class AtomicStep:
    """The pending writes of a step that is being traced."""

    def __init__(self, mesh: Mesh, graph: Any):
        self.mesh = mesh
        self.graph = graph
        self.pending: dict[int, tuple[Any, Any]] = {}
        self.token: Any = None

    def release(self, tensors: list[Any]) -> list[Any]:
        """Traces the pending writes, which wait for their values and `tensors`.

        Args:
          tensors: Symbolic tensors.

        Returns:
          Copies of `tensors` that are available when the values and `tensors`
          are computed on all devices.
        """
        pending = list(self.pending.values())
        self.pending.clear()
        new = [value for _, value in pending]
        *passed, self.token = with_dependency([*new, *tensors], self.mesh)
        for (variable, _), value in zip(pending, passed):
            variable.write_now("assign", value)
        # The token is written to a variable, because TensorFlow prunes the
        # outputs of an IdentityN that no op uses.
        token_sink(self.mesh).assign(self.token)
        return passed[len(pending) :]

    def finish(self) -> None:
        """Traces the remaining writes, which wait for the gradients, if any."""
        if self.token is None:
            if self.pending:
                self.release([])
            return
        pending = list(self.pending.values())
        self.pending.clear()
        for variable, value in pending:
            variable.write_now("assign", after_token(self.token, value))

    def release_ungated(self, variable: Any) -> None:
        """Traces the pending write of a variable now, without delay."""
        pending = self.pending.pop(id(variable), None)
        if pending is not None:
            with self.graph.as_default():
                variable.write_now("assign", pending[1])


def traced_step() -> AtomicStep | None:
    """Returns the step that this thread is tracing, or None."""
    return getattr(step_state, "step", None)


@contextlib.contextmanager
def full_step(mesh: Mesh) -> Iterator[None]:
    """Delays writes in a step until the gradients or the step are complete.

    In eager mode this has no effect.

    Args:
      mesh: `dtensor.Mesh` of the step.
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
    """Delays all writes inside the context until all `gradients` are computed.

    Args:
      mesh: `dtensor.Mesh` of the variables. If None, writes are not delayed.
      gradients: Nested structure of tensors, `tf.IndexedSlices` or None.

    Yields:
      The gradients to apply, in the same structure.
    """
    if mesh is None or getattr(step_state, "applying", None) is not None:
        yield gradients
        return
    flat = tf.nest.flatten(gradients)
    dense = [
        part for gradient in flat for part in tensors_of_gradient(gradient)
    ]
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


# Attribute that is set on variables that an inner function reads or writes.
# Writes to these variables are not delayed.
_NEVER_DELAYED = "_written_in_inner_functions"


class AllOrNothingVariable(dtensor.DVariable):
    """A variable whose writes wait for the gradients of a step."""

    @property
    def handle(self) -> Any:
        """The resource handle; a pending write is traced first."""
        step = traced_step()
        if (
            step is not None
            and not tf.executing_eagerly()
            and (self._pending_value(step) is not None)
        ):
            step.release([])
        return super().handle

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        step = traced_step()
        if step is not None and not tf.executing_eagerly():
            pending = self._pending_value(step)
            # Trainable variables are read from the handle, because a gradient
            # tape watches the variable but not its pending value.
            if pending is not None and not self.trainable:
                return pending
        return super()._read_variable_op(no_copy)

    def _pending_value(self, step: AtomicStep) -> Any:
        """Returns the pending value of this variable; None if it has none."""
        if step.graph is tf.compat.v1.get_default_graph():
            return step.pending.get(id(self), (None, None))[1]
        # The current graph is a function or a branch inside the step. Later
        # calls of this function may not trace it again, so the reads and writes
        # of these calls are not known.
        setattr(self, _NEVER_DELAYED, True)
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
        """Calls the method `how` of `DVariable` without waiting."""
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
            self._pending_value(step)
            if step.graph is tf.compat.v1.get_default_graph() and (
                not hasattr(self, _NEVER_DELAYED)
            ):
                pending = dtensor.relayout(
                    tf.convert_to_tensor(new(), self.dtype), self.layout
                )
                step.pending[id(self)] = self, pending
                return pending if read_value else pending.op
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
