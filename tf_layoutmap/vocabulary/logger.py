"""A callback of `fit` that tells what happened to vocabularies."""

# DOC-MERGE: What happened to vocabularies in each epoch of `fit`.
from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.vocabulary.state import Vocabulary

# Of the epoch.
_COUNTS = (
    "num_lookups",
    "num_admitted",
    "num_rejected",
    "num_full",
    "num_evicted",
    "num_expired",
)
# In place of a table's name, for numbers of all tables together.
ALL_TABLES = "vocabularies"
NAMES = ("load", "share_known", *_COUNTS, "num_keys")


class EpochNumbers(NamedTuple):
    """The numbers of one epoch.

    Attributes:
      by_table: `"table/name"` to the value.
      summary: The same of one table; of several `"vocabularies/name"`, of all
        tables together.
    """

    by_table: dict[str, float]
    summary: dict[str, float]


class EpochStats:
    """The statistics of vocabularies, epoch by epoch."""

    def __init__(
        self,
        vocabularies: Callable[[], Mapping[str, Vocabulary]],
        names: Sequence[str],
        log_dir: str | None,
    ):
        """Takes what to look at.

        Args:
          vocabularies: Returns them, by table; none before they are built.
          names: Of `NAMES`.
          log_dir: Where TensorBoard finds them, or None.

        Raises:
          ValueError: If a name is another one.
        """
        for name in names:
            checks.check_one_of("names", name, NAMES)
        self._vocabularies = vocabularies
        self._names = list(names)
        self._log_dir = log_dir
        self._writer: Any = None
        self._before: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Remembers what was before an epoch."""
        self._before = self._read()

    def end(self, epoch: int) -> EpochNumbers:
        """Returns the numbers of an epoch; writes them for each table."""
        total: collections.Counter[str] = collections.Counter()
        by_table: dict[str, float] = {}
        now = self._read()
        for table, stats in now.items():
            before = self._before.get(table, {})
            values = {name: stats[name] for name in ("num_keys", "num_rows")}
            values.update(
                {
                    name: stats[name] - before.get(name, 0)
                    for name in (*_COUNTS, "num_known")
                }
            )
            total.update(values)
            by_table.update(self._named(table, values))
        if self._log_dir is not None:
            self._write(epoch, by_table)
        return EpochNumbers(
            by_table,
            by_table if len(now) < 2 else self._named(ALL_TABLES, total),
        )

    def _named(
        self,
        table: str,
        values: Mapping[str, int],
    ) -> dict[str, float]:
        lookups = values["num_lookups"]
        ratios = {
            "load": values["num_keys"] / values["num_rows"],
            # Without a lookup none was unknown.
            "share_known": values["num_known"] / lookups if lookups else 1.0,
        }
        return {
            f"{table}/{name}": float({**values, **ratios}[name])
            for name in self._names
        }

    def _read(self) -> dict[str, dict[str, Any]]:
        return {
            table: one.stats() for table, one in self._vocabularies().items()
        }

    def _write(self, epoch: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._log_dir)
        with self._writer.as_default():
            for name, value in values.items():
                tf.summary.write(
                    f"vocabulary/{name}",
                    tf.constant(value),
                    epoch,
                    _scalar_metadata(),
                )
        self._writer.flush()


def _scalar_metadata() -> Any:
    """What `tf.summary.scalar` writes, which asks for TensorBoard itself."""
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    metadata.data_class = 1  # DATA_CLASS_SCALAR
    return metadata


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
        self._stats = EpochStats(layer._named_vocabularies, names, log_dir)

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
