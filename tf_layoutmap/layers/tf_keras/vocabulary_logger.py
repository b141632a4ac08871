"""What happened to vocabularies, among the logs of `fit` of tf_keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tf_keras

from tf_layoutmap.layers.tf_keras.sharded_embedding import ShardedEmbedding
from tf_layoutmap.layers.tf_keras.tpu_embedding import TPUEmbedding
from tf_layoutmap.vocabulary import epoch_stats


class VocabularyLogger(tf_keras.callbacks.Callback):
    """Adds what happened to open vocabularies to the logs of each epoch.

    The progress bar and the history of `fit` show it as `"words/load"`, where
    `words` is the table; TensorBoard, if it has a folder, as
    `"vocabulary/words/load"`.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(8, 2, tf.ones, name="words")
    >>> layer = tlm.layers.tf_keras.TPUEmbedding(
    ...     tpu.FeatureConfig(words), tpu.SGD(0.1),
    ...     vocabularies={"words": tlm.OpenVocabulary(8)})
    >>> logger = tlm.layers.tf_keras.VocabularyLogger(layer)
    >>> layer.build(None)
    >>> logs = {}
    >>> logger.on_epoch_begin(0)
    >>> logger.on_epoch_end(0, logs)
    >>> logs["words/load"]
    0.0
    """

    def __init__(
        self, layer: TPUEmbedding | ShardedEmbedding,
        log_dir: str | None = None,
        names: Sequence[str] = ("load", "share_known", "num_evicted"),
    ):
        """Makes the callback.

        Args:
          layer: Whose tables with open vocabularies it looks at. The table of
            a `ShardedEmbedding` has the name of the layer.
          log_dir: A folder for TensorBoard, or None.
          names: What to tell: `"load"` and `"num_keys"` at the end of the
            epoch; and of the epoch `"share_known"`: which share of the lookups
            had a row before, `"num_lookups"`, `"num_admitted"`,
            `"num_rejected"`, `"num_full"`, `"num_evicted"`,
            `"num_expired"`. See `stats` of a vocabulary.

        Raises:
          TypeError: If `layer` is none.
          ValueError: If a name is another one.
        """
        super().__init__()
        if not isinstance(layer, TPUEmbedding | ShardedEmbedding):
            raise TypeError(
                "Argument `layer` must be a tlm.layers.tf_keras.TPUEmbedding, "
                f"or a ShardedEmbedding. Received: {layer!r}.")
        self._stats = epoch_stats.EpochStats(
            layer._named_vocabularies, names, log_dir)

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None,
    ) -> None:
        """Remembers what was before."""
        self._stats.begin()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None,
    ) -> None:
        """Adds to the logs."""
        found = self._stats.end(epoch)
        if logs is not None:
            logs.update(found)
