"""Scores of candidates for a query, and the loss of a training step."""

from __future__ import annotations

import keras
import tensorflow as tf

from completion.data.features import ECHOES, RECENT
from completion.data.vocabulary import UNKNOWN

# Score of rows that are not candidates. The score is finite, because the
# gradient of a sum of infinite scores is NaN.
NEVER = -1e9


def build_tower(
    width: int, *, dim: int, hidden: int, dropout: float, seed: int
) -> keras.Model:
    """Builds the dense part of the model.

    Args:
      width: Width of the result of `tower_input`.
      dim: Number of columns of the table of candidates.
      hidden: Width of the hidden layer.
      dropout: Dropout rate of the hidden layer.
      seed: Seed of the initial weights and of the dropout.

    Returns:
      A model from activations to `query [num_samples, dim]`, whose dot products
      with the candidates are the scores, and `gates [num_samples, RECENT +
      ECHOES]`, which are added to the scores of recent items and echoes.
    """
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((width,))
    hidden = keras.layers.Dense(hidden, "gelu", name="hidden")(inputs)
    hidden = keras.layers.Dropout(dropout, seed=seed)(hidden)
    hidden = keras.layers.LayerNormalization(name="scale")(hidden)
    return keras.Model(
        inputs,
        {
            "query": keras.layers.Dense(dim, name="query")(hidden),
            "gates": keras.layers.Dense(RECENT + ECHOES, name="gates")(hidden),
        },
        name="tower",
    )


def tower_input(
    activations: dict[str, tf.Tensor], widths: dict[str, int]
) -> tf.Tensor:
    """Returns concatenated activations, `[num_samples, sum of widths]`.

    Args:
      activations: `[num_samples, dim]` or `[num_samples, places, dim]` of each
        feature.
      widths: Width of each feature of the tower, in order.
    """
    return tf.concat(
        [
            tf.reshape(activations[name], [-1, width])
            for name, width in widths.items()
        ],
        axis=1,
    )


def split_input(
    gradient: tf.Tensor,
    activations: dict[str, tf.Tensor],
    widths: dict[str, int],
) -> dict[str, tf.Tensor]:
    """Splits the gradient of the result of `tower_input` by feature."""
    parts = tf.split(gradient, list(widths.values()), axis=1)
    return {
        name: tf.reshape(part, tf.shape(activations[name]))
        for name, part in zip(widths, parts, strict=True)
    }


def dense_ids(ids: tf.RaggedTensor, width: int) -> tf.Tensor:
    """Returns the ids as `[num_samples, width]`, padded with `UNKNOWN`."""
    return ids.to_tensor(default_value=UNKNOWN, shape=[None, width])


def recent_bonus(
    gates: tf.Tensor, recent: tf.Tensor, echoes: tf.Tensor
) -> tf.Tensor:
    """Returns the bonus that is added to the score of each recent item.

    Args:
      gates: `[num_samples, RECENT + ECHOES]` float32.
      recent: `[num_samples, RECENT]` rows; known rows are distinct.
      echoes: `[num_samples, ECHOES]` rows.

    Returns:
      `[num_samples, RECENT]` float32.
    """
    echoed = tf.cast(
        recent[:, :, tf.newaxis] == echoes[:, tf.newaxis, :], tf.float32
    )
    return gates[:, :RECENT] + tf.einsum(
        "bre,be->br", echoed, gates[:, RECENT:]
    )


def score_all(
    tower_outputs: dict[str, tf.Tensor],
    recent: tf.Tensor,
    echoes: tf.Tensor,
    candidates: tf.Tensor,
    log_shares: tf.Tensor,
) -> tf.Tensor:
    """Returns the scores of all rows of the vocabulary.

    Args:
      tower_outputs: `query` and `gates`.
      recent: `[num_samples, RECENT]` rows.
      echoes: `[num_samples, ECHOES]` rows.
      candidates: `[num_rows, dim]` full table.
      log_shares: `[num_rows]` log of each row's share of training.

    Returns:
      `[num_samples, num_rows]` float32; row `UNKNOWN` is never offered.
    """
    scores = tf.matmul(tower_outputs["query"], candidates, transpose_b=True)
    scores += log_shares
    bonus = recent_bonus(tower_outputs["gates"], recent, echoes)
    samples = tf.repeat(tf.range(tf.shape(recent)[0]), RECENT)
    places = tf.stack([samples, tf.reshape(recent, [-1])], axis=1)
    scores = tf.tensor_scatter_nd_add(scores, places, tf.reshape(bonus, [-1]))
    # The scores of row `UNKNOWN` contain the bonuses of the padding of
    # `recent`, so they are overwritten.
    return tf.concat(
        [tf.fill([tf.shape(scores)[0], 1], NEVER), scores[:, UNKNOWN + 1 :]],
        axis=1,
    )


