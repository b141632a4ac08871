"""What happened to vocabularies, among the logs of `fit` of Keras 3."""

from __future__ import annotations

import keras

from tf_layoutmap.layers.keras3.sharded_embedding import ShardedEmbedding
from tf_layoutmap.layers.keras3.tpu_embedding import TPUEmbedding
from tf_layoutmap.vocabulary.logger import VocabularyLoggerBase


class VocabularyLogger(VocabularyLoggerBase, keras.callbacks.Callback):
    """Adds what happened to open vocabularies to the logs of each epoch.

    The progress bar and the history of `fit` show it as `"words/load"`, where
    `words` is the table; TensorBoard, if it has a folder, as
    `"vocabulary/words/load"`. Of several tables the progress bar shows
    `"vocabularies/load"` and so on, of all of them together.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(8, 2, tf.ones, name="words")
    >>> layer = tlm.layers.TPUEmbedding(
    ...     tpu.FeatureConfig(words), tpu.SGD(0.1),
    ...     vocabularies={"words": tlm.OpenVocabulary(8)})
    >>> logger = tlm.layers.VocabularyLogger(layer)
    >>> layer.build(None)
    >>> logs = {}
    >>> logger.on_epoch_begin(0)
    >>> logger.on_epoch_end(0, logs)
    >>> logs["words/load"]
    0.0
    """

    _layer_types = (TPUEmbedding, ShardedEmbedding)
    _layer_name = "tlm.layers.TPUEmbedding, or a ShardedEmbedding"
