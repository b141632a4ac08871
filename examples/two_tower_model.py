"""Models of the program `examples/two_tower.py`, their training and metrics."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from two_tower_data import NUM_CATEGORIES, NUM_JOBS, Shop, Views

import tf_layoutmap as tlm

DIM = 16


@keras.saving.register_keras_serializable("two_tower")
class InBatchLogits(keras.layers.Layer):
    """Scores each user of a batch against the items of the same batch.

    Inputs are user vectors `[B, dim]`, item vectors `[B, dim]`, item ids `[B]`
    and the log of the share of each item in training, `[B]`. The output is `[B,
    B]`. The item that user `i` viewed is in column `i` of row `i`.
    """

    def call(self, users, items, item_ids, log_shares):
        """Returns the logits of the sampled softmax."""
        # Popular items are frequent in batches. Subtracting the log of their
        # frequency corrects the resulting bias (the "logQ correction").
        logits = keras.ops.matmul(users, keras.ops.transpose(items))
        logits = logits - log_shares[None, :]
        # Other views of the same item are not negative examples.
        same = keras.ops.equal(item_ids[:, None], item_ids[None, :])
        diagonal = keras.ops.arange(keras.ops.shape(item_ids)[0])
        same = keras.ops.logical_and(
            same, keras.ops.not_equal(diagonal[:, None], diagonal[None, :])
        )
        return keras.ops.where(same, -1e9, logits)


def build_retrieval(shop: Shop, num_shards: int):
    """Returns the training model and its two towers.

    Args:
      shop: Data set, which determines the number of rows of each table.
      num_shards: Shards of each table.

    Returns:
      The compiled model, the user tower and the item tower. A tower maps ids
      and a group to a vector, `[B, DIM]`.
    """
    user_inputs, user_vector = _tower(
        {"user": shop.num_users, "job": NUM_JOBS}, num_shards, "retrieval"
    )
    item_inputs, item_vector = _tower(
        {"item": shop.num_items, "category": NUM_CATEGORIES},
        num_shards,
        "retrieval",
    )
    log_share = keras.Input([], name="log_share")
    logits = InBatchLogits()(
        user_vector, item_vector, item_inputs["item"], log_share
    )
    model = keras.Model(
        {**user_inputs, **item_inputs, "log_share": log_share}, logits
    )
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return (
        model,
        keras.Model(user_inputs, user_vector),
        keras.Model(item_inputs, item_vector),
    )


def build_ranking(shop: Shop, num_shards: int) -> keras.Model:
    """Returns the compiled model from a user and an item to a logit."""
    user_inputs, user_vector = _tower(
        {"user": shop.num_users, "job": NUM_JOBS}, num_shards, "ranking"
    )
    item_inputs, item_vector = _tower(
        {"item": shop.num_items, "category": NUM_CATEGORIES},
        num_shards,
        "ranking",
    )
    x = keras.layers.Concatenate()(
        [user_vector, item_vector, user_vector * item_vector]
    )
    x = keras.layers.Dense(32, "relu")(x)
    model = keras.Model(
        {**user_inputs, **item_inputs}, keras.layers.Dense(1)(x)
    )
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def _tower(num_rows: dict[str, int], num_shards: int, prefix: str):
    """Returns the inputs of a tower and its output, `[B, DIM]`."""
    inputs = {
        name: keras.Input([], dtype="int64", name=name) for name in num_rows
    }
    rows = [
        tlm.layers.ShardedEmbedding(
            rows,
            DIM,
            num_shards=num_shards,
            name=f"{prefix}_{name}",
            optimizer="model",
        )(inputs[name])
        for name, rows in num_rows.items()
    ]
    x = keras.layers.Concatenate()(rows)
    x = keras.layers.Dense(2 * DIM, "relu")(x)
    return inputs, keras.layers.Dense(DIM)(x)


def features_of(shop: Shop, views: Views) -> dict[str, np.ndarray]:
    """Returns the ids and groups of each view's user and item."""
    return {
        "user": views.users,
        "job": shop.job_of[views.users],
        "item": views.items,
        "category": shop.category_of[views.items],
    }


def item_counts(shop: Shop) -> np.ndarray:
    """Returns the number of training views of each item."""
    return np.bincount(shop.training.items, minlength=shop.num_items)


