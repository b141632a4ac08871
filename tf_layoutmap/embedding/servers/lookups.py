"""Lookups of layers whose tables are on parameter servers.

When a layer is called, it is not known whether the lookup will receive
gradients. `Lookups` stores the lookups of a step and their gradients until the
optimizer is applied. `joined` converts several lookups of a step to one batch,
because all gradients of a step must be sent to the servers in one update.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing
from tf_layoutmap.embedding.host import engine
from tf_layoutmap.embedding.servers import closures


@dataclasses.dataclass(eq=False)
class Lookup:
    """The lookup of one call of a layer.

    Attributes:
      inputs: The batch.
      begun: Plan that `StepOps.begin` returned.
      plan: Plan that `StepOps.placed` returned.
      fetched: Replies of the servers.
      call: Index of the lookup among the lookups of the step.
      closure: Step of a closure that contains the lookup, or None.
      gradients: For each time that gradients of the call were computed, the
        number of the mark, and the gradients of the activations in the shape
        that the ops require.
    """

    inputs: engine.StepInputs
    begun: Any
    plan: Any
    fetched: Sequence[tf.Tensor]
    call: int
    closure: closures.Closure | None
    gradients: list[tuple[int, Sequence[tf.Tensor]]] = dataclasses.field(
        default_factory=list
    )


@dataclasses.dataclass(eq=False)
class Followed:
    """A lookup and its gradients, multiplied by the factors of their marks."""

    inputs: engine.StepInputs
    begun: Any
    plan: Any
    fetched: Sequence[tf.Tensor]
    gradients: list[tf.Tensor]


# The number of lookups of a thread that can wait for gradients.
MAX_LOOKUPS, _ = engine.MARK_SHAPE
# The factor of a mark is small, so that marks do not affect a global norm of
# gradients. The generation of a mark detects that its row is used again. All
# products of the factor and a generation are exact.
_FACTOR = 2.0**-40
_MAX_GENERATION = 4096


class Lookups:
    """A container for the lookups of each thread that can receive gradients.

    A mark represents the gradients of a lookup, as in the host engine: row `k`
    of a mark contains a factor and the factor times the generation of the row,
    and all other rows are zero.
    """

    def __init__(self):
        """Creates an empty container."""
        self._of_thread = threading.local()

    def earlier(
        self, forget: Callable[[Sequence[tf.Tensor]], None] | None = None
    ) -> Sequence[Lookup]:
        """Returns the earlier lookups of the current step.

        Earlier lookups that the current function cannot use, or that belong to
        another step of a closure, are discarded.

        Args:
          forget: Function that ends an eager step on the servers, or None. Its
            argument are the replies to a lookup of the step. With `forget`, an
            eager step has at most `MAX_LOOKUPS` lookups: a program may never
            apply the gradients of its lookups, and each lookup of keys pins
            rows until the step ends.
        """
        lookups = self._lookups()
        closure = closures.enclosing_closure()
        lookups[:] = [
            one
            for one in lookups
            if one.closure is closure and _is_accessible(one.plan)
        ]
        if (
            forget is not None
            and tf.executing_eagerly()
            and len(lookups) == MAX_LOOKUPS
        ):
            forget(lookups[-1].fetched)
            lookups.clear()
        return lookups

    def open(self, inputs: Any, begun: Any, plan: Any, fetched: Any) -> Lookup:
        """Stores a lookup.

        Call `earlier` before the lookup. If there are too many lookups, the
        oldest one is discarded.
        """
        lookups = self._lookups()
        call = lookups[-1].call + 1 if lookups else 0
        closure = closures.enclosing_closure()
        lookups.append(Lookup(inputs, begun, plan, fetched, call, closure))
        del lookups[:-MAX_LOOKUPS]
        return lookups[-1]

    def follow(
        self, lookup: Lookup, gradients: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Stores the gradients of a lookup, and returns their mark.

        Raises:
          NotImplementedError: If `lookup` was discarded.
        """
        if lookup not in self._lookups():
            raise NotImplementedError(
                "A layer with tables on parameter servers must be called "
                "in the function that applies its gradients, at most "
                f"{MAX_LOOKUPS} times in a step."
            )
        number = getattr(self._of_thread, "num_marks", 0)
        self._of_thread.num_marks = number + 1
        lookup.gradients.append((number, gradients))
        mark = np.zeros(engine.MARK_SHAPE, np.float32)
        mark[number % MAX_LOOKUPS] = [
            _FACTOR,
            _FACTOR * _generation(number),
        ]
        return tf.constant(mark)

    def take(self, marks: tf.Tensor) -> list[Followed]:
        """Removes this thread's lookups, and returns those with gradients.

        Args:
          marks: Sum of marks, which determines the factor of each gradient.

        Raises:
          RuntimeError: If no lookup has gradients, or if another function
            contains a lookup.
        """
        lookups = [one for one in self._lookups() if one.gradients]
        self._lookups().clear()
        if not lookups:
            raise RuntimeError(
                "There are no gradients to apply to the tables on parameter "
                "servers; call the layer inside the tape."
            )
        for lookup in lookups:
            tensors = [lookup.plan]
            for _, gradients in lookup.gradients:
                tensors.extend(gradients)
            if not all(map(_is_accessible, tensors)):
                raise RuntimeError(
                    "A layer with tables on parameter servers must be called "
                    "in the function that applies its gradients, because its "
                    "lookup is part of the step. Received: a call inside a "
                    "separate tf.function. In a training step, remove "
                    "`@tf.function` from the function that calls the layer, "
                    "such as `call` of the model."
                )
        if tf.executing_eagerly():
            # The gradients of these lookups were computed and not applied.
            used = [one for one in lookups if _is_used(one, marks)]
            lookups = used or lookups[-1:]
        return [_followed(one, marks) for one in lookups]

    def _lookups(self) -> list[Lookup]:
        if not hasattr(self._of_thread, "lookups"):
            self._of_thread.lookups = []
        return self._of_thread.lookups


