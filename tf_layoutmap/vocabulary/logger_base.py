"""A callback of `fit` that tells what happened to vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tf_layoutmap.vocabulary import epoch_stats


class VocabularyLoggerBase:
    """Adds to the logs of each epoch; a mixin for callbacks of either Keras."""

    # Whose tables it looks at, and their public name.
    _layer_types: ClassVar[tuple[type, ...]]
    _layer_name: ClassVar[str]

    def __init__(
        self,
        layer: Any,
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
            `"num_expired"`. See `stats` of a vocabulary. Of several tables
            the logs have sums, and the ratios of all tables together, as
            `"vocabularies/load"`; the history and TensorBoard have each table.

        Raises:
          TypeError: If `layer` is none.
          ValueError: If a name is another one.
        """
        super().__init__()
        if not isinstance(layer, self._layer_types):
            raise TypeError(
                f"Argument `layer` must be a {self._layer_name}. Received: "
                f"{layer!r}."
            )
        self._stats = epoch_stats.EpochStats(
            layer._named_vocabularies, names, log_dir
        )

    def on_epoch_begin(
        self,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> None:
        """Remembers what was before."""
        self._stats.begin()

    def on_epoch_end(
        self,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> None:
        """Adds to the logs, and to the history what they do not have."""
        found = self._stats.end(epoch)
        if logs is not None:
            logs.update(found.summary)
        model = getattr(self, "model", None)
        history = getattr(getattr(model, "history", None), "history", None)
        if history is not None and found.summary is not found.by_table:
            for name, value in found.by_table.items():
                history.setdefault(name, []).append(value)
