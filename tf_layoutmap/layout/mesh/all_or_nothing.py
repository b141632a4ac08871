"""A training step on a mesh writes all of its variables, or none of them.

Each device runs a step at its own pace, and writes a variable as soon as what
it writes is there: some are written when another part of the step fails, on
some devices and not on others. So nothing is written before all gradients are
there on all devices. Operations wait for their inputs alone (DTensor drops
other dependencies), so what is written passes through one `IdentityN` with all
gradients and with a token, the sum of a zero from each device. What needs no
gradient (decay of weights, counters) has the token subtracted.

Other state (metrics, statistics of batches, seeds) is written in the forward
pass. Inside of `fit`, what would be written is kept while the step is traced,
and goes the same way.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import transfer

dtensor = tf.experimental.dtensor

_state = threading.local()

_NEVER_KEPT = "_written_in_inner_functions"


class _Step:
    """What a step that is being traced would write so far."""

    def __init__(self, mesh: Any, graph: Any):
        self.mesh = mesh
        self.graph = graph
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.token: Any = None

    def release(self, tensors: list[Any]) -> list[Any]:
        """Writes what was kept once `tensors` and that are there, too."""
        kept = list(self.kept.values())
        self.kept.clear()
        new = [value for _, value in kept]
        *passed, self.token = _passed([*new, *tensors], self.mesh)
        for (variable, _), value in zip(kept, passed):
            variable._write("assign", value)
        # TensorFlow takes an IdentityN apart of which it needs a part only.
        _sink_of(self.mesh).assign(self.token)
        return passed[len(kept):]

    def finish(self) -> None:
        """Writes what is left, with what gradients let pass if any were."""
        if self.token is None:
            if self.kept:
                self.release([])
            return
        kept = list(self.kept.values())
        self.kept.clear()
        for variable, value in kept:
            variable._write("assign", _after(self.token, value))

    def release_ungated(self, variable: Any) -> None:
        """Writes one variable now: a function inside of this one needs it."""
        kept = self.kept.pop(id(variable), None)
        if kept is not None:
            with self.graph.as_default():
                variable._write("assign", kept[1])


_sinks: dict[str, Any] = {}
_sinks_lock = threading.Lock()


def _sink_of(mesh: Any) -> Any:
    """Returns a variable that tokens of `mesh` are written to."""
    key = mesh.to_string()
    with _sinks_lock, tf.init_scope():
        if key not in _sinks:
            _sinks[key] = dtensor.DVariable(transfer.to_mesh(
                np.zeros([], np.float32),
                dtensor.Layout.replicated(mesh, 0)), trainable=False)
        return _sinks[key]


def _after(token: Any, value: Any) -> Any:
    """Returns `value`, to the bit, once `token`, a zero, is there."""
    if value.dtype == tf.bool:
        return value | tf.cast(token, tf.bool)
    if value.dtype == tf.string:
        return value
    # Not a sum, which would make a zero of a negative zero.
    return value - tf.cast(token, value.dtype)


# More operations are between a gradient and what is written in none of Keras'
# optimizers. Where they are, the token is subtracted once too often.
_FAR = 200


def _waits(value: Any, token: Any, written: set[int]) -> bool:
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


def _passed(tensors: list[Any], mesh: Any) -> list[Any]:
    """Returns `tensors`, and a zero, once all are there on all devices."""
    names = mesh.dim_names
    zeros = tf.zeros([mesh.dim_size(name) for name in names])
    # A part on each device.
    zeros = dtensor.relayout(zeros, dtensor.Layout(names, mesh))
    *tensors, zeros = tf.identity_n([*tensors, zeros])
    return tf.identity_n([*tensors, tf.reduce_sum(zeros)])


_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def _may_wait_for(token: Any) -> bool:
    """Whether what is traced now belongs to the graph of `token`.

    Another function could be called again, outside of this one.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not token.graph and type(graph).__name__ in _BRANCHES:
        graph = graph.outer_graph
    return graph is token.graph


def _step() -> _Step | None:
    return getattr(_state, "step", None)


@contextlib.contextmanager
def whole_step(mesh: Any) -> Iterator[None]:
    """Keeps what is written until gradients are applied, or to the end.

    For a function that is being traced; eagerly nothing is kept.
    """
    if tf.executing_eagerly():
        yield
        return
    before = _step()
    step = _state.step = _Step(mesh, tf.compat.v1.get_default_graph())
    try:
        yield
        step.finish()
    finally:
        _state.step = before


