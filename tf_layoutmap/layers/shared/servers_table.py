"""A table on parameter servers, as a `RowOptimizer` trains it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap import _strategies, _tf_private
from tf_layoutmap.embedding.servers import closures, step_ops
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.spec.optimizer_specs import OptimizerSpec
from tf_layoutmap.embedding.step import feature_inputs
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.layers.shared.host_table import HostTable
from tf_layoutmap.sharded import ShardedVariable


def table_of(variable: ShardedVariable, rule: OptimizerSpec) -> HostTable:
    """Returns the table as it is trained where the strategy in scope has it."""
    return (
        ServersTable(variable, rule)
        if _strategies.on_servers()
        else HostTable(variable)
    )


class ServersTable(HostTable):
    """Updates rows by the operations of a `TPUEmbedding` over servers.

    So a closure that comes again counts once.
    """

    def __init__(self, variable: ShardedVariable, rule: OptimizerSpec):
        """Takes the table, whose shards are on servers."""
        super().__init__(variable)
        self._rule = rule
        self._ops: step_ops.StepOps | None = None

    def new_slot(self, name: str, initial: float) -> ShardedVariable:
        """Returns a slot variable with each shard beside that of the table."""
        name = f"{self.name}/{name}"
        shards = []
        for part, shard in enumerate(self._variable.variables):
            with tf.device(shard.device):
                shards.append(
                    _tf_private.ResourceVariable(
                        tf.fill(shard.shape, initial),
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
        """Takes one step on the rows of `ids`, those of equal ids summed."""
        del optimizer
        if self._ops is None:
            with tf.init_scope():
                self._ops = self._make_ops(slots)
        ids = tf.cast(ids, tf.int64)
        # Each gradient row is a sample of its own, with one id.
        plan, requests = self._ops.plan(
            [
                feature_inputs.FeatureIds(
                    ids,
                    tf.zeros([0], tf.int64),
                    tf.size(ids, tf.int64),
                    tf.zeros([0]),
                )
            ]
        )
        self._ops.apply(
            plan,
            self._ops.fetch(requests),
            [gradients],
            [hyperparameters],
            closures.token_to_apply(self._ops.applied_closures),
        )

    def _make_ops(self, slots: Sequence[ShardedVariable]) -> step_ops.StepOps:
        table = self._variable
        spec = config.EmbeddingSpec(
            (
                config.TableSpec(
                    self.name,
                    table.partition.num_rows,
                    int(table.shape[1] or 0),
                    "sum",
                    initializer=tf.zeros,
                    optimizer=self._rule,
                ),
            ),
            (config.FeatureSpec(self.name, 0, 0),),
        )
        variables = {
            self.name: {
                tables.PARAMETERS: table,
                **{
                    slot.name: variable
                    for slot, variable in zip(self._rule.slots, slots)
                },
            }
        }
        return step_ops.StepOps(
            spec,
            variables,
            [[one.device for one in table.variables]],
            out_of_range="error",
            rounding_seed=0,
            wire_dtype="float32",
        )
