"""Callback that adds statistics of open vocabularies to the logs of `fit`."""

from __future__ import annotations

import tf_keras

from tf_layoutmap.layers.tf_keras.sharded_embedding import ShardedEmbedding
from tf_layoutmap.layers.tf_keras.tpu_embedding import TPUEmbedding
from tf_layoutmap.vocabulary.logger import VocabularyLoggerBase


class VocabularyLogger(VocabularyLoggerBase, tf_keras.callbacks.Callback):
    """Adds statistics of open vocabularies to the logs of each epoch.

    The progress bar and the history of `fit` contain each statistic under a key
    such as `"words/load"`, where `words` is the name of the table. If a log
    directory is set, the statistics are also written for TensorBoard, with
    names such as `"vocabulary/words/load"`. If there are several tables, the
    progress bar shows totals over all tables, with names such as
    `"vocabularies/load"`.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(8, 2, tf.ones, name="words")
    >>> layer = tlm.layers.tf_keras.TPUEmbedding(
    ...     tpu.FeatureConfig(words), tpu.SGD(0.1),
    ...     vocabularies={"words": tlm.vocabulary.OpenVocabulary(8)})
    >>> logger = tlm.layers.tf_keras.VocabularyLogger(layer)
    >>> layer.build(None)
    >>> logs = {}
    >>> logger.on_epoch_begin(0)
    >>> logger.on_epoch_end(0, logs)
    >>> logs["words/load"]
    0.0
    """

    _layer_types = (TPUEmbedding, ShardedEmbedding)
    _layer_name = "tlm.layers.tf_keras.TPUEmbedding, or a ShardedEmbedding"