def sampled_loss(
    tower_outputs: dict[str, tf.Tensor],
    activations: dict[str, tf.Tensor],
    ids: dict[str, tf.Tensor],
    log_expected: tf.Tensor,
    log_shares: tf.Tensor,
) -> tf.Tensor:
    """Returns the sampled softmax loss, the mean over the batch.

    The softmax requires a sum over the vocabulary. The target and the recent
    items are summed exactly. The sum over all other items is estimated from the
    negatives: the term of each negative is divided by the probability that the
    negative was drawn.

    Args:
      tower_outputs: `query` and `gates`.
      activations: `target [num_samples, dim]`, `recent [num_samples, RECENT,
        dim]` and `negatives [num_negatives, dim]`.
      ids: Rows of the same three features, and `echo [num_samples, ECHOES]`.
        The negatives are distinct.
      log_expected: `[num_negatives]` log of the probability that each negative
        was drawn.
      log_shares: `[num_rows]` log of each row's share of training.
    """
    query, recent = tower_outputs["query"], ids["recent"]
    target, negatives = ids["target"], ids["negatives"]
    bonus = recent_bonus(tower_outputs["gates"], recent, ids["echo"])

    is_target = recent == target[:, tf.newaxis]
    target_score = (
        tf.reduce_sum(query * activations["target"], axis=1)
        + tf.gather(log_shares, target)
        + tf.reduce_sum(tf.where(is_target, bonus, 0.0), axis=1)
    )
    recent_scores = (
        tf.einsum("bd,brd->br", query, activations["recent"])
        + tf.gather(log_shares, recent)
        + bonus
    )
    recent_scores = tf.where(
        is_target | (recent == UNKNOWN), NEVER, recent_scores
    )
    negative_scores = (
        tf.matmul(query, activations["negatives"], transpose_b=True)
        + tf.gather(log_shares, negatives)
        - log_expected
    )
    counted = tf.concat([target[:, tf.newaxis], recent], axis=1)
    negative_scores += NEVER * _is_among(
        counted, negatives, tf.size(log_shares)
    )
    scores = tf.concat(
        [target_score[:, tf.newaxis], recent_scores, negative_scores], axis=1
    )
    return tf.reduce_mean(tf.reduce_logsumexp(scores, axis=1) - target_score)


def _is_among(
    counted: tf.Tensor, negatives: tf.Tensor, num_rows: tf.Tensor
) -> tf.Tensor:
    """Finds the negatives that the exact sum of a sample already contains.

    Returns:
      `[num_samples, num_negatives]` float32, positive for these negatives.
    """
    num_negatives = tf.size(negatives)
    # The column of each id is looked up in a table. Comparing all pairs would
    # take about a thousand comparisons per id.
    column_of = tf.tensor_scatter_nd_update(
        tf.fill([num_rows], num_negatives),
        negatives[:, tf.newaxis],
        tf.range(num_negatives),
    )
    columns = tf.gather(column_of, counted)
    samples = tf.broadcast_to(
        tf.range(tf.shape(counted)[0])[:, tf.newaxis], tf.shape(counted)
    )
    # Ids that are not negatives use the last column.
    found = tf.scatter_nd(
        tf.reshape(tf.stack([samples, columns], axis=2), [-1, 2]),
        tf.ones([tf.size(counted)]),
        tf.stack([tf.shape(counted)[0], num_negatives + 1]),
    )
    return found[:, :num_negatives]
