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

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing, steps, tables
from tf_layoutmap.embedding.host import engine
from tf_layoutmap.embedding.servers import closure_trace


@dataclasses.dataclass(eq=False)
class Gradients:
    """Gradients of a lookup.

    Attributes:
      number: Number of the mark.
      mark: The mark.
      values: The gradients of the activations in the shape that the ops
        require.
    """

    number: int
    mark: tf.Tensor
    values: Sequence[tf.Tensor]


@dataclasses.dataclass(eq=False)
class Lookup:
    """The lookup of one call of a layer.

    Attributes:
      inputs: The batch.
      begun: Plan that `StepOps.begin` returned.
      plan: Plan that `StepOps.placed` returned.
      fetched: Replies of the servers.
      call: Index of the lookup among the lookups of the step.
      step: Step of a closure that contains the lookup, or None.
      gradients: The gradients of the call, one element for each time that
        gradients were computed.
    """

    inputs: engine.StepInputs
    begun: Any
    plan: Any
    fetched: Sequence[tf.Tensor]
    call: int
    step: closure_trace.ClosureStep | None
    gradients: list[Gradients] = dataclasses.field(default_factory=list)


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


class Lookups:
    """A container for the lookups of each thread that can receive gradients.

    A mark represents the gradients of a lookup, as in the host engine; see
    cc/core/engine/marks.h.
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
        step = closure_trace.enclosing_step()
        lookups[:] = [
            lookup
            for lookup in lookups
            if lookup.step is step and steps.is_accessible(lookup.plan)
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
        step = closure_trace.enclosing_step()
        lookups.append(Lookup(inputs, begun, plan, fetched, call, step))
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
        earlier = [
            gradient
            for gradient in lookup.gradients
            if all(map(steps.is_accessible, gradient.values))
        ]
        values = [*(gradient.values for gradient in earlier), gradients]
        coordinates = ops.gradient_coordinates(
            plan=lookup.plan,
            gradients=[tensor for each in values for tensor in each],
            num_gradients=len(values),
        )
        mark = ops.issue_mark(
            coordinates=coordinates,
            numbers=[*(gradient.number for gradient in earlier), number],
        )
        lookup.gradients.append(Gradients(number, mark, gradients))
        return mark

    def take(self, marks: tf.Tensor) -> list[Followed]:
        """Removes this thread's lookups, and returns those with gradients.

        Args:
          marks: Sum of marks, which determines the factor of each gradient.

        Raises:
          RuntimeError: If no lookup has gradients, or if another function
            contains a lookup.
          InvalidArgumentError: If the marks were not only summed and scaled.
        """
        lookups = [lookup for lookup in self._lookups() if lookup.gradients]
        self._lookups().clear()
        if not lookups:
            raise RuntimeError(
                "There are no gradients to apply to the tables on parameter "
                "servers; call the layer inside the tape."
            )
        for lookup in lookups:
            tensors = [lookup.plan]
            for gradients in lookup.gradients:
                tensors.extend([gradients.mark, *gradients.values])
            if not all(map(steps.is_accessible, tensors)):
                raise RuntimeError(
                    "A layer with tables on parameter servers must be called "
                    "in the function that applies its gradients, because its "
                    "lookup is part of the step. Received: a call inside a "
                    "separate tf.function. In a training step, remove "
                    "`@tf.function` from the function that calls the layer, "
                    "such as `call` of the model."
                )
        factors = _factors(lookups, marks)
        if tf.executing_eagerly():
            # The other gradients were computed and not applied.
            used = [
                lookup
                for lookup, of_lookup in zip(lookups, factors)
                if any(float(factor) != 0 for factor in of_lookup)
            ]
            # If a program multiplies the gradients by 0, the step updates rows
            # with zero gradients.
            used = used or lookups[-1:]
            factors = [
                of_lookup
                for lookup, of_lookup in zip(lookups, factors)
                if lookup in used
            ]
            lookups = used
        else:
            factors = _checked_factors(factors, marks)
        return [_followed(*pair) for pair in zip(lookups, factors)]

    def _lookups(self) -> list[Lookup]:
        if not hasattr(self._of_thread, "lookups"):
            self._of_thread.lookups = []
        return self._of_thread.lookups


def _factors(
    lookups: Sequence[Lookup], marks: tf.Tensor
) -> list[list[tf.Tensor]]:
    """Returns the factor of each gradient of each lookup."""
    # If there are too many gradients, the oldest one in each row of a mark is
    # discarded.
    newest = {
        gradient.number % MAX_LOOKUPS: gradient
        for gradient in sorted(
            (gradient for lookup in lookups for gradient in lookup.gradients),
            key=lambda gradient: gradient.number,
        )
    }
    issued = list(newest.values())
    with tf.device(tables.HOST):
        factors_read = tf.unstack(
            ops.read_marks(
                marks=marks,
                issued=[gradient.mark for gradient in issued],
                numbers=[gradient.number for gradient in issued],
                where=" (tables on parameter servers)",
            ),
            num=len(issued),
        )
    by_number = {
        gradient.number: factor
        for gradient, factor in zip(issued, factors_read)
    }
    return [
        [
            by_number.get(gradient.number, tf.zeros([]))
            for gradient in lookup.gradients
        ]
        for lookup in lookups
    ]


def _checked_factors(
    factors: list[list[tf.Tensor]], marks: tf.Tensor
) -> list[list[tf.Tensor]]:
    """Checks that all lookups of a traced function are part of its step.

    A step can multiply all gradients by 0. If it multiplies only the gradients
    of some lookups by 0, the marks do not show whether these lookups are part
    of the step. An update with zero gradients can also change rows.
    """
    if len(factors) == 1:
        return factors
    is_zero = tf.reduce_all(tf.equal(marks, 0))
    checks = [
        tf.debugging.Assert(
            is_zero | tf.reduce_any(tf.not_equal(tf.stack(of_lookup), 0)),
            [
                "If a step applies gradients of several calls of a layer with "
                "tables on parameter servers, the gradients of a single call "
                "must not be multiplied by 0, and the gradients of all calls "
                "must be applied in one step."
            ],
        )
        for of_lookup in factors
    ]
    with tf.control_dependencies(
        [check for check in checks if check is not None]
    ):
        return [list(map(tf.identity, of_lookup)) for of_lookup in factors]


def _followed(lookup: Lookup, factors: Sequence[tf.Tensor]) -> Followed:
    """Returns a lookup with the sum of its gradients, times their factors."""
    sums: list[tf.Tensor] | None = None
    for gradients, factor in zip(lookup.gradients, factors):
        # Gradients with the factor 0 are not applied, also if they are not
        # finite.
        products = [
            tf.math.multiply_no_nan(value, factor) for value in gradients.values
        ]
        sums = (
            products
            if sums is None
            else [first + product for first, product in zip(sums, products)]
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
        unpacked(lookup.inputs)
        if isinstance(lookup.inputs, packing.PackedIds)
        else lookup.inputs
        for lookup in followed
    ]
    return (
        [_joined_feature(parts) for parts in zip(*batches)],
        [
            tf.concat(parts, axis=0)
            for parts in zip(*(lookup.gradients for lookup in followed))
        ],
    )


def _joined_feature(
    parts: Sequence[embedding_inputs.FeatureIds],
) -> embedding_inputs.FeatureIds:
    # Only indices contain the positions of ids in the samples of a sequence
    # feature, so row splits are converted to indices if a part is sparse.
    if any(part.splits.shape.rank == 2 for part in parts):
        splits = _joined_indices(parts)
    else:
        splits = _joined_splits([_row_splits(part) for part in parts])
    sizes = [part.num_samples for part in parts]
    return embedding_inputs.FeatureIds(
        tf.concat([tf.cast(part.ids, tf.int64) for part in parts], axis=0),
        splits,
        sum(sizes)
        if all(isinstance(size, int) for size in sizes)
        else tf.add_n([tf.cast(size, tf.int64) for size in sizes]),
        _joined_weights(parts),
        parts[0].inner_shape,
    )


def _joined_indices(
    parts: Sequence[embedding_inputs.FeatureIds],
) -> tf.Tensor:
    """Returns the indices of sparse features, with renumbered samples."""
    indices, first = [], tf.zeros([], tf.int64)
    for part in parts:
        indices.append(_indices(part) + tf.stack([first, 0]))
        first += tf.cast(part.num_samples, tf.int64)
    return tf.concat(indices, axis=0)


def _joined_splits(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    splits = parts[0]
    for part in parts[1:]:
        splits = tf.concat([splits, splits[-1] + part[1:]], axis=0)
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
    if all(part.weights.shape[0] == 0 for part in parts):
        return tf.zeros([0])
    return tf.concat(
        [
            tf.ones_like(part.ids, tf.float32)
            if part.weights.shape[0] == 0
            else part.weights
            for part in parts
        ],
        axis=0,
    )
