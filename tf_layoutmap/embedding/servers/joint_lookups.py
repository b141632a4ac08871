"""Lookups and updates of several layers, with one message for each server.

Each layer with a table on servers reads and updates its rows independently. If
each layer created its own ops, a step would send several messages per layer to
each server. In a `bundles.bundled` context, `look_up` and `defer_update`
therefore only record what a layer needs. `JointLookups` then creates the ops of
a `TPUEmbedding` whose tables are the tables of all these layers:

* Lookups whose ids do not depend on each other are one read. The result of
  `look_up` is the output of an `Identity` op, whose input is replaced when the
  read is created. A lookup that may depend on a recorded lookup begins the next
  read. The recorded lookups are also created before the first update.
* The updates of the tables of a read are one update.

If the order of the ops would contradict the order of the program, the closure
is traced again without bundles (see `closure_trace`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs, tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs.optimizer_specs import OptimizerSpec
from tf_layoutmap.embedding.servers import (
    bundles,
    closure_trace,
    resource_order,
    step_ops,
)
from tf_layoutmap.embedding.servers.closure_trace import Bundle, ClosureTrace
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.gradient import FullTableSlices


@dataclasses.dataclass(eq=False)
class LayerTable:
    """A table of a layer on servers, with the rule that trains it.

    Attributes:
      rows: The rows.
      rule: The rule.
      slots: The slot variables of the rule.
      joint_ops: The ops of groups of tables that begin with this table, by the
        tables of the group.
    """

    rows: ShardedVariable
    rule: OptimizerSpec
    slots: Sequence[ShardedVariable]
    joint_ops: dict[tuple[LayerTable, ...], step_ops.StepOps] = (
        dataclasses.field(default_factory=dict, repr=False)
    )


class Update(NamedTuple):
    """An update of the rows of a layer's table.

    Attributes:
      table: The table.
      ids: `[num_ids]` int32 or int64.
      gradients: `[num_ids, dim]` float32.
      hyperparameters: Float32 vector, the hyperparameters of the rule.
      apply: Function that creates the ops of this update alone.
    """

    table: LayerTable
    ids: tf.Tensor
    gradients: tf.Tensor
    hyperparameters: tf.Tensor
    apply: Callable[[Update], None]


@dataclasses.dataclass(eq=False)
class _Lookup:
    """A recorded lookup.

    Attributes:
      rows: The variable of the table.
      ids: `[num_ids]` int64.
      result: `[num_ids, dim]`, output of an `Identity` op.
      table: Function that returns the `LayerTable`, or None if its rule is not
        known yet.
    """

    rows: ShardedVariable
    ids: tf.Tensor
    result: tf.Tensor
    table: Callable[[], LayerTable | None]


@dataclasses.dataclass(eq=False)
class _Read:
    """A read of several tables, whose ops were created.

    Attributes:
      tables: The tables.
      ids: The ids of each table.
      ops: The ops of all tables.
      plan: The plan of the read.
      fetched: The replies of the servers.
    """

    tables: tuple[LayerTable, ...]
    ids: list[tf.Tensor]
    ops: step_ops.StepOps
    plan: tf.Tensor
    fetched: Sequence[tf.Tensor]


def look_up(
    rows: ShardedVariable,
    ids: tf.Tensor,
    table: Callable[[], LayerTable | None],
) -> tf.Tensor | None:
    """Records a lookup of a layer in a step, and returns its result.

    Args:
      rows: The table.
      ids: Int32 or int64 tensor of any shape.
      table: Function that returns the table with its rule, or None if the rule
        is not known yet.

    Returns:
      `ids.shape + [dim]`. None if the caller must read the rows itself.
    """
    lookups = _lookups_of_step()
    if lookups is None or not _can_join(rows):
        return None
    return lookups.add(rows, ids, table)


def defer_update(update: Update) -> bool:
    """Records an update, and returns whether it will be created later."""
    _create_lookups_around()
    lookups = _lookups_of_step()
    if lookups is None:
        return False
    lookups.defer(update)
    return True


def make_ops(layer_tables: Sequence[LayerTable]) -> step_ops.StepOps:
    """Returns the ops of tables, each of which has one feature."""
    specs, variables = [], {}
    for number, table in enumerate(layer_tables):
        name = f"{number}/{table.rows.name}"
        specs.append(
            config.TableSpec(
                name,
                table.rows.partition.num_rows,
                int(table.rows.shape[1] or 0),
                "sum",
                initializer=tf.zeros,
                optimizer=table.rule,
                title=table.rows.name,
            )
        )
        variables[name] = {
            tables.PARAMETERS: table.rows,
            **{
                slot.name: variable
                for slot, variable in zip(table.rule.slots, table.slots)
            },
        }
    made = step_ops.StepOps(
        config.EmbeddingSpec(
            tuple(specs),
            tuple(
                config.FeatureSpec(table.rows.name, number, 0)
                for number, table in enumerate(layer_tables)
            ),
        ),
        variables,
        out_of_range="error",
        rounding_seed=0,
        wire_dtype="float32",
    )
    made.create_handles()
    return made


def one_id_per_sample(ids: Sequence[tf.Tensor]) -> list[inputs.FeatureIds]:
    """Returns features in which each id is a separate sample.

    Args:
      ids: For each feature, `[num_ids]` int64.
    """
    no_splits, no_weights = tf.zeros([0], tf.int64), tf.zeros([0])
    features = []
    for part in ids:
        size: Any = part.shape[0]
        counted = None
        if size is None:
            size = tf.size(part, tf.int64)
            counted = size, part, 0
        features.append(
            inputs.FeatureIds(
                part, no_splits, size, no_weights, counted=counted
            )
        )
    return features


class JointLookups:
    """The lookups and updates of layers in the graph of a step."""

    def __init__(self, trace: ClosureTrace, bundle: Bundle, graph: Any):
        """Creates an object without lookups.

        Args:
          trace: The trace of the closure.
          bundle: The bundle of the step.
          graph: The graph of the step.
        """
        self._trace = trace
        self._bundle = bundle
        self._graph = graph
        self._lookups: list[_Lookup] = []
        self._dependents = _Dependents(graph)
        # Number of ops in the graph before the first recorded lookup.
        self._num_ops = 0
        self._reads: list[_Read] = []
        self._updates: list[Update] = []

    def add(
        self,
        rows: ShardedVariable,
        ids: tf.Tensor,
        table: Callable[[], LayerTable | None],
    ) -> tf.Tensor:
        """Records a lookup; see `look_up`."""
        bundles.create_pending()  # The lookup follows earlier updates.
        # The identity op has the control dependencies of the caller. Ops that
        # are created later do not have them.
        flat_ids = tf.identity(tf.cast(tf.reshape(ids, [-1]), tf.int64))
        if self._lookups and self._dependents.contain(flat_ids):
            self.create_lookups()
        if not self._lookups:
            self._num_ops = len(self._graph.get_operations())
            self._dependents = _Dependents(self._graph)
        dim: Any = rows.shape[1]
        with tf_private.stop_recording():
            result = tf.identity(
                tf.compat.v1.placeholder(
                    rows.dtype, [*flat_ids.shape.as_list(), dim]
                )
            )
        self._dependents.add(result)
        for variable in rows.variables:
            tf_private.variable_accessed(variable)
        # The tape watches the variables now, so it records the capture.
        handle = self._graph.capture(rows.variables[0].handle)
        tf_private.record_operation(
            "LayoutMapJointLookup",
            [result],
            [handle],
            lambda gradient: [FullTableSlices(gradient, flat_ids)],
        )
        self._lookups.append(_Lookup(rows, flat_ids, result, table))
        if ids.shape.rank == 1:
            return result
        shape = tf.concat([tf.shape(ids), tf.constant([dim])], axis=0)
        shaped = tf.reshape(result, shape)
        shaped.set_shape(ids.shape.concatenate([dim]))
        return shaped

    def defer(self, update: Update) -> None:
        """Records an update."""
        if not self._updates:
            self.create_lookups()
            if not self._bundle.updates:
                self._bundle.num_ops = len(self._graph.get_operations())
        # The identity op has the control dependencies of the caller.
        self._updates.append(
            update._replace(gradients=tf.identity(update.gradients))
        )

    @property
    def has_updates(self) -> bool:
        """Whether there are updates whose ops were not created yet."""
        return bool(self._updates)

    def create_lookups(self) -> None:
        """Creates the ops of all recorded lookups."""
        if not self._lookups:
            return
        lookups, self._lookups = self._lookups, []
        following = self._graph.get_operations()[self._num_ops :]
        by_variable: dict[int, list[_Lookup]] = {}
        for lookup in lookups:
            by_variable.setdefault(id(lookup.rows), []).append(lookup)
        layer_tables = [
            of_table[0].table() for of_table in by_variable.values()
        ]
        with _without_context(self._graph, lookups[0].ids.device):
            # Each table has one feature.
            ids = [
                tf.concat([lookup.ids for lookup in of_table], axis=0)
                if len(of_table) > 1
                else of_table[0].ids
                for of_table in by_variable.values()
            ]
            results = self._read(layer_tables, ids)
            if results is None:
                results = [
                    of_table[0].rows.sparse_read(table_ids)
                    for of_table, table_ids in zip(by_variable.values(), ids)
                ]
            for of_table, rows in zip(by_variable.values(), results):
                parts = (
                    [rows]
                    if len(of_table) == 1
                    else tf.split(
                        rows, [tf.size(lookup.ids) for lookup in of_table]
                    )
                )
                for lookup, part in zip(of_table, parts):
                    tf_private.replace_op_input(lookup.result.op, 0, part)
        if _writes(self._graph, following, lookups):
            self._trace.stop_bundling()

    def _read(
        self, layer_tables: Sequence[LayerTable | None], ids: list[tf.Tensor]
    ) -> list[tf.Tensor] | None:
        """Creates a read; returns None if a rule is not known."""
        known = tuple(table for table in layer_tables if table is not None)
        if len(known) < len(layer_tables):
            self._trace.miss_rule()
            return None
        ops = _joint_ops(known)
        plan, requests = ops.plan(one_id_per_sample(ids))
        fetched = ops.fetch(requests)
        self._reads.append(_Read(known, ids, ops, plan, fetched))
        return ops.combine(plan, fetched)

    def create_updates(self) -> None:
        """Creates the ops of all recorded updates."""
        updates, self._updates = self._updates, []
        if not updates:
            return
        reads, self._reads = self._reads, []
        for read in reads if self._trace.joins_layers else ():
            updates = self._apply_to_read(read, updates)
        for update in updates:
            update.apply(update)

    def _apply_to_read(
        self, read: _Read, updates: list[Update]
    ) -> list[Update]:
        """Applies the updates of the tables of a read, and returns the rest."""
        by_table: dict[LayerTable, Update] = {}
        rest = []
        for update in updates:
            if update.table in read.tables and update.table not in by_table:
                by_table[update.table] = update
            else:
                rest.append(update)
        if not by_table:
            return updates
        plan, fetched = read.plan, read.fetched
        with _without_context(self._graph, plan.device):
            ids, gradients, hyperparameters = [], [], []
            for table, read_ids in zip(read.tables, read.ids):
                update = by_table.get(table)
                if update is None:
                    ids.append(read_ids[:0])
                    gradients.append(tf.zeros([0, table.rows.shape[1]]))
                    hyperparameters.append(
                        tf.zeros([1 + len(table.rule.constants)])
                    )
                    continue
                ids.append(update.ids)
                gradients.append(update.gradients)
                hyperparameters.append(update.hyperparameters)
            if any(
                own_ids is not read_ids
                for own_ids, read_ids in zip(ids, read.ids)
            ):
                plan, _ = read.ops.plan(
                    one_id_per_sample(
                        [tf.cast(own_ids, tf.int64) for own_ids in ids]
                    )
                )
                # The replies contain the rows of another plan. The update
                # requires only the number of updates.
                fetched = [reply[: tf.int64.size] for reply in fetched]
            read.ops.apply(
                plan,
                fetched,
                gradients,
                hyperparameters,
                closure_trace.token_to_apply(read.ops.applied_closures),
            )
        return rest


class _Dependents:
    """The ops of a graph that may depend on lookups.

    An op depends on a lookup if it follows the lookup by inputs, by control
    dependencies, or because it uses a resource that a dependent op has used.
    TensorFlow adds the control dependencies of resources at the end of a trace.
    """

    def __init__(self, graph: Any):
        """Creates an object for ops that the graph does not contain yet."""
        self._graph = graph
        self._num_seen = len(graph.get_operations())
        self._ops: set[Any] = set()
        self._resources: set[int] = set()

    def add(self, result: tf.Tensor) -> None:
        """Adds the result of a lookup."""
        self._ops.add(result.op)

    def contain(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor of the graph may depend on a lookup."""
        ops = self._graph.get_operations()
        for op in ops[self._num_seen :]:
            resources = {
                id(used) for used in op.inputs if used.dtype == tf.resource
            }
            if (
                any(used.op in self._ops for used in op.inputs)
                or any(used in self._ops for used in op.control_inputs)
                or resources & self._resources
            ):
                self._ops.add(op)
                self._resources |= resources
        self._num_seen = len(ops)
        return tensor.op in self._ops