class _Progress(keras.callbacks.Callback):
    """Prints the step and the mean loss of the epoch, six times in a run."""

    def __init__(self, steps: int, say: Callable[[str], None]):
        super().__init__()
        self._steps = steps
        self._say = say
        self._done = 0

    def on_train_batch_end(self, batch, logs=None):
        """Prints a line after each sixth of the steps."""
        self._done += 1
        if self._done * 6 // self._steps > (self._done - 1) * 6 // self._steps:
            loss = (logs or {})["loss"]
            self._say(
                f"  step {self._done:,} of {self._steps:,}: loss {loss:.3f}"
            )


def train(
    model: keras.Model,
    features: dict[str, np.ndarray],
    labels: np.ndarray | None,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> float:
    """Trains for a number of steps and returns the mean loss of the last half.

    Args:
      model: Compiled model.
      features: Arrays of one element per view.
      labels: `[num_views]` labels, or None to label each example with its
        position in the batch, as `InBatchLogits` requires.
      steps: Number of training steps, at least 2.
      batch_size: Views in a step.
      seed: Seed of the order of the examples.
      say: Function that prints a line of progress, about six times in total.
    """
    examples = (features,) if labels is None else (features, labels)
    dataset = (
        tf.data.Dataset.from_tensor_slices(examples)
        .shuffle(len(features["user"]), seed=seed)
        .repeat()
        .batch(batch_size, drop_remainder=True)
    )
    if labels is None:
        dataset = dataset.map(lambda batch: (batch, tf.range(batch_size)))
    # In TensorFlow 2.21, deleting an iterator that autotunes can take a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = dataset.with_options(options)
    # `fit` runs two epochs of half the steps each, so the loss of the second
    # epoch is the mean over the second half of the steps.
    half = steps // 2
    history = model.fit(
        dataset,
        epochs=2,
        steps_per_epoch=half,
        callbacks=[_Progress(2 * half, say)],
        verbose=0,
        shuffle=False,
    )
    return history.history["loss"][-1]


def retrieve(
    shop: Shop,
    user_tower: keras.Model,
    item_tower: keras.Model,
    users: np.ndarray,
    count: int,
) -> np.ndarray:
    """Returns the best items of each user, best first, `[num_users, count]`.

    Items that the user has already viewed in training are left out.
    """
    user_vectors = user_tower.predict(
        {"user": users, "job": shop.job_of[users]}, verbose=0
    )
    return best_items(
        shop, users, user_vectors @ _item_vectors(shop, item_tower), count
    )


def _item_vectors(shop, item_tower):
    """Returns the vectors of all items, `[DIM, num_items]`."""
    items = np.arange(shop.num_items)
    return item_tower.predict(
        {"item": items, "category": shop.category_of}, verbose=0
    ).T


def best_items(
    shop: Shop, users: np.ndarray, scores: np.ndarray, count: int
) -> np.ndarray:
    """Returns the items with the highest scores, `[num_users, count]`.

    Args:
      shop: Data set; items that a user viewed in training are left out.
      users: `[num_users]` distinct users.
      scores: `[num_users, num_items]` scores.
      count: Number of items to return for each user.
    """
    scores = np.array(scores, np.float32)
    row_of = np.full(shop.num_users, -1)
    row_of[users] = np.arange(len(users))
    rows = row_of[shop.training.users]
    scores[rows[rows >= 0], shop.training.items[rows >= 0]] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def recall(retrieved: np.ndarray, viewed: np.ndarray, at: int) -> float:
    """Returns the share of users whose viewed item is among the first `at`.

    >>> recall(np.array([[3, 1], [0, 2]]), np.array([1, 5]), at=2)
    0.5
    """
    return float(np.mean(np.any(retrieved[:, :at] == viewed[:, None], axis=1)))


def ranking_scores(
    shop: Shop, model: keras.Model, users: np.ndarray, items: np.ndarray
) -> np.ndarray:
    """Returns the purchase probability of each pair, `[num_pairs]`."""
    logits = model.predict(
        {
            "user": users,
            "job": shop.job_of[users],
            "item": items,
            "category": shop.category_of[items],
        },
        batch_size=1024,
        verbose=0,
    )
    return 1 / (1 + np.exp(-logits[:, 0].astype(np.float64)))
