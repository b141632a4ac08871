"""Callback of `fit` that logs the statistics of vocabularies per epoch."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import tensorflow as tf

from tf_layoutmap._core import checks, user_warnings
from tf_layoutmap.vocabulary.state import Vocabulary

if TYPE_CHECKING:
    from tf_layoutmap._core.types import HasEmbedding, Logs

# Counts of one epoch.
_COUNTS = (
    "num_lookups",
    "num_admitted",
    "num_rejected",
    "num_full",
    "num_evicted",
    "num_expired",
)
# Prefix for the statistics of all tables together, in place of a table name.
ALL_TABLES = "vocabularies"
NAMES = ("load", "hit_rate", *_COUNTS, "num_keys")


class EpochNumbers(NamedTuple):
    """The numbers of one epoch.

    Attributes:
      by_table: Values by `"table/name"`.
      summary: If there is one table, equal to `by_table`. Otherwise the values
        of all tables together, by `"vocabularies/name"`.
    """

    by_table: dict[str, float]
    summary: dict[str, float]


class EpochStats:
    """Computes statistics of vocabularies for each epoch."""

    def __init__(
        self,
        vocabularies: Callable[[], Mapping[str, Vocabulary]],
        names: Sequence[str],
        log_dir: str | None,
    ):
        """Stores the settings.

        Args:
          vocabularies: Function that returns the vocabularies by table name.
            Before the tables are built, the result of the function is empty.
          names: Names of the statistics to compute, from `NAMES`.
          log_dir: Folder for TensorBoard, or None.

        Raises:
          ValueError: If a name is not in `NAMES`.
        """
        for name in names:
            checks.check_one_of("names", name, NAMES)
        self._vocabularies = vocabularies
        self._names = list(names)
        self._log_dir = log_dir
        self._writer: Any = None
        self._before: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Stores the statistics at the beginning of an epoch."""
        self._before = self._read()

    def end(self, epoch: int) -> EpochNumbers:
        """Returns the numbers of an epoch, and writes them for TensorBoard."""
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
            # If there were no lookups, the ratio is 1, because no key was
            # unknown.
            "hit_rate": values["num_known"] / lookups if lookups else 1.0,
        }
        return {
            f"{table}/{name}": float({**values, **ratios}[name])
            for name in self._names
        }

    def _read(self) -> dict[str, dict[str, Any]]:
        return {
            table: cast("dict[str, Any]", vocabulary.stats())
            for table, vocabulary in self._vocabularies().items()
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
    """Returns the metadata of `tf.summary.scalar`.

    `tf.summary.scalar` is not used, because it works only if TensorBoard is
    installed.
    """
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    metadata.data_class = 1  # DATA_CLASS_SCALAR
    return metadata


class VocabularyLoggerBase:
    """Adds statistics of vocabularies to the logs of each epoch.

    This class is a mixin for callbacks of Keras 3 and of tf_keras.
    """

    # The layer types that the callback supports, and the name of these types in
    # error messages.
    _layer_types: ClassVar[tuple[type, ...]]
    _layer_name: ClassVar[str]

    def __init__(
        self,
        layer: HasEmbedding,
        log_dir: str | None = None,
        names: Sequence[str] = ("load", "hit_rate", "num_evicted"),
    ):
        """Creates the callback.

        Args:
          layer: Layer with tables that have open vocabularies. For a
            `ShardedEmbedding`, the name of the table is the name of the layer.
          log_dir: Folder for TensorBoard, or None.
          names: Names of the statistics to log; see `stats` of a vocabulary.
            `"load"` and `"num_keys"` are values at the end of the epoch.
            `"num_lookups"`, `"num_admitted"`, `"num_rejected"`, `"num_full"`,
            `"num_evicted"` and `"num_expired"` are counts in the epoch.
            `"hit_rate"` is the ratio of the epoch's lookups whose key
            already had a row. If there are several tables, the logs contain the
            counts and ratios of all tables together, such as
            `"vocabularies/load"`. The history and TensorBoard contain the
            values of each table.

        Raises:
          TypeError: If `layer` has an unsupported type.
          ValueError: If a name is not supported.
        """
        super().__init__()
        if not isinstance(layer, self._layer_types):
            raise TypeError(
                f"Argument `layer` must be a {self._layer_name}. Received: "
                f"{layer!r}."
            )
        vocabularies = cast("Any", layer)._named_vocabularies
        self._stats = EpochStats(vocabularies, names, log_dir)
        self._layer_label = cast("Any", layer).name
        self._has_warned = False

    def on_epoch_begin(
        self,
        epoch: int,
        logs: Logs | None = None,
    ) -> None:
        """Stores the statistics at the beginning of the epoch."""
        self._stats.begin()

    def on_epoch_end(
        self,
        epoch: int,
        logs: Logs | None = None,
    ) -> None:
        """Adds the statistics to the logs and the history.

        If the layer has no open vocabulary, the first call issues a warning.
        """
        epoch_stats = self._stats.end(epoch)
        if not epoch_stats.by_table and not self._has_warned:
            self._has_warned = True
            user_warnings.warn(
                "VocabularyLogger logs no statistics, because layer "
                f"{self._layer_label!r} has no open vocabulary. Pass a layer "
                "that is created with a tlm.vocabulary.OpenVocabulary."
            )
        if logs is not None:
            logs.update(epoch_stats.summary)
        model = getattr(self, "model", None)
        history = getattr(getattr(model, "history", None), "history", None)
        if (
            history is not None
            and epoch_stats.summary is not epoch_stats.by_table
        ):
            for name, value in epoch_stats.by_table.items():
                history.setdefault(name, []).append(value)
