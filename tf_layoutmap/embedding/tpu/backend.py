"""The backend of `TPUEmbedding` for a TPU.

`TPUBackend` implements the interface in `tf_layoutmap.embedding.backend` with
TensorFlow's TPU embedding ops. The backend checks and enqueues batches,
dequeues activations, and sends gradients. The backend also synchronizes the
host copies of the tables with the TPU.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tf_layoutmap.embedding import (
    build_shapes,
    packing,
    replicas,
    steps,
    tpu_program,
)
from tf_layoutmap.embedding.table_store import HostStore, TableStore
from tf_layoutmap.embedding.table_variable import HOST
from tf_layoutmap.embedding.tpu import batches, tables
from tf_layoutmap.embedding.tpu import config_proto as tpu_config_proto
from tf_layoutmap.embedding.tpu import ops as tpu_ops
from tf_layoutmap.embedding.tpu import shapes as tpu_shapes
from tf_layoutmap.embedding.tpu.changes import HostCopyChanges
from tf_layoutmap.embedding.tpu.config_proto import TPUSpec, create_config
from tf_layoutmap.vocabulary.kept_strings import KeptStrings


class TPUBackend:
    """A backend that runs the steps of a `TPUEmbedding` on a TPU."""

    is_on_tpu: ClassVar[bool] = True
    has_ordered_steps: ClassVar[bool] = True
    is_sharded: ClassVar[bool] = False
    strings: Mapping[str, KeptStrings] = types.MappingProxyType({})
    # User programs can set this attribute to False.
    checks_shapes = True

    def __init__(
        self,
        feature_config: Any,
        tpu: TPUSpec,
        strategy_replicas: replicas.Replicas,
        is_pipelined: bool,
    ):
        """Reads the hosts and cores of a TPUStrategy.

        Args:
          feature_config: Nested structure of features.
          tpu: Tables, features and optimizers.
          strategy_replicas: Replicas of a TPUStrategy.
          is_pipelined: Whether the lookup of a step overlaps with the previous
            step.
        """
        self._feature_config = feature_config
        self._tpu = tpu
        self._spec = tpu.spec
        self._cores = tpu_config_proto.Cores(strategy_replicas.strategy)
        self._is_pipelined = is_pipelined
        self._shapes = tpu_shapes.OutputShapes(tpu.spec.features)
        self._reader = batches.BatchReader(
            feature_config,
            tpu.spec.features,
            strategy_replicas,
            self._cores,
            self._shapes,
        )
        self._modes = steps.StepModes(finds_forward_steps=False)
        self._config: bytes | None = None
        self._sync = tables.TableSync()
        self._store: TableStore = HostStore(None)
        self._changes: HostCopyChanges | None = None

    @property
    def has_row_steps(self) -> bool:
        """Returns False, because the rows are on the TPU."""
        return False

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape `()`, because a TPU identifies steps by their order.

        The gradient of the mark only shows that the backward pass has run.
        """
        return ()

    @property
    def variable_device(self) -> str:
        """Device of the small variables that a layer's steps use: the host."""
        return HOST

    @property
    def is_built(self) -> bool:
        """Whether the TPU is configured."""
        return self._config is not None

    @property
    def config_proto(self) -> bytes | None:
        """The serialized configuration, or None before `create_tables`."""
        return self._config

    @property
    def _configured(self) -> bytes:
        assert self._config is not None  # See `create_tables`.
        return self._config

    def declare(self, shapes: Any, batch_size: int | None) -> None:
        """Records the shapes and the batch size that are passed to `build`."""
        incoming = build_shapes.read_arguments(
            self._feature_config,
            self._spec.features,
            shapes,
            batch_size,
            has_positions=True,
        )
        if not self.is_built:
            self._shapes.settle(incoming)
        elif incoming is not None:
            self._shapes.check(incoming)

    def create_tables(self) -> dict[str, dict[str, Any]]:
        """Creates the host copies of the tables, and configures the TPU.

        Raises:
          RuntimeError: If the TPU is already configured.
        """
        if tpu_ops.is_initialized():
            raise RuntimeError(
                "TPU is already initialized for embeddings. A TPU supports "
                "one TPUEmbedding at a time, and another one has been built. "
                "Initialize the TPU system again before you build this one."
            )
        proto = create_config(
            self._tpu,
            self._shapes.settled(),
            num_hosts=self._cores.num_hosts,
            num_replicas=self._cores.num_replicas,
            num_cores_per_replica=self._cores.num_cores_per_replica,
            is_pipelined=self._is_pipelined,
        )
        # Each line of the configuration is logged separately, because a long
        # configuration does not fit into one log message.
        for line in ("TPU embedding configuration:", *str(proto).splitlines()):
            logging.info("%s", line)
        variables = tables.create_tables(self._tpu, self._cores.hosts)
        for by_name in variables.values():
            for host_copy in by_name.values():
                host_copy.watch(self._sync)
        config = proto.SerializeToString()
        tpu_ops.configure(config)
        self._config = config
        return variables

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Sends the variables, with initial or restored values, to the TPU."""
        self._store = self._store.with_tables(self._spec, variables)
        self._sync.start(
            tables.TableTransfer(
                self._tpu, self._configured, self._cores.hosts, variables
            )
        )

    def read(self, features: Any, weights: Any, device: str | None) -> Any:
        """Checks the input of a step; see `TPUEmbedding.enqueue`."""
        if not self.checks_shapes and not self.is_built:
            raise ValueError(
                "Shapes must be known before the first step if `enqueue` does "
                "not check them; call `build` with the shapes of one "
                "replica's inputs first."
            )
        return self._reader.read(
            features,
            weights,
            device,
            checks_shapes=self.checks_shapes,
            settles_shapes=not self.is_built,
        )

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Enqueues a batch that `read` returned."""
        self._modes.enqueued(name, training)
        if batch.in_program:
            values, weights = batch.steps[0]
            # `tf.where` selects the mode from two constants, even if `training`
            # is a Python bool. The TPU compiler recognizes this pattern, and
            # can correct a wrong mode.
            tpu_program.run_on_host(
                lambda: self._enqueue_on(
                    None,
                    values,
                    weights,
                    name,
                    tf.where(training, "train", "inference"),
                )
            )
            return
        mode = _mode(training)
        if batch.device is not None:
            values, weights = batch.steps[0]
            self._enqueue_on(
                self._cores.by_name(batch.device), values, weights, name, mode
            )
            return
        for replica, (values, weights) in enumerate(batch.steps):
            for core_index, core in enumerate(self._cores.of_replica(replica)):
                self._enqueue_on(core, values, weights, name, mode, core_index)

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        self._modes.dequeued(name)
        return tpu_ops.receive(len(self._spec.features), self._configured, name)

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Sends the gradients of the last dequeued step, one per feature."""
        self._modes.applied(name)
        checked = []
        for feature, gradient, shape in zip(
            self._spec.features, gradients, self._gradient_shapes()
        ):
            if gradient is None:
                gradient = steps.zero_gradient(feature, shape)
            gradient = steps.read_gradient(
                feature, gradient, tf.TensorShape(shape)
            )
            # The reshape sets the static shape of a gradient whose shape is
            # unknown.
            checked.append(tf.reshape(gradient, shape))
        rates = [
            steps.current_learning_rate(rate, self._table_with(rate))
            for rate in self._tpu.learning_rates
        ]
        tpu_ops.send(checked, rates, self._configured, name)

    def is_in_program(self) -> bool:
        """Whether the caller is being traced as part of a TPU program."""
        try:
            return tpu_program.is_in_tpu_program()
        except RuntimeError:  # In control flow.
            return False

    def before_read(self) -> None:
        """Marks the host copies as stale; the next save updates the copies."""
        self._sync.mark_stale()

    def before_async_copy(self) -> None:
        """Updates the host copies from the TPU."""
        self._sync.retrieve()

    def before_restore(self) -> None:
        """Clears the state of an earlier restore, which may have failed."""
        self._sync.begin_restore()

    def note_restore(self) -> None:
        """Does nothing, because a restored variable notifies `TableSync`."""

    def load_variables(self) -> None:
        """Sends the host copies to the TPU."""
        self._sync.load()

    def retrieve_variables(self) -> None:
        """Updates the host copies from the TPU."""
        self._sync.retrieve()

    @property
    def store(self) -> TableStore:
        """The host copies of the tables; without variables before `start`."""
        return self._store

    def watch_changes(self) -> Any:
        """Updates the host copies, and returns a record without rows."""
        if self._changes is not None:
            self._changes.is_current = False
        self._changes = HostCopyChanges(self._store)
        self.flush()
        return self._changes

    def flush(self) -> None:
        """Updates the host copies, all of whose rows may change."""
        self._sync.retrieve()
        if self._changes is not None:
            self._changes.num_replaced += 1

    def _enqueue_on(
        self,
        core: tpu_config_proto.Core | None,
        values,
        weights,
        name,
        mode,
        core_index: int | None = None,
    ):
        """Enqueues on the host of `core`. In a TPU program, `core` is None."""
        # A scope `tf.device(None)` would cancel the device scope of the caller.
        with tf.device(core.host) if core else contextlib.nullcontext():
            if isinstance(values, packing.PackedIds):
                values, weights = packing.unpack_ids(
                    self._spec.features, values
                )
            num_cores = self._cores.num_cores_per_replica
            if core_index is not None and num_cores:
                values = [
                    _core_samples(value, core_index, num_cores)
                    for value in values
                ]
                weights = [
                    _core_samples(weight, core_index, num_cores)
                    for weight in weights
                ]
            lists = batches.read_lists(self._spec.features, values, weights)
            checks = batches.check_ids(self._spec, lists.ids) if core else []
            with tf.control_dependencies(checks):
                tpu_ops.enqueue(
                    lists,
                    mode=mode,
                    ordinal=core.ordinal if core else -1,
                    combiners=[table.combiner for table in self._spec.tables],
                    name=name,
                )

    def _gradient_shapes(self) -> list[list[int]]:
        num_cores = self._cores.num_cores_per_replica or 1
        return [
            [shape[0] * num_cores, *shape[1:], self._spec.table_of(feature).dim]
            for feature, shape in zip(
                self._spec.features, self._shapes.settled()
            )
        ]

    def _table_with(self, rate):
        for table, optimizer in zip(self._spec.tables, self._tpu.optimizers):
            if optimizer.learning_rate == rate:
                return table
        raise AssertionError("Every learning rate must belong to a table.")


def _mode(training: Any):
    if tf.is_tensor(training) or isinstance(training, tf.Variable):
        return tf.where(training, "train", "inference")
    return "train" if training else "inference"


def _core_samples(value: Any, core_index: int, num_cores: int) -> Any:
    if value is None:
        return None
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.split(value, num_split=num_cores, axis=0)[core_index]
    return tf.split(value, num_or_size_splits=num_cores, axis=0)[core_index]
