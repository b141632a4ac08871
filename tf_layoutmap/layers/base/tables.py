"""Sharded tables of `ShardedEmbedding`, and the functions that use them.

`HostTable` and `ServersTable` hold the rows and slot variables that a
`RowOptimizer` trains: `HostTable` on the host, `ServersTable` on parameter
servers. The `FullTable...` classes apply regularizers and constraints to the
full table. The `check_...` functions raise an error if a constraint or an
optimizer would give wrong results when it is applied to shards or to single
rows. `stock_gather` looks up rows with TensorFlow's ops. `watch_table` reports
tables to `model.export` of Keras 3. `model.export` saves the model's weights
and the variables that its functions read. However, the package's lookup op does
not report which variables it reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import ops, placeholders, strategies, tf_private
from tf_layoutmap._core.strategies import HOST, on_host
from tf_layoutmap.embedding.configs.optimizer_specs import (
    OptimizerSpec,
    SlotSpec,
    read_optimizer,
)
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase
from tf_layoutmap.layers.base import replica_steps
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.sharded.routing.checks import known_size

if TYPE_CHECKING:
    from tf_layoutmap.embedding.servers.joint_lookups import LayerTable, Update
    from tf_layoutmap.embedding.servers.step_ops import StepOps


class HostTable:
    """A table and its slot variables; `MeshTable` is the version for a mesh.

    Attributes:
      is_local: Whether the table is in the memory of this process.
      has_slots_on_host: Whether slot variables are created on the host.
    """

    is_local = True
    has_slots_on_host = True

    def __init__(self, variable: ShardedVariable):
        """Creates the object for a table."""
        self._variable = variable

    @property
    def name(self) -> str:
        """Name of the table, for messages."""
        return self._variable.name

    def new_accumulator(self, initial_value: tf.Tensor, name: str) -> Any:
        """Creates a variable whose values have any first size."""
        return new_host_accumulator(initial_value, name)

    def with_rule(self, rule: OptimizerSpec) -> HostTable:
        """Returns a table whose updates apply `rule`."""
        del rule  # Each update contains the name of its rule.
        return self

    @property
    def variable(self) -> ShardedVariable:
        """The rows, by which optimizers identify the table."""
        return self._variable

    def look_up(
        self, ids: tf.Tensor, trained: Callable[[], LayerTable | None]
    ) -> tf.Tensor:
        """Returns the rows of `ids`, of any shape.

        Args:
          ids: Int32 or int64 ids.
          trained: Function that returns the table with the rule and the slot
            variables of its updates, or None if they are not known yet. Only
            tables on servers call this function.
        """
        del trained
        return self._variable.sparse_read(ids)

    def new_slot(self, slot: SlotSpec) -> ShardedVariable:
        """Creates a slot variable with the shards of the table."""
        name = f"{self.name}/{slot.name}"
        with replica_steps.shared_variables():
            shards = [
                tf.Variable(
                    _initial_slot(shard, slot),
                    trainable=False,
                    name=f"{name}/part_{part}",
                )
                for part, shard in enumerate(self._variable.variables)
            ]
        return ShardedVariable(shards, name=name)

    def fill_slot(self, slot: ShardedVariable, value: float) -> None:
        """Sets all values of a slot variable."""
        for shard in slot.variables:
            shard.assign(tf.fill(shard.shape, value))

    @on_host
    def sum_equal_ids(
        self, ids: tf.Tensor, gradients: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns distinct ids and the sums of their gradients."""
        return sum_equal_ids(ids, gradients)

    @on_host
    def constrain(
        self, ids: tf.Tensor, constraint: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        """Applies `constraint` to the rows of `ids`."""
        rows, _ = tf.unique(ids)
        self._variable.scatter_update(
            tf.IndexedSlices(constraint(self._variable.sparse_read(rows)), rows)
        )

    @on_host
    def update(
        self,
        slots: Sequence[ShardedVariable],
        ids: tf.Tensor,
        gradients: tf.Tensor,
        *,
        optimizer: str,
        hyperparameters: tf.Tensor,
    ) -> None:
        """Applies one step to the rows of `ids`; sums gradients of equal ids.

        Args:
          slots: Slot variables, in the order of the rule.
          ids: `[num_ids]` int32 or int64.
          gradients: `[num_ids, dim]` float32, gradients of the rows of `ids`.
          optimizer: Name of the rule.
          hyperparameters: `[k]` float32, hyperparameters of the rule.
        """
        partition = self._variable.partition
        # Each gradient row is a separate sample with one id.
        row_splits = tf.range(tf.size(ids, tf.int64) + 1)
        gains, unique_rows, unique_splits, positions = ops.find_unique_rows(
            ids=ids,
            row_splits=row_splits,
            weights=tf.zeros([0]),
            combiner="sum",
            num_rows=partition.num_rows,
            feature=self.name,
            table=self.name,
        )
        ops.apply_row_gradients(
            shards=[
                strategies.handle_of(shard)
                for shard in self._variable.variables
            ],
            slots=[
                strategies.handle_of(shard)
                for slot in slots
                for shard in slot.variables
            ],
            offsets=tf.constant(partition.offsets, tf.int64),
            unique_rows=unique_rows,
            unique_splits=unique_splits,
            positions=positions,
            row_splits=row_splits,
            gains=gains,
            gradients=gradients,
            hyperparameters=hyperparameters,
            placement=partition.placement,
            optimizer=optimizer,
            table=self.name,
        )


def sum_equal_ids(
    ids: tf.Tensor, values: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns distinct ids and the sums of their gradients."""
    distinct, positions = tf.unique(ids)
    return distinct, tf.math.unsorted_segment_sum(
        values, positions, tf.size(distinct)
    )


def _initial_slot(shard: Any, slot: SlotSpec) -> tf.Tensor:
    """Returns the initial value of the slot variable of a shard."""
    rows, dim = shard.shape
    return tf.fill([rows, slot.dim(dim)], slot.initial_value)


def new_host_accumulator(initial_value: tf.Tensor, name: str) -> tf.Variable:
    """Creates a variable on the host whose values have any first size.

    Args:
      initial_value: Initial value.
      name: Name of the variable.
    """
    with tf.device(HOST), replica_steps.shared_variables():
        return tf.Variable(
            initial_value,
            shape=[None, *initial_value.shape[1:]],
            trainable=False,
            name=name,
        )


def table_for_strategy(
    variable: ShardedVariable, rule: OptimizerSpec
) -> HostTable:
    """Returns the table for the strategy in scope."""
    return (
        ServersTable(variable, rule)
        if strategies.on_servers()
        else HostTable(variable)
    )


class ServerTensor(tf_private.Trackable):
    """A tensor on a parameter server whose first size can change.

    The server stores the serialized tensor in a string scalar. In TensorFlow
    2.21, a server process aborts when it receives the handle of a variable with
    an unknown size. In a checkpoint, the object has the same form as a
    `tf.Variable` with the value of the tensor.

    Attributes:
      dtype: Dtype of the tensor.
    """

    def __init__(self, initial_value: tf.Tensor, *, name: str):
        """Creates the tensor on the device in scope.

        Args:
          initial_value: Initial value. All values have the sizes of this value,
            except for the first dimension.
          name: Name of the variable.
        """
        self.dtype = initial_value.dtype
        self._shape = [None, *initial_value.shape[1:]]
        self._bytes = tf_private.ResourceVariable(
            tf.io.serialize_tensor(initial_value), trainable=False, name=name
        )

    def value(self) -> tf.Tensor:
        """Returns the value."""
        return tf.ensure_shape(
            tf.io.parse_tensor(self._bytes.read_value(), self.dtype),
            self._shape,
        )

    def numpy(self) -> Any:
        """Returns the value as an array."""
        return self.value().numpy()

    def assign(self, value: Any) -> None:
        """Replaces the value."""
        value = tf.ensure_shape(tf.cast(value, self.dtype), self._shape)
        self._bytes.assign(tf.io.serialize_tensor(value))

    def _copy_trackable_to_cpu(
        self, object_map: MutableMapping[Any, Any]
    ) -> None:
        # An asynchronous save writes the copy of the variable.
        self._bytes._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            object_map[self] = copy.copy(self)
            object_map[self]._bytes = object_map[self._bytes]

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {tf_private.VARIABLE_VALUE_KEY: self.value()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored[tf_private.VARIABLE_VALUE_KEY])


class ServersTable(HostTable):
    """A table on parameter servers.

    The ops of a `TPUEmbedding` on parameter servers update the rows. If a
    closure runs again after a failure, its update is therefore applied only
    once. A constraint is a second update with the same token. It adds the
    difference between constrained and current rows, so that updates of other
    workers between the read and the update are not lost.
    """

    is_local = False

    def __init__(self, variable: ShardedVariable, rule: OptimizerSpec):
        """Creates the object for a table whose shards are on servers."""
        super().__init__(variable)
        self._rule = rule
        self._trained: LayerTable | None = None
        self._ops: StepOps | None = None
        self._constraint_ops: StepOps | None = None

    def look_up(
        self, ids: tf.Tensor, trained: Callable[[], LayerTable | None]
    ) -> tf.Tensor:
        """Returns the rows of `ids`; see `HostTable`."""
        from tf_layoutmap.embedding.servers import joint_lookups

        if placeholders.placeholder_of(self._variable) is None:
            rows = joint_lookups.look_up(self._variable, ids, trained)
            if rows is not None:
                return rows
        return self._variable.sparse_read(ids)

    def trained(self, slots: Sequence[ShardedVariable]) -> LayerTable:
        """Returns the table with the slot variables of its updates."""
        from tf_layoutmap.embedding.servers import joint_lookups

        if self._trained is None or any(
            slot is not other
            for slot, other in zip(slots, self._trained.slots, strict=True)
        ):
            self._trained = joint_lookups.LayerTable(
                self._variable, self._rule, list(slots)
            )
        return self._trained

    def new_accumulator(self, initial_value: tf.Tensor, name: str) -> Any:
        """Creates a tensor of any first size on the first shard's server."""
        with tf.device(self._variable.variables[0].device):
            return ServerTensor(initial_value, name=name)

    def with_rule(self, rule: OptimizerSpec) -> ServersTable:
        """Returns a table whose updates apply `rule`."""
        return ServersTable(self._variable, rule)

    def new_slot(self, slot: SlotSpec) -> ShardedVariable:
        """Creates a slot variable on the devices of the table's shards."""
        name = f"{self.name}/{slot.name}"
        shards = []
        for part, shard in enumerate(self._variable.variables):
            with tf.device(shard.device):
                shards.append(
                    tf_private.ResourceVariable(
                        _initial_slot(shard, slot),
                        trainable=False,
                        name=f"{name}/part_{part}",
                    )
                )
        return ShardedVariable(shards, name=name)

    def update(
        self,
        slots: Sequence[ShardedVariable],
        ids: tf.Tensor,
        gradients: tf.Tensor,
        *,
        optimizer: str,
        hyperparameters: tf.Tensor,
    ) -> None:
        """Applies one step to the rows of `ids`; see `HostTable`."""
        from tf_layoutmap.embedding.servers import joint_lookups

        del optimizer
        update = joint_lookups.Update(
            self.trained(slots),
            ids,
            gradients,
            hyperparameters,
            self._apply_alone,
        )
        if not joint_lookups.defer_update(update):
            self._apply_alone(update)

    def _apply_alone(self, update: Update) -> None:
        """Creates the ops of an update of this table only."""
        from tf_layoutmap.embedding.servers import joint_lookups

        if self._ops is None:
            with tf.init_scope():
                self._ops = joint_lookups.make_ops([update.table])
        plan, _ = self._ops.plan(_one_id_per_sample(update.ids))
        # The layer has already read the rows.
        self._ops.apply(
            plan,
            [],
            [update.gradients],
            [update.hyperparameters],
            _token_to_apply(self._ops),
        )

    def constrain(
        self, ids: tf.Tensor, constraint: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        """Applies `constraint` to the rows of `ids`."""
        from tf_layoutmap.embedding.servers import joint_lookups

        if self._constraint_ops is None:
            table = joint_lookups.LayerTable(
                self._variable, _addition(self.name), ()
            )
            with tf.init_scope():
                self._constraint_ops = joint_lookups.make_ops([table])
        step = self._constraint_ops
        unique_ids, _ = tf.unique(ids)
        # Each row has two contributions. The server adds the first one, and
        # then the second one, which corrects the rounding error of the first
        # addition. With one worker, the result is therefore bitwise identical
        # to the constrained row.
        plan, requests = step.plan(
            _one_id_per_sample(tf.concat([unique_ids, unique_ids], axis=0))
        )
        fetched = step.fetch(requests)
        (stacked,) = step.combine(plan, fetched)
        rows, _ = tf.split(stacked, 2)
        constrained = constraint(rows)
        difference = constrained - rows
        correction = constrained - (rows + difference)
        step.apply(
            plan,
            fetched,
            [-tf.concat([difference, correction], axis=0)],
            [tf.constant([1.0, *_addition(self.name).constants])],
            _token_to_apply(step),
        )


def _token_to_apply(step: StepOps) -> Any:
    """Returns the token of the closure that applies a step."""
    from tf_layoutmap.embedding.servers import closure_trace

    return closure_trace.token_to_apply(step.applied_closures)


def _one_id_per_sample(ids: tf.Tensor) -> Any:
    """Returns a batch with one feature, in which each id is a sample."""
    from tf_layoutmap.embedding.servers import joint_lookups

    return joint_lookups.one_id_per_sample([tf.cast(ids, tf.int64)])


def _addition(table: str) -> OptimizerSpec:
    """Returns a rule that subtracts each contribution to a row separately."""
    rule = read_optimizer(
        tf.tpu.experimental.embedding.SGD(1.0, use_gradient_accumulation=False),
        table=table,
    )
    assert rule is not None
    return rule


# Some versions of Keras require these base classes.
class FullTableRegularizer(keras.regularizers.Regularizer):
    """Regularizer for one shard that returns the loss of the full table."""

    def __init__(
        self,
        regularizer: Callable[[tf.Tensor], tf.Tensor],
        make_table: Callable[[], Any],
    ):
        """Creates the regularizer. `make_table` must return the table."""
        self._regularizer = regularizer
        self._make_table = make_table

    def __call__(self, shard: Any) -> tf.Tensor:
        del shard
        return self._regularizer(tf.convert_to_tensor(self._make_table()))


class FullTableConstraint(keras.constraints.Constraint):
    """Constraint for the last shard, applied to the full table.

    When the optimizer updates the last shard, it has already updated all other
    shards. If Keras' default `axis=0` is used, a norm is therefore the norm of
    a full column of the table.
    """

    def __init__(
        self,
        constraint: Callable[[tf.Tensor], tf.Tensor],
        make_table: Callable[[], Any],
    ):
        """Creates the constraint. `make_table` must return the table."""
        self._constraint = constraint
        self._make_table = make_table

    def __call__(self, shard: Any) -> tf.Tensor:
        del shard
        table = self._make_table()
        values = tf.split(
            self._constraint(tf.convert_to_tensor(table)), table.partition.sizes
        )
        for variable, value in zip(table.variables[:-1], values):
            variable.assign(value)
        return values[-1]


def loss_of_rows(
    regularizer: Callable[[tf.Tensor], tf.Tensor],
    table: Any,
    ids: tf.Tensor,
    look_up: Callable[[Any, tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Returns the loss of the rows that `ids` select, each counted once.

    If there are several replicas, `ids` are the ids of the calling replica, and
    the result is the replica's share of the loss of the global batch.

    Args:
      regularizer: Regularizer of the layer.
      table: The table.
      ids: Ids of any shape.
      look_up: Function that returns the rows of ids in a table.
    """

    def loss_of(ids: tf.Tensor) -> tf.Tensor:
        distinct, _ = tf.unique(ids)
        return regularizer(look_up(table, distinct))

    return replica_steps.loss_of_rows(loss_of, ids, table.name)


def check_by_row(constraint: Any, where: str) -> None:
    """Checks that a Keras constraint treats each row independently.

    Raises:
      ValueError: If the constraint computes norms along axis 0.
    """
    axis = getattr(constraint, "axis", None)
    axes = axis if isinstance(axis, list | tuple) else [axis]
    if {0, -2} & set(axes):
        raise ValueError(
            "Argument `embeddings_constraint` must treat each row "
            "independently if the table has an `optimizer`, because then only "
            "the rows of a batch are constrained: use axis=1. Received: "
            f"{type(constraint).__name__} with axis={axis!r} ({where})."
        )


def check_supports_shards(
    optimizer: Any,
    kinds: type | tuple[type, ...],
    where: str,
    setting: str | None = None,
) -> None:
    """Checks that an optimizer gives correct results with shards as weights.

    Args:
      optimizer: Optimizer of the model, or None.
      kinds: Optimizer classes whose update of one value depends on the full
        weight.
      where: The table or weight, for the message.
      setting: An optimizer setting that also makes the update depend on the
        full weight, or None.

    Raises:
      ValueError: If the optimizer clips the norm of each weight, or is an
        instance of `kinds`.
    """
    clipnorm = getattr(optimizer, "clipnorm", None)
    if clipnorm:
        setting = f"clipnorm={clipnorm}"
    elif isinstance(optimizer, kinds):
        setting = type(optimizer).__name__
    if setting:
        raise ValueError(
            "A model's optimizer whose update depends on the full weight "
            "trains a table with one shard only; use num_shards=1, "
            "`global_clipnorm`, or the layer's `optimizer` argument. Received: "
            f"{setting} ({where})."
        )


def check_callable(argument: str, value: Any, where: str) -> Any:
    """Returns `value` if it is None or a callable; else raises `TypeError`."""
    if value is not None and not callable(value):
        raise TypeError(
            _core_checks.message(argument, "None or callable", value, where)
        )
    return value


def stock_gather(
    shards: Sequence[tf.Variable],
    ids: tf.Tensor,
    name: str,
    num_rows: int | None = None,
) -> tf.Tensor:
    """Returns the rows of `ids`, in the order of `ids`, by TensorFlow's ops.

    Args:
      shards: Contiguous blocks of rows, in order.
      ids: Global rows of any shape, int32 or int64.
      name: Name of the layer, for the message about an out-of-range id.
      num_rows: Number of valid rows if there is a single shard with padding.
        None if all rows are valid.

    Returns:
      Shape `ids.shape + [dim]`.
    """
    sizes = [known_size(shard) for shard in shards]
    if num_rows is not None and len(shards) == 1:
        sizes = [num_rows]  # The rows after `num_rows` are padding.
    partition = RowPartition.from_sizes(sizes)
    flat_ids = tf.cast(tf.reshape(ids, [-1]), tf.int64)
    inside = tf.reduce_all((flat_ids >= 0) & (flat_ids < partition.num_rows))
    checks = assertions.require(
        inside,
        f"Ids must be in [0, {partition.num_rows}) (layer {name!r}). "
        "Received: ",
        flat_ids,
    )
    with tf.control_dependencies(checks):
        flat_ids = tf.identity(flat_ids)
    # The search uses the ends of the shards, because a search in the starts
    # would not skip empty shards.
    owners = tf.searchsorted(
        tf.constant(partition.offsets[1:], tf.int64), flat_ids, side="right"
    )
    starts = tf.gather(tf.constant(partition.offsets[:-1], tf.int64), owners)
    num_shards = len(shards)
    local_rows = tf.dynamic_partition(flat_ids - starts, owners, num_shards)
    positions = tf.dynamic_partition(
        tf.range(tf.size(flat_ids)), owners, num_shards
    )
    rows = tf.dynamic_stitch(
        positions,
        [tf.gather(shard, local) for shard, local in zip(shards, local_rows)],
    )
    shape = tf.concat([tf.shape(ids), shards[0].shape[1:]], 0)  # pyright: ignore[reportArgumentType, reportCallIssue] The stub of tf.concat takes no shapes.
    rows = tf.reshape(rows, shape)
    rows.set_shape(ids.shape.concatenate(shards[0].shape[1:]))
    return rows


def stock_gather_with_dense_gradient(
    table: tf.Variable, ids: tf.Tensor
) -> tf.Tensor:
    """Returns the rows of `ids`, with a dense gradient that sums equal ids.

    Args:
      table: `[num_rows, dim]`, on a mesh.
      ids: Ids of any shape, int32 or int64.

    Returns:
      Shape `ids.shape + [dim]`.
    """
    num_rows, dim = table.shape

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(
                tf.reshape(upstream, [-1, dim]), tf.reshape(ids, [-1]), num_rows
            )

        return tf.gather(rows, ids), gradient

    return gather(tf.convert_to_tensor(table))


def watch_table(embedding: EmbeddingBase) -> None:
    """Adds the tables to the variables that the traced function reads."""
    graph: Any = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "watch_variable"):
        return
    read = [
        *embedding.embedding_tables.values(),
        *(
            vocabulary.key_variable
            for vocabulary in embedding.vocabularies.values()
        ),
    ]
    for table in read:
        if isinstance(table, ShardedVariable):
            graph.watch_variable(table)
