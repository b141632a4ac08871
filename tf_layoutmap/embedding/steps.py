"""Checks the gradients of a step and asks for its learning rates."""

# DOC-MERGE: Steps between `enqueue` and `apply_gradients`, as parts of a function.
#
# For engines whose steps are tensors of the function being traced: nothing else
# knows of them.
#
# DOC-MERGE: Which steps of a traced function are forward-only without saying so.
#
# A program for a TPU may leave `training` at its default in a function that
# only evaluates: the TPU's compiler sees that no gradients are sent, and looks
# up only. The same is seen here, while the function is traced: a step that is
# enqueued and dequeued in it under one `name`, and never applied, is
# forward-only.
#
from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.spec import config


def read_gradient(
    feature: config.FeatureSpec,
    gradient: Any,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Returns the gradient of one feature as a tensor.

    Args:
      feature: Whose activations it is the gradient of.
      gradient: A float32 tensor, or the `tf.IndexedSlices` that a gather in
        the model gives.
      shape: Static shape of the activations.

    Raises:
      ValueError: If it is no tensor, or of another type or shape.
    """
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
    if not tf.is_tensor(gradient) or not isinstance(gradient, tf.Tensor):
        raise ValueError(
            f"Found {type(gradient)} at path {feature.name!r} of "
            "`gradients`; a gradient must be a tf.Tensor or None."
        )
    if gradient.dtype != tf.float32:
        raise ValueError(
            f"Found gradient of type {gradient.dtype.name} at path "
            f"{feature.name!r}; it must be float32, as the activations."
        )
    if not shape.is_compatible_with(gradient.shape):
        raise ValueError(
            f"Found gradient of shape {gradient.shape} at path "
            f"{feature.name!r}. Expected shape {shape}."
        )
    return gradient


def zero_gradient(feature: config.FeatureSpec, shape: Sequence[Any]):
    """Returns zeros in place of a missing gradient, and says so."""
    logging.warning(
        "No gradient passed for feature %s, sending zero gradient. Its rows "
        "still count as looked up, which moves them under an optimizer with "
        "momentum.",
        feature.name,
    )
    if all(isinstance(size, int) for size in shape):
        return tf.zeros(shape)
    return tf.zeros(tf.stack([tf.cast(size, tf.int64) for size in shape]))


def hyperparameters(tables: Sequence[config.TableSpec]) -> list[tf.Tensor]:
    """Returns each table's float32 vector: learning rate, then constants.

    A callable that several tables share is called once.
    """
    asked: list[tuple[Any, tf.Tensor]] = []
    vectors = []
    for table in tables:
        optimizer = table.optimizer
        if optimizer is None:
            vectors.append(tf.zeros([0]))
            continue
        rate = optimizer.learning_rate
        if optimizer.has_dynamic_rate:
            known = [value for other, value in asked if other == rate]
            if not known:
                known = [current_learning_rate(rate, table)]
                asked.append((rate, known[0]))
            rate = known[0]
        vectors.append(
            tf.stack(
                [tf.cast(cast("float", rate), tf.float32), *optimizer.constants]
            )
        )
    return vectors


def current_learning_rate(rate: Any, table: config.TableSpec) -> tf.Tensor:
    """Calls a dynamic learning rate; a float32 scalar.

    Raises:
      ValueError: If it gives no number; `table` is named.
    """
    value = rate()
    if value is None:
        raise ValueError(
            "A dynamic learning rate must give a number. Received: None "
            f"(table {table.name!r})."
        )
    if not tf.executing_eagerly() and not (
        tf.is_tensor(value) or isinstance(value, tf.Variable)
    ):
        logging.warning(
            "The dynamic learning rate of table %s gave the Python value %s "
            "while a tf.function was traced: it stays so in this function. "
            "Return a tensor computed from a tf.Variable.",
            table.name,
            value,
        )
    value = tf.convert_to_tensor(value)
    if value.shape.rank not in (0, None) or not (
        value.dtype.is_floating or value.dtype.is_integer
    ):
        raise ValueError(
            "A dynamic learning rate must give a number. Received: "
            f"{value.dtype.name} of shape {value.shape} (table "
            f"{table.name!r})."
        )
    return tf.cast(value, tf.float32)


StepT = TypeVar("StepT")

# Of a graph: the queues of the embeddings that have steps in it.
_ATTRIBUTE = "_tf_layoutmap_steps"


@dataclasses.dataclass
class Queue(Generic[StepT]):
    """The steps of one embedding in one function.

    Attributes:
      pending: Those that were enqueued, the oldest first.
      last: The one that was dequeued last, until it has its gradients.
    """

    pending: collections.deque[StepT] = dataclasses.field(
        default_factory=collections.deque
    )
    last: StepT | None = None


class StepQueues(Generic[StepT]):
    """Queues of steps, one for each function that is traced."""

    def __init__(self, order: str):
        """Starts without steps.

        Args:
          order: A sentence for errors: how the calls of a step are made.
        """
        self._order = order

    def enqueue(self, step: StepT):
        """Puts a step at the end of the queue."""
        self._queue().pending.append(step)

    def dequeue(self) -> StepT:
        """Returns the oldest step.

        Raises:
          RuntimeError: If there is none.
        """
        queue = self._queue()
        if not queue.pending:
            raise RuntimeError(
                "`dequeue` needs an enqueued step; call `enqueue` first. "
                + self._order
            )
        queue.last = queue.pending.popleft()
        return queue.last

    def take_dequeued(self) -> StepT:
        """Returns the step dequeued last, which gets its gradients now.

        Raises:
          RuntimeError: If there is none.
        """
        queue = self._queue()
        if queue.last is None:
            raise RuntimeError(
                "`apply_gradients` needs a dequeued step; call `enqueue` and "
                "`dequeue` first. " + self._order
            )
        step, queue.last = queue.last, None
        return step

    def _queue(self) -> Queue[StepT]:
        # With the graph, whose tensors a queue holds: both go together.
        graph: Any = tf.compat.v1.get_default_graph()
        by_embedding = getattr(graph, _ATTRIBUTE, None)
        if by_embedding is None:
            by_embedding = weakref.WeakKeyDictionary()
            setattr(graph, _ATTRIBUTE, by_embedding)
        return by_embedding.setdefault(self, Queue())


@dataclasses.dataclass
class _Calls:
    """What one function does under one name."""

    # Read by the function each time it runs; written while it is traced. None
    # where a forward-only step is found by others.
    is_forward: tf.Variable | None
    num_enqueued: int = 0
    num_forward: int = 0  # of those, enqueued with training=False
    is_dequeued: bool = False
    is_applied: bool = False

    def update(self):
        """Writes what is known by now."""
        if self.is_forward is not None:
            self.is_forward.assign(self.is_dequeued and not self.is_applied)


class StepModes:
    """The calls of one embedding in each function being traced."""

    def __init__(self, finds_forward_steps: bool = True):
        """Starts to note.

        Args:
          finds_forward_steps: Whether `enqueued` changes the mode of steps
            that are never applied. The TPU's compiler does so itself.
        """
        self._finds_forward_steps = finds_forward_steps
        # By the outermost function: loops and branches are part of it.
        self._calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def enqueued(self, name: str | None, training: Any) -> Any:
        """Returns `training`, or a tensor that may be false instead."""
        calls = self._of(name)
        if calls is None:
            return training
        calls.num_enqueued += 1
        calls.num_forward += training is False
        if calls.is_forward is None:
            return training
        self._update(calls)
        return tf.logical_and(
            training, tf.logical_not(calls.is_forward.read_value())
        )

    def dequeued(self, name: str | None):
        """Notes a `dequeue` of this name."""
        calls = self._of(name)
        if calls is not None:
            calls.is_dequeued = True
            self._update(calls)

    def applied(self, name: str | None):
        """Notes an `apply_gradients` of this name.

        Raises:
          RuntimeError: If all that the function enqueued under the name is
            forward-only.
        """
        calls = self._of(name)
        if calls is None:
            return
        if calls.num_enqueued and calls.num_forward == calls.num_enqueued:
            raise RuntimeError(
                "`apply_gradients` must not follow `enqueue(training=False)`: "
                "a TPU would wait forever. Enqueue with training=True, or "
                f"under another name. Received: name={name!r}."
            )
        calls.is_applied = True
        self._update(calls)

    def _of(self, name: str | None) -> _Calls | None:
        graph = _outermost_function()
        if graph is None:
            return None
        by_name = self._calls.setdefault(graph, {})
        if name not in by_name:
            by_name[name] = _Calls(self._create_flag())
        return by_name[name]

    def _create_flag(self) -> tf.Variable | None:
        if not self._finds_forward_steps:
            return None
        with tf.init_scope(), tf.device("/device:CPU:0"):
            # Of no strategy: one for all replicas.
            return tf_private.ResourceVariable(
                False, trainable=False, name="is_forward"
            )

    def _update(self, calls: _Calls):
        with tf.init_scope():
            calls.update()


def _outermost_function():
    """The function being traced, around all loops; None in eager mode."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(
        graph.outer_graph, "outer_graph"
    ):
        graph = graph.outer_graph
    return graph