def _joint_ops(layer_tables: tuple[LayerTable, ...]) -> step_ops.StepOps:
    """Returns the ops of tables. The first call creates the ops."""
    made = layer_tables[0].joint_ops
    if layer_tables not in made:
        with tf.init_scope():
            made[layer_tables] = make_ops(layer_tables)
    return made[layer_tables]


def _lookups_of_step() -> JointLookups | None:
    """Returns the object of the current graph, or None without a bundle."""
    step = closure_trace.enclosing_step()
    if step is None or not step.trace.joins_layers:
        return None
    graph = tf.compat.v1.get_default_graph()
    bundle = step.trace.bundles.get(graph)
    if bundle is None:
        return None
    if bundle.lookups is None:
        bundle.lookups = JointLookups(step.trace, bundle, graph)
    return bundle.lookups


def _create_lookups_around() -> None:
    """Creates the recorded lookups of the graphs around the current graph.

    An update in a branch changes the rows that these lookups read.
    """
    step = closure_trace.enclosing_step()
    if step is None:
        return
    for graph in list(tf_private.graphs_around())[1:]:
        bundle = step.trace.bundles.get(graph)
        if bundle is not None and bundle.lookups is not None:
            with graph.as_default():
                bundle.lookups.create_lookups()


def _can_join(rows: ShardedVariable) -> bool:
    return (
        rows.axis == 0
        and rows.dtype == tf.float32
        and rows.partition.placement == "div"
        and rows.shape.rank == 2
    )


def _writes(graph: Any, ops: Sequence[Any], lookups: Sequence[_Lookup]) -> bool:
    """Returns whether ops may write to the tables of lookups.

    TensorFlow would run the read after these ops, because the op of the read is
    created later.
    """
    used = resource_order.tensors_of(
        graph,
        [
            variable.handle
            for lookup in lookups
            for variable in lookup.rows.variables
        ],
    )
    return any(
        id(tensor) in used
        for op in ops
        for tensor in tf_private.read_and_written_resources(op)[1]
    )


@contextlib.contextmanager
def _without_context(graph: Any, device: str) -> Iterator[None]:
    """Context for ops that are created later than the call of the layer.

    Args:
      graph: The graph of the step.
      device: Device of the ops.
    """
    with (
        graph.as_default(),
        tf.control_dependencies(None),
        tf_private.stop_recording(),
        tf.name_scope(""),
        tf.device(None),
        tf.device(device),
    ):
        yield