@contextlib.contextmanager
def applying(mesh: Any, gradients: Any) -> Iterator[Any]:
    """Gives `gradients`, with which all that is written here must wait.

    Args:
      mesh: `dtensor.Mesh` of the variables, or None to change nothing.
      gradients: Tensors, `tf.IndexedSlices` or None, nested.

    Yields:
      The same structure, to be applied.
    """
    if mesh is None or getattr(_state, "applying", None) is not None:
        yield gradients
        return
    flat = tf.nest.flatten(gradients)
    dense = [part for gradient in flat for part in _parts(gradient)]
    step = _step()
    if tf.executing_eagerly():
        _wait_for(dense)
        yield gradients
        return
    if step is None or step.graph is not tf.compat.v1.get_default_graph():
        step = _Step(mesh, tf.compat.v1.get_default_graph())
    passed = iter(step.release(dense))
    flat = [_with_parts(gradient, passed) for gradient in flat]
    _state.applying, _state.written = step.token, set()
    try:
        yield tf.nest.pack_sequence_as(gradients, flat)
    finally:
        _state.applying = None


def _parts(gradient: Any) -> list[Any]:
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        # Its shape stays a constant, which DTensor must know.
        return [gradient.values, gradient.indices]
    return [tf.convert_to_tensor(gradient)]


def _with_parts(gradient: Any, parts: Iterator[Any]) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = next(parts), next(parts)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return next(parts)


def _wait_for(tensors: list[Any]) -> None:
    """Raises the error of whatever made these eager tensors."""
    for tensor in tensors:
        if dtensor.is_dtensor(tensor):
            for part in dtensor.unpack(tensor):
                part.numpy()


class AllOrNothingVariable(dtensor.DVariable):
    """A variable whose writes wait for the gradients of a step."""

    @property
    def handle(self) -> Any:
        """TensorFlow's; asked for by all that reads or writes."""
        step = _step()
        if step is not None and not tf.executing_eagerly() and (
                self._kept_here(step) is not None):
            step.release([])
        return super().handle

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        step = _step()
        if step is not None and not tf.executing_eagerly():
            kept = self._kept_here(step)
            # Tapes watch variables, not what will be written to them.
            if kept is not None and not self.trainable:
                return kept
        return super()._read_variable_op(no_copy)

    def _kept_here(self, step: _Step) -> Any:
        """Returns what this variable will be, or None without it."""
        if step.graph is tf.compat.v1.get_default_graph():
            return step.kept.get(id(self), (None, None))[1]
        # A function in the step, or a branch. It may be called again, when
        # nothing tells us what it reads and writes.
        setattr(self, _NEVER_KEPT, True)
        step.release_ungated(self)
        return None

    def assign(self, value: Any, use_locking: Any = None,
               name: str | None = None, read_value: bool = True) -> Any:
        return self._written(
            "assign", lambda: value, value, name, read_value)

    def assign_add(self, delta: Any, use_locking: Any = None,
                   name: str | None = None, read_value: bool = True) -> Any:
        return self._written(
            "assign_add", lambda: self + delta, delta, name, read_value)

    def assign_sub(self, delta: Any, use_locking: Any = None,
                   name: str | None = None, read_value: bool = True) -> Any:
        return self._written(
            "assign_sub", lambda: self - delta, delta, name, read_value)

    def _write(self, how: str, value: Any, **options: Any) -> Any:
        return getattr(super(), how)(value, **options)

    def _written(self, how: str, new: Any, value: Any, name: str | None,
                 read_value: bool) -> Any:
        options = {"name": name, "read_value": read_value}
        if tf.executing_eagerly():
            return self._write(how, value, **options)
        token, step = getattr(_state, "applying", None), _step()
        if token is None and step is not None:
            self._kept_here(step)
            if step.graph is tf.compat.v1.get_default_graph() and (
                    not hasattr(self, _NEVER_KEPT)):
                kept = dtensor.relayout(
                    tf.convert_to_tensor(new(), self.dtype), self.layout)
                step.kept[id(self)] = self, kept
                return kept if read_value else kept.op
            token = step.token
        if token is not None and _may_wait_for(token):
            value = tf.convert_to_tensor(value, self.dtype)
            written = getattr(_state, "written", set())
            if not _waits(value, token, written):
                value = _after(token, value)
            result = self._write(how, value, **options)
            if value.graph is token.graph:
                written.add(id(value.graph.capture(self.handle)))
            return result
        return self._write(how, value, **options)
