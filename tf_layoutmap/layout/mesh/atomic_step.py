"""Atomic training steps: a step on a mesh writes all its variables or none.

Each device runs a step at its own speed and writes a variable as soon as the
new value is computed. If another part of the step failed, some variables would
already have been written, and only on some devices. Therefore all writes wait
for all gradients on all devices: each written value depends on all gradients
and on a token, the sum of one zero per device (`with_dependency`).

Other state (metrics, batch statistics, seeds) is written in the forward pass.
In `fit`, these writes are collected during tracing and wait for the gradients,
too (`full_step`).

DTensor drops control dependencies, so an operation waits only for its inputs.
A value that has to wait passes through one `IdentityN` together with the
tensors for which it waits, or has the token subtracted.
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
    """Returns a tensor bitwise equal to `value` that waits for `token`.

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
# fewer operations between a gradient and the written value. With more of them,
# the token is subtracted twice, which does not change the result.
_MAX_VISITED_OPS = 200


def is_waiting(value: Any, token: Any, written: set[int]) -> bool:
    """Returns whether `value` already depends on `token`.

    Args:
      value: A symbolic tensor.
      token: The token of the step.
      written: Ids of the handles of variables whose writes waited for the
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
    """Returns `tensors` and a token that wait for `tensors` on all devices.

    Args:
      tensors: Symbolic tensors of a function for `mesh`.
      mesh: `dtensor.Mesh`.

    Returns:
      The same tensors, followed by the token, a float32 scalar zero.
    """
    names = mesh.dim_names
    zeros = tf.zeros([mesh.dim_size(name) for name in names])
    # Each device holds one zero.
    zeros = dtensor.relayout(zeros, dtensor.Layout(names, mesh))
    *tensors, zeros = tf.identity_n([*tensors, zeros])
    return tf.identity_n([*tensors, tf.reduce_sum(zeros)])


_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def may_wait_for(token: Any) -> bool:
    """Returns whether the current graph may capture `token`.

    This is the graph of the token, or a branch or loop body in it. Another
    function could be called again outside of this graph.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not token.graph and type(graph).__name__ in _BRANCHES:
        graph = graph.outer_graph
    return graph is token.graph


def tensors_of_gradient(gradient: Any) -> list[Any]:
    """Returns the tensors of a gradient."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        # The dense shape must stay a constant for DTensor.
        return [gradient.values, gradient.indices]
    return [tf.convert_to_tensor(gradient)]


def rebuilt_gradient(gradient: Any, parts: Iterator[Any]) -> Any:
    """Returns a gradient like `gradient` with tensors from `parts`."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = next(parts), next(parts)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return next(parts)


def wait_for(tensors: list[Any]) -> None:
    """Waits until eager tensors are computed; raises the error if one fails."""
    for tensor in tensors:
        if dtensor.is_dtensor(tensor):
            for part in dtensor.unpack(tensor):
                part.numpy()


# State of this thread: `step` is the step that is being traced, `applying` the
# token for which writes wait, and `written` the ids of the handles of variables
# whose writes waited.
step_state = threading.local()


class AtomicStep:
    """The pending writes of a step that is being traced."""

    def __init__(self, mesh: Mesh, graph: Any):
        self.mesh = mesh
        self.graph = graph
        self.pending: dict[int, tuple[Any, Any]] = {}
        self.token: Any = None

    def release(self, tensors: list[Any]) -> list[Any]:
        """Adds the pending writes; they wait for all values and `tensors`.

        Args:
          tensors: Symbolic tensors.

        Returns:
          The same tensors, after all of them are computed on all devices.
        """
        pending = list(self.pending.values())
        self.pending.clear()
        new = [value for _, value in pending]
        *passed, self.token = with_dependency([*new, *tensors], self.mesh)
        for (variable, _), value in zip(pending, passed):
            variable.write_now("assign", value)
        # TensorFlow prunes unused outputs of an IdentityN.
        token_sink(self.mesh).assign(self.token)
        return passed[len(pending) :]

    def finish(self) -> None:
        """Adds the remaining writes, which wait for the gradients, if any."""
        if self.token is None:
            if self.pending:
                self.release([])
            return
        pending = list(self.pending.values())
        self.pending.clear()
        for variable, value in pending:
            variable.write_now("assign", after_token(self.token, value))

    def release_ungated(self, variable: Any) -> None:
        """Adds the write of one variable now, for an inner function."""
        pending = self.pending.pop(id(variable), None)
        if pending is not None:
            with self.graph.as_default():
                variable.write_now("assign", pending[1])


def traced_step() -> AtomicStep | None:
    """Returns the step that this thread is tracing, or None."""
    return getattr(step_state, "step", None)


@contextlib.contextmanager
def full_step(mesh: Mesh) -> Iterator[None]:
    """Delays writes until gradients are applied, or until the end of the step.

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


# Attribute of variables whose writes are not delayed, because an inner function
# reads or writes them.
_NEVER_DELAYED = "_written_in_inner_functions"


class AllOrNothingVariable(dtensor.DVariable):
    """A variable whose writes wait for the gradients of a step."""

    @property
    def handle(self) -> Any:
        """The resource handle. Using it first adds the pending write."""
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
            # A tape watches the variable, not its pending value.
            if pending is not None and not self.trainable:
                return pending
        return super()._read_variable_op(no_copy)

    def _pending_value(self, step: AtomicStep) -> Any:
        """Returns the pending value of this variable, or None."""
        if step.graph is tf.compat.v1.get_default_graph():
            return step.pending.get(id(self), (None, None))[1]
        # This is a function or a branch inside the step. It may be called again
        # without a trace, and then its reads and writes are not known.
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
