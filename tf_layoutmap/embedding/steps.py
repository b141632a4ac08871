"""Parts of a step that several engines use.

- `check_structures` checks the structures of ids and weights.
- `read_gradient` checks gradients, and `zero_gradient` replaces missing
  gradients. `hyperparameters` calls dynamic learning rates.
- `StepQueues` stores the steps between `enqueue` and `apply_gradients`.
  Backends whose steps are tensors of a traced function use this class.
- `StepModes` detects forward-only steps during tracing. On a TPU, an evaluation
  function can use the default `training=True`, because the TPU compiler detects
  that the function sends no gradients. For other engines, `StepModes` detects
  that the function sends no gradients. If a function enqueues and dequeues a
  step with a `name`, and does not call `apply_gradients` with this name, the
  step is forward-only.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.configs import config


def check_structures(features: Any, weights: Any | None, config: Any) -> list:
    """Checks the structures of the inputs of a step.

    Args:
      features: Ids, in the structure of `config`.
      weights: None, or weights in the structure of `config`.
      config: The argument `feature_config` of the embedding.

    Returns:
      One weight, or None, for each leaf of `config`.

    Raises:
      TypeError, ValueError: See `inputs.check_same_structure`.
    """
    inputs.check_same_structure(features, "features", config, "feature_config")
    return inputs.flatten_weights(weights, config, like="feature_config")


def read_gradient(
    feature: config.FeatureSpec,
    gradient: Any,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Checks the gradient of one feature, and returns it as a tensor.

    Args:
      feature: Spec of the feature.
      gradient: Gradient of the activations, as a float32 tensor or as the
        `tf.IndexedSlices` that is the gradient of a gather.
      shape: Static shape of the activations.

    Raises:
      ValueError: If `gradient` is not a tensor, or has another dtype or shape.
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
            f"{feature.name!r}; it must be float32, like the activations."
        )
    if not shape.is_compatible_with(gradient.shape):
        raise ValueError(
            f"Found gradient of shape {gradient.shape} at path "
            f"{feature.name!r}. Expected shape {shape}."
        )
    return gradient


def zero_gradient(feature: config.FeatureSpec, shape: Sequence[Any]):
    """Returns zeros for a missing gradient, and logs a warning."""
    logging.warning(
        "No gradient passed for feature %s, sending zero gradient. Its rows "
        "still count as looked up, so an optimizer with momentum changes "
        "them.",
        feature.name,
    )
    if all(isinstance(size, int) for size in shape):
        return tf.zeros(shape)
    return tf.zeros(tf.stack([tf.cast(size, tf.int64) for size in shape]))


def hyperparameters(
    tables: Sequence[config.TableSpec],
    current_rate: Callable[[Any, config.TableSpec], tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """Returns a float32 vector of hyperparameters for each table.

    A vector contains the learning rate, followed by the constants of the
    optimizer. If several tables have the same callable as their learning rate,
    the function calls the callable once.

    Args:
      tables: Specs of the tables.
      current_rate: Function that returns the value of a dynamic learning rate;
        `current_learning_rate` by default.
    """
    current_rate = current_rate or current_learning_rate
    called: list[tuple[Any, tf.Tensor]] = []
    # Tables with equal hyperparameters share a tensor, because each tensor of a
    # step costs time.
    shared: dict[Any, tf.Tensor] = {}
    vectors = []
    for table in tables:
        optimizer = table.optimizer
        if optimizer is None:
            vectors.append(tf.zeros([0]))
            continue
        rate = optimizer.learning_rate
        if optimizer.has_dynamic_rate:
            known = [value for other, value in called if other == rate]
            if not known:
                known = [current_rate(rate, table)]
                called.append((rate, known[0]))
            rate = known[0]
        key = (
            id(rate) if optimizer.has_dynamic_rate else rate,
            *optimizer.constants,
        )
        if key not in shared:
            with tf.device(HOST):
                shared[key] = tf.stack(
                    [
                        tf.cast(cast("float", rate), tf.float32),
                        *optimizer.constants,
                    ]
                )
        vectors.append(shared[key])
    return vectors


def current_learning_rate(rate: Any, table: config.TableSpec) -> tf.Tensor:
    """Calls a dynamic learning rate, and returns a float32 scalar.

    Raises:
      ValueError: If `rate` does not return a number. The message names the
        table.
    """
    value = rate()
    if value is None:
        raise ValueError(
            "A dynamic learning rate must return a number. Received: None "
            f"(table {table.name!r})."
        )
    if not tf.executing_eagerly() and not (
        tf.is_tensor(value) or isinstance(value, tf.Variable)
    ):
        logging.warning(
            "The dynamic learning rate of table %s returned the Python value "
            "%s while a tf.function was traced, so it is constant in this "
            "function. Return a tensor computed from a tf.Variable.",
            table.name,
            value,
        )
    value = tf.convert_to_tensor(value)
    if value.shape.rank not in (0, None) or not (
        value.dtype.is_floating or value.dtype.is_integer
    ):
        raise ValueError(
            "A dynamic learning rate must return a number. Received: "
            f"{value.dtype.name} of shape {value.shape} (table "
            f"{table.name!r})."
        )
    return tf.cast(value, tf.float32)


class RatesOfReplicas:
    """The dynamic learning rates of a step, for all replicas of a process.

    The first replica of the process calls the learning rates and writes their
    values to variables, which the other replicas read. A learning rate is
    therefore called once per step, and all replicas use the same value. In each
    step, the ops of the first replica precede the ops of the others.
    """

    def __init__(self, tables: Sequence[config.TableSpec], device: str):
        """Creates a variable for each dynamic learning rate.

        Args:
          tables: Specs of the tables.
          device: Device of the variables.
        """
        self._rates: list[Any] = []
        for table in tables:
            optimizer = table.optimizer
            if optimizer is None or not optimizer.has_dynamic_rate:
                continue
            if optimizer.learning_rate not in self._rates:
                self._rates.append(optimizer.learning_rate)
        with tf.init_scope(), tf.device(device):
            # The variables have no copies, because all replicas share them.
            self._values = [
                tf_private.ResourceVariable(
                    0.0, trainable=False, name="learning_rate_of_step"
                )
                for _ in self._rates
            ]

    def hyperparameters(
        self, tables: Sequence[config.TableSpec], *, is_first: bool
    ) -> list[tf.Tensor]:
        """Returns the hyperparameters of a step; see `hyperparameters`.

        Args:
          tables: Specs of the tables.
          is_first: Whether the caller is the first replica of the process.
        """

        def first(rate: Any, table: config.TableSpec) -> tf.Tensor:
            value = current_learning_rate(rate, table)
            self._values[self._rates.index(rate)].assign(value)
            return value

        def other(rate: Any, table: config.TableSpec) -> tf.Tensor:
            del table
            return self._values[self._rates.index(rate)].read_value()

        return hyperparameters(tables, first if is_first else other)


StepT = TypeVar("StepT")

# Attribute of a graph that stores the queues of all embeddings in this graph.
_ATTRIBUTE = "_tf_layoutmap_steps"


@dataclasses.dataclass
class Queue(Generic[StepT]):
    """Queue of the steps of one embedding in one traced function.

    Attributes:
      pending: Enqueued steps. The first step is the oldest step.
      last: The most recently dequeued step, or None after the gradients of this
        step are applied.
    """

    pending: collections.deque[StepT] = dataclasses.field(
        default_factory=collections.deque
    )
    last: StepT | None = None


class StepQueues(Generic[StepT]):
    """Queues of steps, one for each traced function."""

    def __init__(self, order: str):
        """Creates empty queues.

        Args:
          order: Sentence that states the required order of calls, for messages.
        """
        self._order = order

    def enqueue(self, step: StepT):
        """Adds a step to the end of the queue."""
        self._queue().pending.append(step)

    def dequeue(self) -> StepT:
        """Removes the oldest step from the queue, and returns it.

        Raises:
          RuntimeError: If no step is enqueued.
        """
        queue = self._queue()
        if not queue.pending:
            raise RuntimeError(
                "`dequeue` requires an enqueued step; call `enqueue` first. "
                + self._order
            )
        queue.last = queue.pending.popleft()
        return queue.last

    def take_dequeued(self) -> StepT:
        """Returns the last dequeued step, for the update with its gradients.

        Raises:
          RuntimeError: If no step is dequeued.
        """
        queue = self._queue()
        if queue.last is None:
            raise RuntimeError(
                "`apply_gradients` requires a dequeued step; call `enqueue` "
                "and `dequeue` first. " + self._order
            )
        step, queue.last = queue.last, None
        return step

    def _queue(self) -> Queue[StepT]:
        # The graph stores the queues. When the graph is deleted, the queues are
        # deleted together with the tensors that they contain.
        graph: Any = tf.compat.v1.get_default_graph()
        by_embedding = getattr(graph, _ATTRIBUTE, None)
        if by_embedding is None:
            by_embedding = weakref.WeakKeyDictionary()
            setattr(graph, _ATTRIBUTE, by_embedding)
        return by_embedding.setdefault(self, Queue())


@dataclasses.dataclass
class _Calls:
    """Record of the calls with one `name` in one traced function."""

    # Tracing writes to this variable, and each run of the function reads it.
    # The variable is None if `StepModes` does not detect forward-only steps.
    is_forward: tf.Variable | None
    num_enqueued: int = 0
    num_forward: int = 0  # Steps with training=False.
    is_dequeued: bool = False
    is_applied: bool = False

    def update(self):
        """Updates `is_forward` after another call has been traced."""
        if self.is_forward is not None:
            self.is_forward.assign(self.is_dequeued and not self.is_applied)


class StepModes:
    """Record of the calls of one embedding in each traced function."""

    def __init__(self, finds_forward_steps: bool = True):
        """Creates an empty record.

        Args:
          finds_forward_steps: Whether `enqueued` changes steps without
            gradients to forward-only steps. False on a TPU, because the TPU
            compiler changes these steps.
        """
        self._finds_forward_steps = finds_forward_steps
        # The keys are the graphs of outermost functions, so calls in loops and
        # branches of a function belong to the same record.
        self._calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def enqueued(self, name: str | None, training: Any) -> Any:
        """Records an `enqueue` with this name.

        Returns:
          The argument `training`, or a tensor that is False if later calls show
          that the step is forward-only.
        """
        calls = self._of(name)
        if calls is None:
            return training
        calls.num_enqueued += 1
        calls.num_forward += training is False
        if calls.is_forward is None:
            return training
        self._update(calls)
        with tf.device(HOST):
            return tf.logical_and(
                training, tf.logical_not(calls.is_forward.read_value())
            )

    def dequeued(self, name: str | None):
        """Records a `dequeue` with this name."""
        calls = self._of(name)
        if calls is not None:
            calls.is_dequeued = True
            self._update(calls)

    def applied(self, name: str | None):
        """Records an `apply_gradients` with this name.

        Raises:
          RuntimeError: If the function called `enqueue` with `training=False`
            for all steps with this name.
        """
        calls = self._of(name)
        if calls is None:
            return
        if calls.num_enqueued and calls.num_forward == calls.num_enqueued:
            raise RuntimeError(
                "`apply_gradients` must not follow `enqueue(training=False)`: "
                "a TPU would wait forever. Call `enqueue` with training=True, "
                f"or with another name. Received: name={name!r}."
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
        with tf.init_scope(), tf.device(HOST):
            # The variable does not belong to a strategy, so all replicas share
            # it.
            return tf_private.ResourceVariable(
                False, trainable=False, name="is_forward"
            )

    def _update(self, calls: _Calls):
        with tf.init_scope():
            calls.update()


def _outermost_function():
    """Returns the outermost traced graph, or None in eager mode."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(
        graph.outer_graph, "outer_graph"
    ):
        graph = graph.outer_graph
    return graph


def is_accessible(tensor: tf.Tensor) -> bool:
    """Returns whether the current function can use a tensor."""
    return not tf.is_symbolic_tensor(tensor) or any(
        graph is tensor.graph for graph in tf_private.graphs_around()
    )
