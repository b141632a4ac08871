"""Carries the steps of a `TPUEmbedding` out on a TPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tf_layoutmap.embedding import build_shapes, packing, replicas, steps
from tf_layoutmap.embedding.table_variable import HOST
from tf_layoutmap.embedding.tpu import batches, tables
from tf_layoutmap.embedding.tpu import config_proto as tpu_config_proto
from tf_layoutmap.embedding.tpu import ops as tpu_ops
from tf_layoutmap.embedding.tpu import shapes as tpu_shapes
from tf_layoutmap.embedding.tpu.config_proto import TPUSpec, create_config


class TPUBackend:
    """The operations of a TPU in place of the host engine."""

    is_on_tpu: ClassVar[bool] = True
    # Steps are known by their order: the gradient only says that one came.
    mark_shape: ClassVar[tuple[int, ...]] = ()
    # Programs switch it off.
    checks_shapes = True

    def __init__(
        self,
        feature_config: Any,
        tpu: TPUSpec,
        strategy_replicas: replicas.Replicas,
        is_pipelined: bool,
    ):
        """Reads the strategy in scope, a TPUStrategy."""
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

    @property
    def variable_device(self) -> str:
        """Where a layer's own small variables are: the host."""
        return HOST

    @property
    def is_built(self) -> bool:
        """Whether the TPU is configured."""
        return self._config is not None

    @property
    def config_proto(self) -> bytes | None:
        """The serialized configuration; None before `create_tables`."""
        return self._config

    @property
    def _configured(self) -> bytes:
        assert self._config is not None  # Steps come after `create_tables`.
        return self._config

    def declare(self, shapes: Any, batch_size: int | None) -> None:
        """Takes the arguments of `build`."""
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
        """Creates the host copies and configures the TPU.

        Raises:
          RuntimeError: If it is configured already.
        """
        if tpu_ops.is_initialized():
            raise RuntimeError(
                "TPU is already initialized for embeddings: by another "
                "TPUEmbedding, of which a TPU holds one. Initialize the TPU "
                "system again to make another."
            )
        proto = create_config(
            self._tpu,
            self._shapes.settled(),
            num_hosts=self._cores.num_hosts,
            num_replicas=self._cores.num_replicas,
            num_cores_per_replica=self._cores.num_cores_per_replica,
            is_pipelined=self._is_pipelined,
        )
        # One line each: a long configuration does not fit into one message.
        for line in ("TPU embedding configuration:", *str(proto).splitlines()):
            logging.info("%s", line)
        variables = tables.create_tables(self._tpu, self._cores.hosts)
        for by_name in variables.values():
            for one in by_name.values():
                one.watch(self._sync)
        config = proto.SerializeToString()
        tpu_ops.configure(config)
        self._config = config
        return variables

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Sends the variables, which may hold restored values by now."""
        self._sync.start(
            tables.TableTransfer(
                self._tpu, self._configured, self._cores.hosts, variables
            )
        )

    def read(self, features: Any, weights: Any, device: str | None) -> Any:
        """Checks the input of a step; see `TPUEmbedding.enqueue`."""
        if not self.checks_shapes and not self.is_built:
            raise ValueError(
                "Without a check of shapes at each `enqueue`, call `build` "
                "with the shapes of one replica's inputs first."
            )
        return self._reader.read(
            features,
            weights,
            device,
            checks_shapes=self.checks_shapes,
            settles_shapes=not self.is_built,
        )

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Hands over what `read` returned."""
        self._modes.enqueued(name, training)
        if batch.in_program:
            values, given = batch.steps[0]
            # The mode is two constants and a choice even of a Python bool:
            # the compiler looks for them to correct a wrong one.
            batches.run_on_host(
                lambda: self._enqueue_on(
                    None,
                    values,
                    given,
                    name,
                    tf.where(training, "train", "inference"),
                )
            )
            return
        mode = _mode(training)
        if batch.device is not None:
            values, given = batch.steps[0]
            self._enqueue_on(
                self._cores.named(batch.device), values, given, name, mode
            )
            return
        for replica, (values, given) in enumerate(batch.steps):
            for part, core in enumerate(self._cores.of_replica(replica)):
                self._enqueue_on(core, values, given, name, mode, part)

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        self._modes.dequeued(name)
        return tpu_ops.receive(len(self._spec.features), self._configured, name)

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Sends the gradients of the step dequeued last, one per feature."""
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
            # One whose static shape was lost gets it back.
            checked.append(tf.reshape(gradient, shape))
        rates = [
            steps.current_learning_rate(rate, self._table_with(rate))
            for rate in self._tpu.learning_rates
        ]
        tpu_ops.send(checked, rates, self._configured, name)

    def is_in_program(self) -> bool:
        """Whether the caller is traced into a TPU's program."""
        try:
            return batches.is_in_tpu_program()
        except RuntimeError:  # In control flow, which a step may skip.
            return False

    def before_read(self) -> None:
        """What was retrieved is old by now."""
        self._sync.note_walk()

    def before_async_copy(self) -> None:
        """Brings the host copies up to date."""
        self._sync.retrieve()

    def before_restore(self) -> None:
        """Another restore may have failed half-way."""
        self._sync.note_restore()

    def note_restore(self) -> None:
        """Nothing to do: each variable that is written is noted."""

    def load_variables(self) -> None:
        """Sends the host copies to the TPU."""
        self._sync.load()

    def retrieve_variables(self) -> None:
        """Brings the host copies up to date."""
        self._sync.retrieve()

    def _enqueue_on(
        self,
        core: tpu_config_proto.Core | None,
        values,
        weights,
        name,
        mode,
        part: int | None = None,
    ):
        """Enqueues on the host of a core; None in a TPU's program."""
        # A device scope of None would undo that of the caller.
        with tf.device(core.host) if core else contextlib.nullcontext():
            if isinstance(values, packing.PackedIds):
                values, weights = packing.unpack_ids(
                    self._spec.features, values
                )
            num_cores = self._cores.num_cores_per_replica
            if part is not None and num_cores:
                values = [_part(one, part, num_cores) for one in values]
                weights = [_part(one, part, num_cores) for one in weights]
            lists = batches.read_lists(self._spec.features, values, weights)
            checks = batches.check_ids(self._spec, lists.ids) if core else []
            with tf.control_dependencies(checks):
                tpu_ops.enqueue(
                    lists,
                    mode=mode,
                    ordinal=core.ordinal if core else -1,
                    combiners=[one.combiner for one in self._spec.tables],
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
        raise AssertionError("A learning rate belongs to some table.")


def _mode(training: Any):
    if tf.is_tensor(training) or isinstance(training, tf.Variable):
        return tf.where(training, "train", "inference")
    return "train" if training else "inference"


def _part(value: Any, part: int, num_cores: int) -> Any:
    if value is None:
        return None
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.split(value, num_split=num_cores, axis=0)[part]
    return tf.split(value, num_or_size_splits=num_cores, axis=0)[part]
