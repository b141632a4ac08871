"""Interface of the backends that run the steps of a `TPUEmbedding`.

Each backend runs the steps in a different way:

- `host/backend.py` uses the host engine.
- `host/tpu_backend.py` uses the host engine beside a TPU.
- `tpu/backend.py` uses TensorFlow's TPU operations.
- `process_sharded/backend.py` uses tables that are sharded over processes.
- `servers/backend.py` uses parameter servers.

Code that uses a backend depends only on the protocols in this module.
`choose_engine` selects the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import literals, strategies
from tf_layoutmap.embedding import inputs
from tf_layoutmap.embedding.table_store import TableStore
from tf_layoutmap.vocabulary import kept_strings, key_rows

if TYPE_CHECKING:
    from tf_layoutmap.embedding import resizing


class Backend(Protocol):
    """Runs the steps of a `TPUEmbedding`.

    The caller passes the input of a step to `read`, and then passes the return
    value of `read` to `enqueue`. If the embedding is not built yet, the caller
    builds it after `read` and before `enqueue`. The first batch sets all sizes
    that the caller did not declare.

    Attributes:
      is_on_tpu: Whether the tables are on a TPU or on an emulated TPU.
      has_ordered_steps: Whether gradients belong to a step only by the order of
        the calls, because a TPU program contains the calls.
      is_sharded: Whether the tables are sharded over processes. The backend is
        then a `ShardedBackend`.
      checks_shapes: Whether `read` compares input shapes with the known shapes.
      strings: The strings of vocabularies that keep strings, by the name of the
        table that owns the vocabulary; empty before `start`.
    """

    is_on_tpu: ClassVar[bool]
    has_ordered_steps: ClassVar[bool]
    is_sharded: ClassVar[bool]
    checks_shapes: bool
    strings: Mapping[str, kept_strings.KeptStrings]

    @property
    def has_row_steps(self) -> bool:
        """Whether lookups can return the rows of keys; see `RowBackend`."""
        ...

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of a sum of marks, which represent the gradients of lookups.

        The shape is `()` if the backend identifies gradients only by the order
        of the steps.
        """
        ...

    @property
    def variable_device(self) -> str:
        """Device of the small variables that a layer's steps use."""
        ...

    # Building.

    @property
    def is_built(self) -> bool:
        """Whether the tables and the engine exist."""
        ...

    def declare(self, shapes: Any, batch_size: int | None) -> None:
        """Records the arguments of `TPUEmbedding.build`.

        Args:
          shapes: None, a batch size, or the structure of the feature config
            with the input shape of each feature on one replica.
          batch_size: None, or the batch size of every feature.

        Raises:
          ValueError: If the arguments contradict each other, or contradict
            sizes that are already known.
        """

    def create_tables(self) -> dict[str, dict[str, Any]]:
        """Creates the variables eagerly.

        Returns:
          A dict `{table name: {variable name: variable}}`. The variable
          `"parameters"` holds the rows, `[num_rows, dim]`. The other variables
          are slot variables, float32 `[num_rows, dim]` or `[num_rows, 1]`.
        """
        ...

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Prepares the backend for steps on these variables.

        Args:
          variables: Return value of `create_tables`. The variables can contain
            values from a checkpoint.
        """

    # Steps.

    def read(self, features: Any, weights: Any, device: str | None) -> Any:
        """Checks and reads the input of a step; may be called before `start`.

        Args:
          features: Ids in any form that `TPUEmbedding.enqueue` accepts.
          weights: None, or the same structure with None or weights as leaves.
          device: None, or the device of the replica to which the step belongs.

        Returns:
          The batch, which only `enqueue` of the same backend accepts.

        Raises:
          TypeError: If the structure of `features` or `weights` has other types
            than the feature config, or if ids are not integers.
          ValueError: If a structure, size or rank does not match the feature
            config or the known shapes, or if weights do not match their ids.
        """
        ...

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Starts a step. The backend must be built.

        Args:
          batch: Return value of `read`.
          training: Whether the step trains, as a bool or a scalar bool tensor.
          name: Name that is equal in all calls of a step in a traced function.
        """

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step.

        Args:
          name: The `name` that was passed to `enqueue`.

        Returns:
          One float32 tensor per feature, with a shape that
          `TPUEmbedding.dequeue` documents.
        """
        ...

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Applies the gradients of the most recently dequeued step.

        Args:
          gradients: For each feature, None or a float32 gradient in the shape
            of the activations.
          name: The `name` that was passed to `enqueue`.
        """

    def is_in_program(self) -> bool:
        """Whether the caller is being traced as part of a TPU program."""
        ...

    # Saving and restoring.

    def before_read(self) -> None:
        """Hook that runs before a save or user code reads the variables."""

    def before_async_copy(self) -> None:
        """Hook that runs before an asynchronous save copies the variables."""

    def before_restore(self) -> None:
        """Hook that runs before a restore writes to the variables.

        The hook is called only if the backend is built.

        Raises:
          RuntimeError: If steps are in flight. The gradients of these steps
            belong to the current rows, which the restore would replace.
        """

    def note_restore(self) -> None:
        """Hook that runs after the shape check, before a checkpoint is read."""

    def load_variables(self) -> None:
        """Copies the variables to the device where steps use them."""

    def retrieve_variables(self) -> None:
        """Copies the current rows to the variables."""

    # Changes for deltas.

    @property
    def store(self) -> TableStore:
        """The tables; without variables before `start`."""
        ...

    def watch_changes(self) -> Any:
        """Starts to record which rows are written.

        Returns:
          The `EngineChanges`.
        """
        ...

    def flush(self) -> None:
        """Applies the pending pipelined update, or updates host copies."""


