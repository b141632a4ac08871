"""What an embedding asks of its backend: the interface of all three kinds.

`host/backend.py` carries steps out by the host engine, `tpu/backend.py` by the
operations of a TPU, `servers/backend.py` over parameter servers. Whoever uses a
backend is typed by these protocols.
"""

# DOC-MERGE: Which engine carries an embedding out.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from tf_layoutmap._core import strategies


class Backend(Protocol):
    """What carries the steps of a `TPUEmbedding` out.

    A step is read, then enqueued; between the two the embedding is built, if
    it was not before. Sizes that were not declared are those of the first
    batch.

    Attributes:
      is_on_tpu: Whether the tables are on a TPU, or an emulated one.
      mark_shape: Shape of the float32 mark that stands for the gradients of a
        lookup: `()` where steps are known by their order only.
      checks_shapes: Whether `read` compares shapes with those it knows.
    """

    is_on_tpu: ClassVar[bool]
    mark_shape: ClassVar[tuple[int, ...]]
    checks_shapes: bool

    @property
    def variable_device(self) -> str:
        """Where the small variables of a layer are that its steps use."""
        ...

    # Building.

    @property
    def is_built(self) -> bool:
        """Whether tables and engine are there."""
        ...

    def declare(self, shapes: Any, batch_size: int | None) -> None:
        """Takes the arguments of `TPUEmbedding.build`.

        Args:
          shapes: None, a batch size, or the structure of the feature config
            with the input shape of each feature on one replica.
          batch_size: None, or the batch size of every feature.

        Raises:
          ValueError: They contradict each other or what is known.
        """

    def create_tables(self) -> dict[str, dict[str, Any]]:
        """Creates the variables, eagerly.

        Returns:
          `{table name: {variable name: variable}}`: the rows
          `[num_rows, dim]` as `"parameters"`, and the slot variables, float32
          `[num_rows, dim]` or `[num_rows, 1]`.
        """
        ...

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Makes the backend ready for steps on these variables.

        Args:
          variables: What `create_tables` returned; it may hold restored
            values by now.
        """

    # Steps.

    def read(self, features: Any, weights: Any, device: str | None) -> Any:
        """Checks the input of a step, before or after building.

        Args:
          features: Structure of the feature config with ids, as
            `TPUEmbedding.enqueue` takes them.
          weights: None, or the same structure with None or weights.
          device: None, or the device whose step it is.

        Returns:
          The batch, for `enqueue` of the same backend only.

        Raises:
          TypeError: Structures differ in types, or ids are not integers.
          ValueError: Structures, sizes, ranks or weights do not match.
        """
        ...

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Hands over what `read` returned, on a built backend.

        Args:
          batch: What `read` returned.
          training: Bool, or scalar bool tensor.
          name: Which calls of a traced function belong together.
        """

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step.

        Args:
          name: That of its `enqueue`.

        Returns:
          Per feature: float32, `[num_samples, dim]`, or with more dimensions
          as `TPUEmbedding.dequeue` says.
        """
        ...

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Applies the gradients of the step dequeued last.

        Args:
          gradients: Per feature: None, or float32 of the activation's shape.
          name: That of the step's `enqueue`.
        """

    def is_in_program(self) -> bool:
        """Whether the caller is traced into a TPU's program."""
        ...

    # Saving and restoring.

    def before_read(self) -> None:
        """Is called before variables are read: by a save, or by the user."""

    def before_async_copy(self) -> None:
        """Is called before an asynchronous save copies the variables."""

    def before_restore(self) -> None:
        """Is called before a restore writes, on a built backend.

        Raises:
          RuntimeError: Steps in flight belong to the rows of now.
        """

    def note_restore(self) -> None:
        """Is called when a checkpoint fits and is about to be read."""

    def load_variables(self) -> None:
        """Sends the variables to where steps use them."""

    def retrieve_variables(self) -> None:
        """Brings the variables up to date with the steps taken."""


class EngineChanges(Protocol):
    """Which rows of the tables were written since somebody last asked.

    Attributes:
      num_replaced: How often all values may have been replaced, as by a
        restore, which notes no rows.
    """

    num_replaced: int

    def take(self, also: Mapping[str, Any]) -> dict[str, Any]:
        """Copies the rows that were written since the last call.

        Args:
          also: By name of the table, rows to copy besides, int64.

        Returns:
          By name of the table, what changed: `rows`, int64 and ascending;
          `values`, by name of the variable, of these rows; `whole`, by name,
          variables that are small.

        Raises:
          RuntimeError: Somebody else watches by now, or the engine is another.
        """
        ...


