"""The model: tables, a dense tower, and a training step that updates both."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from completion.data.features import ECHOES, RECENT
from completion.data.ragged import Ragged
from completion.data.vocabulary import UNKNOWN
from completion.plan import TOWER_FEATURES, Plan
from completion.scoring import (
    build_tower,
    dense_ids,
    sampled_loss,
    score_all,
    tower_input,
)

_RAGGED = tf.RaggedTensorSpec([None, None], tf.int32, 1, tf.int64)
_IDS = tf.TensorSpec([None], tf.int32)
FEATURE_SPECS = dict.fromkeys((*TOWER_FEATURES, "recent"), _RAGGED)


class Completer:
    """A model that predicts the next item of a document.

    Attributes:
      step: Number of trained steps, an int64 variable.
      embedding: Tables, a `tlm.TPUEmbedding`.
      tower: Keras model that maps activations to a query.
      optimizer: Optimizer of the tower.
      widths: Width of each feature in the tower's input.
    """

    def __init__(self, plan: Plan, log_shares: np.ndarray):
        """Creates the tables and the tower.

        Args:
          plan: Tables and features.
          log_shares: `[num_rows]` log of each row's share of training.
        """
        self._candidates = plan.tables["candidates"]
        self._log_shares = tf.constant(log_shares)
        self.widths = plan.tower_widths()
        self.step = tf.Variable(0, dtype=tf.int64, name="step")
        self.embedding = plan.trained_embedding(self.step)
        self.embedding.build()
        self.tower = self.make_tower(plan)
        self.optimizer = optimizer_of(plan, self.tower)

    def make_tower(self, plan: Plan) -> tf.keras.Model:
        """Returns an untrained tower on the device where it is trained."""
        return tower_of(plan)

    def saved_parts(self) -> dict[str, object]:
        """Returns the objects that a checkpoint contains, by name."""
        return {
            "step": self.step,
            "embedding": self.embedding,
            "tower": self.tower,
            "optimizer": self.optimizer,
        }

    def before_save(self) -> None:
        """Updates `saved_parts` before a checkpoint is written."""

    def after_restore(self) -> None:
        """Updates the model after `saved_parts` were restored."""

    @tf.function(
        input_signature=[
            FEATURE_SPECS,
            _IDS,
            _IDS,
            tf.TensorSpec([None], tf.float32),
        ]
    )
    def train_step(self, features, target, negatives, log_expected):
        """Trains the tables and the tower on one batch, and returns the loss.

        Args:
          features: Ragged ids of each feature in `FEATURE_SPECS`.
          target: `[num_samples]` rows of the items that follow.
          negatives: `[num_negatives]` distinct rows.
          log_expected: `[num_negatives]` log of the probability that each
            negative was drawn.
        """
        return self.take_step(features, target, negatives, log_expected)

    def take_step(self, features, target, negatives, log_expected):
        """Runs a training step inside a function that is being traced."""
        self.embedding.enqueue(
            {**features, "target": target, "negatives": negatives}
        )
        activations = self.embedding.dequeue()
        ids = {
            "target": target,
            "negatives": negatives,
            "recent": dense_ids(features["recent"], RECENT),
            "echo": dense_ids(features["echo"], ECHOES),
        }
        weights = self.tower.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch(activations)
            outputs = self.tower(
                tower_input(activations, self.widths), training=True
            )
            loss = sampled_loss(
                outputs, activations, ids, log_expected, self._log_shares
            )
        table_gradients, tower_gradients = tape.gradient(
            loss, (activations, weights)
        )
        self.embedding.apply_gradients(table_gradients)
        self.optimizer.apply(tower_gradients, weights)
        self.step.assign_add(1)
        return loss

    @tf.function(input_signature=[FEATURE_SPECS])
    def scores(self, features):
        """Returns `[num_samples, num_rows]` scores of all rows."""
        activations = self.look_up_only(features)
        outputs = self.tower(
            tower_input(activations, self.widths), training=False
        )
        return score_all(
            outputs,
            dense_ids(features["recent"], RECENT),
            dense_ids(features["echo"], ECHOES),
            self.candidates(),
            self._log_shares,
        )

    def look_up_only(self, features):
        """Returns the activations of a forward-only step."""
        # `enqueue` requires all features, so unused features are passed as
        # empty tensors.
        nothing = tf.zeros([0], tf.int32)
        self.embedding.enqueue(
            {**features, "target": nothing, "negatives": nothing},
            training=False,
        )
        return self.embedding.dequeue()

    def candidates(self) -> tf.Tensor:
        """Returns the full table of candidates, `[num_rows, dim]`."""
        return tf.convert_to_tensor(
            self.embedding.embedding_tables[self._candidates]
        )

    @tf.function(input_signature=[FEATURE_SPECS, _IDS])
    def ranks(self, features, target):
        """Returns the rank of each target in the format of `ranks_of`."""
        return ranks_of(self.scores(features), target)

    @tf.function(input_signature=[FEATURE_SPECS, tf.TensorSpec([], tf.int32)])
    def complete(self, features, num_offers):
        """Returns the highest scores and their rows, in descending order."""
        return tf.math.top_k(self.scores(features), num_offers)

    def candidate_rows(self) -> np.ndarray:
        """Returns the table of candidates as a numpy array."""
        return self.candidates().numpy()


def ranks_of(scores: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Returns the rank of each target among all rows.

    Args:
      scores: `[num_samples, num_rows]` scores.
      target: `[num_samples]` rows.

    Returns:
      `[num_samples]` int32: 1 for the highest score, 0 for a target that is not
      in the vocabulary. If other rows have the same score as the target, the
      target ranks after these rows.
    """
    tf.debugging.assert_all_finite(scores, "The model's scores must be finite.")
    own = tf.gather(scores, target, batch_dims=1)
    ranks = tf.reduce_sum(
        tf.cast(scores >= own[:, tf.newaxis], tf.int32), axis=1
    )
    return tf.where(target == UNKNOWN, 0, ranks)


def tower_of(plan: Plan) -> tf.keras.Model:
    """Returns an untrained tower for the features of a plan."""
    settings = plan.settings
    return build_tower(
        sum(plan.tower_widths().values()),
        dim=settings.dim,
        hidden=settings.hidden,
        dropout=settings.dropout,
        seed=settings.seed,
    )


def optimizer_of(plan: Plan, tower: tf.keras.Model):
    """Returns the tower's optimizer, whose variables have been created."""
    settings = plan.settings
    optimizer = tf.keras.optimizers.Adam(
        tf.keras.optimizers.schedules.CosineDecay(
            settings.tower_rate, settings.num_steps, alpha=0.05
        )
    )
    # Variables must exist before a function is traced or a checkpoint is
    # restored.
    optimizer.build(tower.trainable_variables)
    return optimizer


def to_tensors(batch: dict[str, Ragged]) -> dict[str, tf.RaggedTensor]:
    """Returns the features of a batch as ragged tensors."""
    # The splits are always valid, and validating them would slow down every
    # step.
    return {
        name: tf.RaggedTensor.from_row_splits(
            rows.values, rows.splits, validate=False
        )
        for name, rows in batch.items()
    }