class EngineChanges(Protocol):
    """Record of the table rows that were written since the last call of `take`.

    Attributes:
      num_replaced: Number of operations, such as restores, that may have
        replaced all values without recording which rows changed.
    """

    num_replaced: int

    def take(self, also: Mapping[str, Any]) -> dict[str, Any]:
        """Copies the rows that were written since the last call.

        Args:
          also: Additional row numbers to copy, int64, by table name.

        Returns:
          The changes by table name. Each entry has `rows` (int64 row numbers,
          ascending), `values` (the values of these rows by variable name, as
          `changes.ChangedValues`) and `whole` (the full values of small
          variables by name).

        Raises:
          RuntimeError: If a later call of `watch_changes` has replaced this
            record, or another engine has replaced the recorded engine.
        """
        ...


class EngineBackend(Backend, Protocol):
    """Backend that also supports open lookups, eviction and statistics."""

    def open(self, features: Any, weights: Any) -> tuple[Any, list[tf.Tensor]]:
        """Looks up a batch; the caller may later pass gradients to `follow`.

        Args:
          features: Ids in the structure of the feature config.
          weights: None, or the same structure with None or weights as leaves.

        Returns:
          A tuple of the lookup and the activations. The lookup is an argument
          for `follow`. The activations have the form that `dequeue` returns.
        """
        ...

    def follow(self, lookup: Any, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Stores the gradients of a lookup until `apply_followed` is called.

        Args:
          lookup: The lookup that `open` returned.
          gradients: For each feature, a float32 gradient in the shape of the
            activations.

        Returns:
          The mark of the gradients, float32 of `mark_shape`.
        """
        ...

    def apply_followed(self, marks: tf.Tensor) -> None:
        """Applies the gradients that a sum of marks represents.

        Args:
          marks: Float32 of `mark_shape`.
        """

    def evict_keys(
        self, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Evicts keys from an open table.

        Args:
          table: Index of the table.
          keys: int64 keys to evict.
          expired: Whether to evict all expired keys instead of `keys`.

        Returns:
          The evicted keys, `[num_evicted]` int64. Keys without a row are not
          included.
        """
        ...

    def report_evicted(self) -> int:
        """Calls `on_evict` with evicted keys that were not reported yet.

        Returns:
          The number of these keys, for all tables.
        """
        ...

    def write_rows(
        self, table: int, written: key_rows.RowsToWrite
    ) -> tuple[Any, int]:
        """Writes the rows of keys of an open table.

        Args:
          table: Index of the table.
          written: The keys and their rows.

        Returns:
          The row of each key, or -1 if the key got no row, and the number of
          keys that had no row before.
        """
        ...

    def resize(self, table: int, capacity: int) -> resizing.Resized:
        """Changes the capacity of an open table.

        Args:
          table: Index of the table.
          capacity: New capacity of the vocabulary.

        Returns:
          The spec of the embedding with the new capacity, the new variables of
          the table, and the numbers of kept and dropped keys.

        Raises:
          RuntimeError: If steps are in flight.
        """
        ...

    def reset(self) -> None:
        """Applies the pending pipelined update and discards steps in flight."""

    def describe(self) -> dict[str, Any]:
        """Returns the engine's statistics; see `TPUEmbedding.stats`."""
        ...


class ShardedBackend(EngineBackend, Protocol):
    """Backend whose tables are sharded over processes."""

    def look_up(self, features: Any, weights: Any) -> list[tf.Tensor]:
        """Returns activations without gradients, one per feature.

        Args:
          features: Ids in the structure of the feature config.
          weights: None, or the same structure with None or weights as leaves.
        """
        ...

    def rows_of_ids(
        self, features: Sequence[inputs.FeatureIds | None]
    ) -> list[tf.Tensor]:
        """Returns the row of each id, `[num_ids, dim]`, for each feature."""
        ...


ENGINES = ("auto", "tpu", "host")

# Values of the argument `over_processes`: how tables are distributed over
# processes.
OVER_PROCESSES = ("replicated", "sharded")
# Values of the argument `gradient_aggregation`: the order in which the
# gradients of a row are summed if tables are sharded over processes.
GRADIENT_AGGREGATIONS = ("exact", "local")


def choose_engine(engine: str, strategy: tf.distribute.Strategy) -> str:
    """Returns `"tpu"`, `"servers"` or `"host"`.

    Args:
      engine: One of `ENGINES`. `"auto"` selects the servers under
        ParameterServerStrategy, and the host under other strategies. Under
        TPUStrategy, `"auto"` selects the TPU if it has the embedding engine
        that TensorFlow's `TPUEmbedding` uses, and otherwise the host.
      strategy: The strategy in scope.

    Raises:
      ValueError: If `engine` is not one of `ENGINES`, or if the engine does not
        support the strategy.
    """
    if engine not in ENGINES:
        raise ValueError(
            f"Argument `engine` must be one of {ENGINES}. "
            f"Received: engine={engine!r}."
        )
    on_tpu = is_tpu_strategy(strategy)
    if strategies.on_servers(strategy):
        if engine != "auto":
            raise ValueError(
                'Argument `engine` must be "auto" under '
                "ParameterServerStrategy, where the tables are on its servers."
                f" Received: engine={engine!r}."
            )
        return "servers"
    if engine != "auto":
        return engine
    return "tpu" if on_tpu and _has_embedding_engine(strategy) else "host"


def has_sparse_cores(strategy: tf.distribute.Strategy) -> bool | None:
    """Returns whether the replicas of a strategy have SparseCores.

    The result is None if the features of a TPU are unknown.
    """
    if not is_tpu_strategy(strategy):
        return False
    feature = strategy.extended.tpu_hardware_feature
    if feature.tpu_hardware_feature_proto is None:
        return None
    return feature.embedding_feature == _EmbeddingFeature.V2


_EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
# Whether this process has logged that tables are on the host of a TPU.
_has_logged_host = False


def _has_embedding_engine(strategy: tf.distribute.Strategy) -> bool:
    """Whether a TPU has the embedding engine of TPU v2 to v4.

    If the TPU does not have the engine, the first call logs a warning. If the
    features of the TPU are unknown, the result is True.
    """
    global _has_logged_host
    feature = strategy.extended.tpu_hardware_feature
    if feature.tpu_hardware_feature_proto is None:
        # The resolver knows the TPU only after
        # `tf.tpu.experimental.initialize_tpu_system(resolver)`.
        return True
    kind = feature.embedding_feature
    if kind == _EmbeddingFeature.V1:
        return True
    if not _has_logged_host:
        _has_logged_host = True
        logging.warning(
            "The tables of TPUEmbedding are on the host, and the host engine "
            'trains them: this TPU has %s. Pass engine="host" to select the '
            "host engine explicitly.",
            "SparseCores, which tlm.TPUEmbeddingV2 uses"
            if kind == _EmbeddingFeature.V2
            else "no embedding engine",
        )
    return False


def read_over_processes(
    over_processes: str, gradient_aggregation: str, has_processes: bool
) -> literals.OverProcesses:
    """Checks how `TPUEmbedding` uses several processes.

    Args:
      over_processes: Argument of `TPUEmbedding`.
      gradient_aggregation: Argument of `TPUEmbedding`.
      has_processes: Whether the strategy has several processes.

    Returns:
      `over_processes`.

    Raises:
      ValueError: If a value is not in `OVER_PROCESSES` or
        `GRADIENT_AGGREGATIONS`, or if a value requires several processes and
        there is only one process.
    """
    if over_processes not in OVER_PROCESSES:
        raise ValueError(
            f"Argument `over_processes` must be one of {OVER_PROCESSES}. "
            f"Received: over_processes={over_processes!r}."
        )
    if gradient_aggregation not in GRADIENT_AGGREGATIONS:
        raise ValueError(
            "Argument `gradient_aggregation` must be one of "
            f"{GRADIENT_AGGREGATIONS}. Received: "
            f"gradient_aggregation={gradient_aggregation!r}."
        )
    if gradient_aggregation != "exact" and over_processes != "sharded":
        raise ValueError(
            'Argument `gradient_aggregation` must be "exact" unless '
            'over_processes="sharded". Received: '
            f"gradient_aggregation={gradient_aggregation!r}."
        )
    if over_processes != "replicated" and not has_processes:
        raise ValueError(
            'Argument `over_processes` must be "replicated" unless under '
            "MultiWorkerMirroredStrategy, over whose processes tables are "
            f"sharded. Received: over_processes={over_processes!r} under "
            f"{type(tf.distribute.get_strategy()).__name__}."
        )
    return "replicated" if over_processes == "replicated" else "sharded"


def is_tpu_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy is a `TPUStrategy`, also of the deprecated class."""
    return isinstance(
        strategy,
        (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
    )
