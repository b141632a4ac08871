"""Checks that the replicas of several processes run the same step.

The checks run in each process on values that were gathered from all processes,
so that all processes raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding.configs import config


def check_ids(
    spec: config.EmbeddingSpec,
    features: Sequence[embedding_inputs.FeatureIds],
    process: int,
) -> list[tf.Operation]:
    """Returns checks that the ids of a process are not out of range.

    Tables with open vocabularies are not checked, because their keys can have
    any value.

    Args:
      spec: Tables and features.
      features: Inputs of one replica of the process.
      process: Index of the process.
    """
    checks = []
    for feature, inputs in zip(spec.features, features):
        if spec.table_of(feature).vocabulary is not None:
            continue
        num_rows = spec.table_of(feature).num_rows
        ids = tf.cast(inputs.ids, tf.int64)
        is_bad = (ids < 0) | (ids >= num_rows)
        # If no id is out of range, `first` equals the number of ids, and the
        # message below is not used.
        first = tf.argmax(tf.concat([is_bad, [True]], 0))
        # If all ids are in range, `bad_id` is the appended 0.
        bad_id = tf.gather(tf.concat([ids, [0]], 0), first)
        checks.append(
            tf.debugging.Assert(
                ~tf.reduce_any(is_bad),
                [
                    tf.strings.join(
                        [
                            f"Process {process}: feature {feature.name}, "
                            "sample ",
                            tf.strings.as_string(_sample_of(inputs, first)),
                            ": id ",
                            tf.strings.as_string(bad_id),
                            f" is outside table {spec.table_of(feature).name} "
                            f"with {num_rows} rows",
                        ]
                    )
                ],
            )
        )
    return [check for check in checks if check is not None]


def check_modes(
    modes: Sequence[tf.Tensor],
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all replicas have the same mode.

    If tables have open vocabularies, the engine enqueues the batches of all
    replicas as one step. The mode of this step is either training or
    forward-only.

    Args:
      modes: For each replica, whether its step receives gradients.
      num_local: Number of replicas of each process.
    """
    values = tf.stack(modes)
    other = tf.argmax(values != values[0])
    check = tf.debugging.Assert(
        ~tf.reduce_any(values != values[0]),
        [
            tf.strings.join(
                [
                    "All replicas must enqueue a step with the same "
                    "`training`. Process 0 has ",
                    tf.strings.as_string(values[0]),
                    ", process ",
                    tf.strings.as_string(other // num_local),
                    " ",
                    tf.strings.as_string(tf.gather(values, other)),
                    ".",
                ]
            )
        ],
    )
    return [] if check is None else [check]


def _sample_of(
    inputs: embedding_inputs.FeatureIds, index: tf.Tensor
) -> tf.Tensor:
    """Returns the index of the sample that contains the id `ids[index]`."""
    splits = tf.cast(inputs.splits, tf.int64)
    if splits.shape.rank == 2:  # Sparse input.
        return tf.gather(tf.concat([splits[:, 0], [0]], 0), index)
    if splits.shape[0] == 0:  # Dense input.
        num_ids = tf.maximum(tf.size(inputs.ids, tf.int64), 1)
        return index * tf.cast(inputs.num_samples, tf.int64) // num_ids
    return (
        tf.searchsorted(
            splits, index[tf.newaxis], side="right", out_type=tf.int64
        )[0]
        - 1
    )


def check_writes(
    fingerprints: tf.Tensor,
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all processes have written the same rows.

    Args:
      fingerprints: `[num_replicas]` int64 fingerprint of each replica.
      num_local: Number of replicas of each process.
    """
    is_other = fingerprints != fingerprints[0]
    check = tf.debugging.Assert(
        ~tf.reduce_any(is_other),
        [
            tf.strings.join(
                [
                    "`write` of a vocabulary and tlm.vocabulary.import_rows "
                    "must be called in all processes with the same keys and "
                    "rows; otherwise their tables differ. Process ",
                    tf.strings.as_string(tf.argmax(is_other) // num_local),
                    " has written other rows than process 0.",
                ]
            )
        ],
    )
    return [] if check is None else [check]


def check_restores(
    counts: tf.Tensor,
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all replicas have the same number of restores.

    Args:
      counts: `[num_replicas]` int64 number of restores of each replica.
      num_local: Number of replicas of each process.
    """
    return _check_counts(
        counts,
        num_local,
        "A checkpoint must be restored in all processes; otherwise their "
        "tables differ. Process 0 has restored ",
        " times",
    )


def check_updates(counts: tf.Tensor) -> list[tf.Operation]:
    """Returns a check that all processes have applied the same updates.

    If only some processes have applied the pending pipelined update, the rows
    of a lookup are from different steps.

    Args:
      counts: `[num_processes]` int64 number of updates of each process.
    """
    return _check_counts(
        counts,
        1,
        "The pending pipelined update must be applied in all processes; "
        "otherwise a step looks up rows of different steps. Call `flush` in "
        "all processes, and read `embedding_tables` in all processes or in "
        "none. Process 0 has applied ",
        " updates",
    )


def _check_counts(
    counts: tf.Tensor, num_local: int, message: str, unit: str
) -> list[tf.Operation]:
    """Returns a check that all counts are equal.

    Args:
      counts: `[num_replicas]` counts of the replicas.
      num_local: Number of replicas of each process.
      message: Text before the count of the first process.
      unit: Text after each count.
    """
    is_other = counts != counts[0]
    other = tf.argmax(is_other)
    text = tf.strings.as_string
    check = tf.debugging.Assert(
        ~tf.reduce_any(is_other),
        [
            tf.strings.join(
                [
                    message,
                    text(counts[0]),
                    f"{unit}, process ",
                    text(other // num_local),
                    " ",
                    text(tf.gather(counts, other)),
                    f"{unit}.",
                ]
            )
        ],
    )
    return [] if check is None else [check]


def check_rates(
    spec: config.EmbeddingSpec,
    hyperparameters: Sequence[Sequence[tf.Tensor]],
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all replicas have the same learning rates.

    Only learning rates that are functions can differ.

    Args:
      spec: The tables.
      hyperparameters: For each replica, one vector per table, which starts with
        the learning rate.
      num_local: Number of replicas of each process.
    """
    dynamic = [
        (number, table.name)
        for number, table in enumerate(spec.tables)
        if table.optimizer is not None and table.optimizer.has_dynamic_rate
    ]
    if not dynamic:
        return []
    rates = tf.stack(
        [
            tf.stack([vectors[number][0] for number, _ in dynamic])
            for vectors in hyperparameters
        ]
    )
    # The engine raises an error if all rates are NaN.
    is_nan = tf.math.is_nan(rates)
    is_other = (rates != rates[0]) & ~(is_nan & is_nan[0])
    replica = tf.argmax(tf.reduce_any(is_other, 1))
    table = tf.argmax(tf.gather(is_other, replica))
    text = tf.strings.as_string
    check = tf.debugging.Assert(
        ~tf.reduce_any(is_other),
        [
            tf.strings.join(
                [
                    "A learning rate that is a function must return the same "
                    "number in all replicas. It returned ",
                    text(rates[0, table], shortest=True),
                    " in process 0 and ",
                    text(
                        tf.gather_nd(rates, tf.stack([replica, table])),
                        shortest=True,
                    ),
                    " in process ",
                    text(replica // num_local),
                    " for table ",
                    tf.gather(
                        tf.constant([name for _, name in dynamic]), table
                    ),
                    ". Compute it from values that are equal in all processes, "
                    "such as the number of steps.",
                ]
            )
        ],
    )
    return [] if check is None else [check]