class EngineBackend(Backend, Protocol):
    """What the host engine adds: lookups by token, and its statistics."""

    def open(self, features: Any, weights: Any) -> tuple[Any, list[tf.Tensor]]:
        """Opens a lookup that gradients may follow, or not.

        Args:
          features: Structure of the feature config with ids.
          weights: None, or the same structure with None or weights.

        Returns:
          The lookup, for `follow`, and the activations as of `dequeue`.
        """
        ...

    def follow(self, lookup: Any, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Keeps the gradients of a lookup.

        Args:
          lookup: What `open` returned.
          gradients: Per feature: float32 of the activation's shape.

        Returns:
          Their mark, float32 of `mark_shape`.
        """
        ...

    def apply_followed(self, marks: tf.Tensor) -> None:
        """Applies the gradients that a sum of marks stands for.

        Args:
          marks: Float32 of `mark_shape`.
        """

    def evict_keys(
        self, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Takes rows of keys of an open table away.

        Args:
          table: Its number.
          keys: Which keys, int64.
          expired: Whether all keys whose time is over go instead.

        Returns:
          Those that had a row, `[num_evicted]` int64.
        """
        ...

    def resize(self, table: int, capacity: int) -> Any:
        """Gives an open table another capacity.

        Args:
          table: Its number.
          capacity: Of its vocabulary.

        Returns:
          The `spec`, the `variables` of the table, and the `conversion`.

        Raises:
          RuntimeError: If steps are in flight.
        """
        ...

    def watch_changes(self) -> Any:
        """Begins to note which rows are written.

        Returns:
          The `EngineChanges`.

        Raises:
          NotImplementedError: Several processes train the tables.
        """
        ...

    def flush(self) -> None:
        """Lands the update that pipelining holds back, if there is one."""

    def reset(self) -> None:
        """Forgets every step in flight; an update held back lands first."""

    def describe(self) -> dict[str, Any]:
        """Returns what the engine holds; see `TPUEmbedding.stats`."""
        ...


ENGINES = ("auto", "tpu", "host")

# How tables are kept in several processes.
OVER_PROCESSES = ("copied", "divided")
# How the gradients of a row are summed where tables are divided.
ORDERS = ("exact", "folded")


def choose_engine(engine: str, strategy: tf.distribute.Strategy) -> str:
    """Returns `"tpu"`, `"servers"` or `"host"`.

    Args:
      engine: `"auto"`: the TPU under TPUStrategy, the servers under
        ParameterServerStrategy, else the host.
      strategy: The one in scope.

    Raises:
      ValueError: If `engine` is none of `ENGINES`, or cannot run under the
        strategy.
    """
    if engine not in ENGINES:
        raise ValueError(
            f"Argument `engine` must be one of {ENGINES}. "
            f"Received: engine={engine!r}."
        )
    on_tpu = is_tpu_strategy(strategy)
    if engine == "host" and on_tpu:
        raise ValueError(
            'Argument `engine` must be "auto" or "tpu" under TPUStrategy: '
            "a TPU's program cannot call the host engine. Received: "
            f"engine={engine!r}."
        )
    if strategies.on_servers(strategy):
        if engine != "auto":
            raise ValueError(
                'Argument `engine` must be "auto" under '
                "ParameterServerStrategy, where the tables are on its servers."
                f" Received: engine={engine!r}."
            )
        return "servers"
    if engine == "auto":
        return "tpu" if on_tpu else "host"
    return engine


def check_over_processes(over_processes: str, order: str, has_processes: bool):
    """Refuses what is none of `OVER_PROCESSES` or `ORDERS`, or needs processes.

    Raises:
      ValueError: If so.
    """
    if over_processes not in OVER_PROCESSES:
        raise ValueError(
            f"Argument `over_processes` must be one of {OVER_PROCESSES}. "
            f"Received: over_processes={over_processes!r}."
        )
    if order not in ORDERS:
        raise ValueError(
            f"Argument `order` must be one of {ORDERS}. "
            f"Received: order={order!r}."
        )
    if order != "exact" and over_processes != "divided":
        raise ValueError(
            'Argument `order` must be "exact" unless over_processes='
            f'"divided". Received: order={order!r}.'
        )
    if over_processes != "copied" and not has_processes:
        raise ValueError(
            'Argument `over_processes` must be "copied" unless under '
            "MultiWorkerMirroredStrategy, whose processes tables are divided "
            f"among. Received: over_processes={over_processes!r} under "
            f"{type(tf.distribute.get_strategy()).__name__}."
        )


def is_tpu_strategy(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy is a TPUStrategy, of the new or the old class."""
    return isinstance(
        strategy,
        (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
    )
