"""In which order the gradients of a row are summed, and so what travels.

exact    ids with their gains, and gradients of activations: an owner sums
         what all replicas contribute in the order feature, replica,
         sample, position, as one process with as many replicas does
folded   one gradient for each unique row of a replica, summed there: an
         owner adds those of the replicas up, in another order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.embedding.divided.steps_in_flight import Step
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs

# Numbers of each pair of processes: the columns of `sizes` of `PlanExchange`.
REQUEST, CONTRIBUTIONS, FETCHED, GRADIENTS = range(4)

# Words of 4 bytes before the rows that an owner sends, and before the type and
# the counts of rows of what `FoldGradients` writes.
_FETCHED_HEADER = 2
_APPLY_HEADER = 8


class Order(Protocol):
    """What an order decides.

    Attributes:
      sends_contributions: Whether owners are told ids with their gains.
    """

    sends_contributions: bool

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns the features of the engine of an owner."""
        ...

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[feature_inputs.FeatureIds], tf.Tensor]:
        """Reads what a process has sent, for an `enqueue` of its replica.

        Returns:
          What it enqueues, and by feature the number of samples, int64.
        """
        ...

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns what each owner gets of the gradients of a step.

        Args:
          step: The step.
          gradients: Shaped as the activations, one per feature.

        Returns:
          By owner a vector of floats; and by sender and owner its size.
        """
        ...

    def num_skipped(self) -> int:
        """Returns how many floats precede the gradients for this owner."""
        ...


class Exact:
    """Contributions travel as they are."""

    sends_contributions = True

    def __init__(self, spec: config.EmbeddingSpec, num_owners: int):
        """Takes tables and features, and how many processes there are."""
        self._spec = spec
        self._num_owners = num_owners

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns all features, without sequences: gains say it all."""
        return tuple(
            dataclasses.replace(one, max_sequence_length=0)
            for one in self._spec.features
        )

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[feature_inputs.FeatureIds], tf.Tensor]:
        """Reads contributions; see `Order`."""
        del request
        found = _ops.read_contributions(
            words=contributions, num_features=len(self._spec.features)
        )
        return [
            feature_inputs.FeatureIds(*one)
            for one in zip(
                found.ids,
                found.splits,
                tf.unstack(found.num_samples),
                found.weights,
            )
        ], found.num_samples

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns gradients of activations; see `Order`."""
        return _ops.split_gradients(
            plan=step.plan,
            gradients=list(gradients),
            num_owners=self._num_owners,
        ), step.sizes[:, :, GRADIENTS]

    def num_skipped(self) -> int:
        """None."""
        return 0


class Folded:
    """One gradient of each unique row travels."""

    sends_contributions = False

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        num_owners: int,
        rank: int,
        num_shards: Sequence[int],
    ):
        """Takes tables and features, and who has which.

        Args:
          spec: Tables and features.
          num_owners: Processes.
          rank: The number of this one.
          num_shards: Of each table: the first processes have one each.

        Raises:
          ValueError: If a rule takes one step per contribution.
        """
        for table in spec.tables:
            if table.optimizer and not table.optimizer.accumulates:
                raise ValueError(
                    'Argument `order` must be "exact" where an optimizer '
                    "takes one step for each gradient of a row. Received: "
                    '"folded" with use_gradient_accumulation=False (table '
                    f"{table.name!r})."
                )
        self._spec = spec
        self._num_owners = num_owners
        self._rank = rank
        self._num_shards = num_shards
        # Sums do not depend on them; those of the update go another way.
        self._hyperparameters = [
            [1.0, *one.optimizer.constants] if one.optimizer else []
            for one in spec.tables
        ]

    def features(self) -> tuple[config.FeatureSpec, ...]:
        """Returns one for each table."""
        return tuple(
            config.FeatureSpec(one.name, number, 0)
            for number, one in enumerate(self._spec.tables)
        )

    def read(
        self,
        request: tf.Tensor,
        contributions: tf.Tensor,
    ) -> tuple[list[feature_inputs.FeatureIds], tf.Tensor]:
        """Reads the unique rows of a request; see `Order`."""
        del contributions
        has_rows = [self._rank < one for one in self._num_shards]
        count = sum(has_rows)
        sizes = tf.cast(request[:count], tf.int64)
        rows = iter(
            zip(
                tf.split(request[count:], sizes, num=count),
                tf.unstack(sizes, num=count),
            )
            if count
            else ()
        )
        none = (tf.zeros([0], tf.uint32), tf.constant(0, tf.int64))
        found = [next(rows) if has else none for has in has_rows]
        return [
            feature_inputs.FeatureIds(
                tf.cast(ids, tf.int64),
                tf.zeros([0], tf.int64),
                size,
                tf.zeros([0]),
            )
            for ids, size in found
        ], tf.stack([size for _, size in found])

    def values(
        self,
        step: Step,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns sums of gradients; see `Order`."""
        fetched = step.sizes[:, :, FETCHED]
        messages = _ops.fold_gradients(
            plan=step.plan,
            gradients=list(gradients),
            hyperparameters=[
                tf.constant(one, tf.float32) for one in self._hyperparameters
            ],
            token=tf.constant([0, -1, 0], tf.int64),
            # Their sizes are what is looked at.
            fetched=[
                tf.zeros([4 * fetched[self._rank, owner]], tf.uint8)
                for owner in range(self._num_owners)
            ],
        )
        sizes = (
            fetched
            - _FETCHED_HEADER
            + tf.constant(
                [self._num_constants(one) for one in range(self._num_owners)],
                tf.int64,
            )
        )
        # Owners know the rows, which follow.
        return [
            _floats(
                one,
                4
                * (
                    _APPLY_HEADER
                    + 1
                    + sum(owner < count for count in self._num_shards)
                ),
                sizes[self._rank, owner],
            )
            for owner, one in enumerate(messages)
        ], sizes

    def num_skipped(self) -> int:
        """The hyperparameters of the tables of this process."""
        return self._num_constants(self._rank)

    def _num_constants(self, owner: int) -> int:
        return sum(
            len(values)
            for values, count in zip(self._hyperparameters, self._num_shards)
            if owner < count
        )


def bytes_of(words: tf.Tensor) -> tf.Tensor:
    """Returns a vector of int32 as the bytes that it was made of."""
    return tf.reshape(tf.bitcast(words, tf.uint8), [-1])


def _floats(message: tf.Tensor, first: int, size: tf.Tensor) -> tf.Tensor:
    """Returns `size` floats of a message, from byte `first` on."""
    return tf.bitcast(
        tf.reshape(message[first : first + 4 * size], [-1, 4]), tf.float32
    )