def _generation(number: int) -> int:
    return number // MAX_LOOKUPS % _MAX_GENERATION + 1


def _factors(lookup: Lookup, marks: tf.Tensor) -> tf.Tensor:
    """Returns the factor of each gradient of a lookup."""
    rows = [number % MAX_LOOKUPS for number, _ in lookup.gradients]
    return tf.gather(marks[:, 0], rows)


def _is_used(lookup: Lookup, marks: tf.Tensor) -> bool:
    return bool(tf.reduce_any(_factors(lookup, marks) != 0))


def _followed(lookup: Lookup, marks: tf.Tensor) -> Followed:
    """Returns a lookup with the sum of its gradients, times their factors."""
    factors = _factors(lookup, marks)
    generations = [float(_generation(number)) for number, _ in lookup.gradients]
    rows = [number % MAX_LOOKUPS for number, _ in lookup.gradients]
    products = tf.gather(marks[:, 1], rows)
    checks = [
        # An update with zero gradients can also change rows.
        tf.debugging.Assert(
            tf.reduce_any(factors != 0),
            [
                "Gradients of tables on servers must not be multiplied by 0 "
                "before they are applied, and the gradients of all calls of a "
                "layer must be applied in one step."
            ],
        ),
        # The comparison is true for factors that are not finite.
        tf.debugging.Assert(
            ~tf.reduce_any(
                tf.abs(products - factors * generations)
                > 1e-4 * tf.abs(products)
            ),
            [
                "The gradients of tables on servers were computed too long "
                f"ago: at most {MAX_LOOKUPS} lookups can wait for their "
                "gradients to be applied."
            ],
        ),
    ]
    with tf.control_dependencies([one for one in checks if one is not None]):
        factors = factors / _FACTOR
    sums: list[tf.Tensor] | None = None
    for place, (_, gradients) in enumerate(lookup.gradients):
        # Gradients with the factor 0 are not applied, also if they are not
        # finite.
        products = [
            one * factors[place]
            if len(lookup.gradients) == 1
            else tf.math.multiply_no_nan(one, factors[place])
            for one in gradients
        ]
        sums = (
            products
            if sums is None
            else [first + one for first, one in zip(sums, products)]
        )
    assert sums is not None  # `take` returns only lookups with gradients.
    return Followed(
        lookup.inputs, lookup.begun, lookup.plan, lookup.fetched, sums
    )


def joined(
    followed: Sequence[Followed],
    unpacked: Callable[[packing.PackedIds], list[embedding_inputs.FeatureIds]],
) -> tuple[list[embedding_inputs.FeatureIds], list[tf.Tensor]]:
    """Returns the batches and gradients of several lookups as one batch.

    The samples of each feature are in the order of the lookups. The sums of the
    gradients are therefore bitwise identical to the host engine, which sums the
    gradients of a step feature by feature, and then call by call.

    Args:
      followed: The lookups of a step.
      unpacked: Function that returns the features of a packed batch.

    Returns:
      The batch, and one gradient for each feature.
    """
    batches = [
        unpacked(one.inputs)
        if isinstance(one.inputs, packing.PackedIds)
        else one.inputs
        for one in followed
    ]
    return (
        [_joined_feature(parts) for parts in zip(*batches)],
        [
            tf.concat(parts, axis=0)
            for parts in zip(*(one.gradients for one in followed))
        ],
    )


def _joined_feature(
    parts: Sequence[embedding_inputs.FeatureIds],
) -> embedding_inputs.FeatureIds:
    # Only indices contain the positions of ids in the samples of a sequence
    # feature, so row splits are converted to indices if a part is sparse.
    if any(one.splits.shape.rank == 2 for one in parts):
        splits = _joined_indices(parts)
    else:
        splits = _joined_splits([_row_splits(one) for one in parts])
    sizes = [one.num_samples for one in parts]
    return embedding_inputs.FeatureIds(
        tf.concat([tf.cast(one.ids, tf.int64) for one in parts], axis=0),
        splits,
        sum(sizes)
        if all(isinstance(one, int) for one in sizes)
        else tf.add_n([tf.cast(one, tf.int64) for one in sizes]),
        _joined_weights(parts),
        parts[0].inner_shape,
    )


def _joined_indices(
    parts: Sequence[embedding_inputs.FeatureIds],
) -> tf.Tensor:
    """Returns the indices of sparse features, with renumbered samples."""
    indices, first = [], tf.zeros([], tf.int64)
    for one in parts:
        indices.append(_indices(one) + tf.stack([first, 0]))
        first += tf.cast(one.num_samples, tf.int64)
    return tf.concat(indices, axis=0)


def _joined_splits(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    splits = parts[0]
    for one in parts[1:]:
        splits = tf.concat([splits, splits[-1] + one[1:]], axis=0)
    return splits


def _indices(feature: embedding_inputs.FeatureIds) -> tf.Tensor:
    """Returns the sample and the position of each id."""
    if feature.splits.shape.rank == 2:
        return tf.cast(feature.splits, tf.int64)
    splits = _row_splits(feature)
    samples = tf.repeat(
        tf.range(tf.size(splits, tf.int64) - 1), splits[1:] - splits[:-1]
    )
    positions = tf.range(tf.size(samples, tf.int64)) - tf.gather(
        splits, samples
    )
    return tf.stack([samples, positions], axis=1)


def _row_splits(feature: embedding_inputs.FeatureIds) -> tf.Tensor:
    """Returns the row splits of a dense or ragged feature."""
    if feature.splits.shape[0] != 0:
        return tf.cast(feature.splits, tf.int64)
    num_samples = tf.cast(feature.num_samples, tf.int64)
    ids_per_sample = tf.size(feature.ids, tf.int64) // tf.maximum(
        num_samples, 1
    )
    return tf.range(num_samples + 1) * ids_per_sample


def _joined_weights(
    parts: Sequence[embedding_inputs.FeatureIds],
) -> tf.Tensor:
    if all(one.weights.shape[0] == 0 for one in parts):
        return tf.zeros([0])
    return tf.concat(
        [
            tf.ones_like(one.ids, tf.float32)
            if one.weights.shape[0] == 0
            else one.weights
            for one in parts
        ],
        axis=0,
    )


def _is_accessible(tensor: tf.Tensor) -> bool:
    """Returns whether the current function can use a tensor."""
    return not tf.is_symbolic_tensor(tensor) or any(
        graph is tensor.graph for graph in tf_private.graphs_around()
    )
