"""The engine's ops as methods (docs/ops.md, "The host engine")."""

# DOC-MERGE: What an engine has counted, and the steps that it holds.
# DOC-MERGE: What the engine's ops are told of tables, features and batches.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap._patches import freed_gradients
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import packing, tables
from tf_layoutmap.embedding.host import open_tables
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing.checks import known_size

# Of each feature, in the engine's order.
_FEATURE_COUNTS = (
    "num_samples",
    "num_ids",
    "num_dropped",
    "num_clipped",
    "num_truncated",
)


def describe_counts(
    engine: tf.Tensor, spec: config.EmbeddingSpec
) -> dict[str, Any]:
    """Returns what an engine holds, as Python values.

    Args:
      engine: Handle of the engine.
      spec: Its tables and features.
    """
    with tf.init_scope(), tf.device(engine.device):
        found = ops.describe_host_engine(engine=engine)
    return {
        "pending": found.pending.numpy().tolist(),
        "awaiting": found.awaiting.numpy().tolist(),
        "open": found.num_open.numpy().tolist(),
        "followed": found.num_followed.numpy().tolist(),
        "num_updates": int(found.num_updates),
        "poisoned": found.poisoned.numpy().decode(),
        "held": bool(found.held),
        "features": {
            feature.name: dict(zip(_FEATURE_COUNTS, counts))
            for feature, counts in zip(
                spec.features, found.feature_counts.numpy().tolist()
            )
        },
        "tables": {
            table.name: _describe_table(table, *counts)
            for table, counts in zip(
                spec.tables, found.table_counts.numpy().tolist()
            )
        },
    }


def _describe_table(
    table: config.TableSpec, num_lookups: int, num_unique_rows: int
) -> dict[str, Any]:
    return {
        "num_bytes": table.num_bytes,
        "num_slot_bytes": table.num_slot_bytes,
        "num_lookups": num_lookups,
        "num_unique_rows": num_unique_rows,
        "unique_ratio": (
            num_unique_rows / num_lookups if num_lookups else None
        ),
    }


# Of the features of a step, in the spec's order.
StepInputs = Sequence[embedding_inputs.FeatureIds] | packing.PackedIds


def config_attrs(
    spec: config.EmbeddingSpec,
    variables: dict[str, dict[str, Any]],
    *,
    out_of_range: str,
    rounding_seed: int,
) -> dict[str, Any]:
    """Returns the attrs that say which tables and features there are.

    Args:
      spec: Tables and features.
      variables: By table name; `"parameters"` has its shards.
      out_of_range: What becomes of ids that are no row of their table.
      rounding_seed: Of tables with 16-bit rows.
    """
    counts, offsets, placements = [], [], []
    for table in spec.tables:
        shards = tables.shards_of(variables[table.name][tables.PARAMETERS])
        counts.append(len(shards))
        offsets.extend(_offsets(shards))
        placements.append(
            "div"
            if table.vocabulary is None
            else RowPartition.from_sizes(
                [known_size(one) for one in shards]
            ).placement
        )
    return {
        "table_names": [one.title or one.name for one in spec.tables],
        "table_num_rows": [one.num_rows for one in spec.tables],
        "table_dims": [one.dim for one in spec.tables],
        "table_num_shards": counts,
        "table_placements": placements,
        "table_offsets": offsets,
        "table_optimizers": [
            one.optimizer.name if one.optimizer else "none"
            for one in spec.tables
        ],
        "feature_names": [one.name for one in spec.features],
        "feature_tables": [one.table for one in spec.features],
        "feature_combiners": [
            spec.table_of(one).combiner for one in spec.features
        ],
        "feature_max_sequence_lengths": [
            one.max_sequence_length for one in spec.features
        ],
        "out_of_range": out_of_range,
        "table_dtypes": [tf.as_dtype(one.dtype) for one in spec.tables],
        "rounding_seed": rounding_seed,
        **_quantization(spec.tables),
    }


def activation_attrs(spec: config.EmbeddingSpec) -> dict[str, Any]:
    """Returns the attrs of an op that gives the activations of all features."""
    features = spec.features
    return {
        "num_features": len(features),
        "dims": [spec.table_of(one).dim for one in features],
        "max_sequence_lengths": [one.max_sequence_length for one in features],
    }


def batch_inputs(
    features: StepInputs, *, of_keys: bool = False
) -> dict[str, Any]:
    """Returns the inputs of an op that takes the ids of a batch."""
    if isinstance(features, packing.PackedIds):
        return {
            "ids": [features.ids],
            "splits": [tf.zeros([0], tf.int64)],
            "num_samples": tf.reshape(
                tf.cast(features.num_samples, tf.int64), [1]
            ),
            "weights": [features.weights],
            "packed": True,
            "mark": features.mark,
        }
    if not of_keys:
        embedding_inputs.unify_id_types(features)
    return {
        "ids": [
            tf.cast(one.ids, tf.int64) if of_keys else one.ids
            for one in features
        ],
        "splits": [tf.cast(one.splits, tf.int64) for one in features],
        "num_samples": tf.stack(
            [tf.cast(one.num_samples, tf.int64) for one in features]
        ),
        "weights": [one.weights for one in features],
    }


def _offsets(shards: Sequence[tf.Variable]) -> list[int]:
    offsets = [0]
    for shard in shards:
        offsets.append(offsets[-1] + known_size(shard))
    return offsets


def _quantization(specs: Sequence[config.TableSpec]) -> dict[str, list]:
    """The attrs that say how rows are rounded, 0 buckets where they are not."""
    if all(one.quantization is None for one in specs):
        return {}
    found = [
        one.quantization or config.QuantizationSpec(0.0, 0.0, 0)
        for one in specs
    ]
    return {
        "table_num_buckets": [one.num_buckets for one in found],
        "table_limits": [
            limit for one in found for limit in (one.lower, one.upper)
        ],
    }


# Of the marks of gradients: cc/core/engine/token_steps.h.
MARK_SHAPE = (64, 2)


class OpenLookup(NamedTuple):
    """A lookup that gradients may follow.

    Attributes:
      engine: Handle of the engine in the graph of the lookup. Gradients of
        control flow capture tensors of that graph, and no others.
      tokens: By replica that the calling one acts for, `[]` int64.
    """

    engine: tf.Tensor
    tokens: dict[int, tf.Tensor]


class HostEngine:
    """The steps in flight of one embedding.

    Rows and slot variables stay in their variables; they are handed to each
    call. The engine lives as long as its handle, and is not saved.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        *,
        num_replicas: int,
        is_pipelined: bool = False,
        out_of_range: str = "error",
        rounding_seed: int = 0,
        first_rows: Sequence[int] = (),
        tells_evicted: bool = True,
        in_processes: bool = False,
    ):
        """Creates the engine, eagerly, on the host.

        Args:
          spec: Tables and features.
          variables: What `tables.create_tables` made of the spec.
          num_replicas: Replicas that take part in each step.
          is_pipelined: Whether each update waits for the next step's lookup.
          out_of_range: What becomes of ids that are no row of their table;
            one of `config.OUT_OF_RANGE`.
          rounding_seed: Of tables with 16-bit rows.
          first_rows: Where the table's rows begin in the whole table, of
            tables that are parts; none: at 0.
          tells_evicted: Whether `on_evict` of open vocabularies is called
            with keys that go.
          in_processes: Whether other processes take the same steps.
        """
        self._spec = spec
        self.is_pipelined = is_pipelined
        # Only variables are kept: their handles are taken at each call, so
        # that a function being traced captures them.
        self._shards = []
        self._slots = []
        self._rounding_steps = []
        for table in spec.tables:
            self._shards.extend(
                tables.shards_of(variables[table.name][tables.PARAMETERS])
            )
            for slot in table.optimizer.slots if table.optimizer else ():
                self._slots.extend(
                    tables.shards_of(variables[table.name][slot.name])
                )
            if tables.ROUNDING_STEPS in variables[table.name]:
                self._rounding_steps.append(
                    variables[table.name][tables.ROUNDING_STEPS]
                )
        self._keys = open_tables.OpenTables(
            spec, variables, tells=tells_evicted, in_processes=in_processes
        )
        with tf.device(tables.HOST):
            self._handle = ops.create_host_engine(
                num_replicas=num_replicas,
                pipelined=is_pipelined,
                table_first_rows=list(first_rows),
                **config_attrs(
                    spec,
                    variables,
                    out_of_range=out_of_range,
                    rounding_seed=rounding_seed,
                ),
            )
        freed_gradients.free_with([self._handle])

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the engine, which keeps it alive."""
        return self._handle

    def enqueue(
        self,
        replica: int,
        training: Any,
        features: StepInputs,
    ):
        """Hands the ids of one step over."""
        with tf.device(self._handle.device):
            return ops.enqueue_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                training=tf.convert_to_tensor(training, tf.bool),
                **batch_inputs(features),
            )

    def enqueue_keys(
        self,
        training: Any,
        steps: Sequence[Sequence[embedding_inputs.FeatureIds]],
    ):
        """Hands the step of all replicas over, where tables are open.

        Args:
          training: As of `enqueue`.
          steps: By replica, in their order, the inputs of its features.
        """
        inputs = [one for features in steps for one in features]
        with tf.device(self._handle.device):
            evicted = ops.enqueue_keys(
                engine=self._handle,
                training=tf.convert_to_tensor(training, tf.bool),
                **batch_inputs(inputs, of_keys=True),
                **self._keys.arguments(inputs),
            )
            self._keys.tell(self._handle, evicted)

    def evict_keys(
        self, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Takes rows of keys away; see `OpenTables`."""
        with tf.device(self._handle.device):
            return self._keys.evict_keys(
                self._handle, table, keys, expired=expired
            )

    def tell_dropped(self, table: int, values: Sequence[Any]):
        """Passes on which keys a smaller vocabulary has no place for."""
        self._keys.tell_table(table, values)

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        if self.is_pipelined:
            # A forward-only step sees all updates; one that trains does not.
            self.land(replica, always=False)
        with tf.device(self._handle.device):
            return ops.dequeue_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                **self._what_to_look_up(),
            )

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies the gradients of the step dequeued last.

        Args:
          replica: Whose gradients they are.
          gradients: Shaped as the activations, one per feature.
          hyperparameters: One float32 vector per table, learning rate first.
        """
        with tf.device(self._handle.device):
            return ops.apply_step(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                gradients=list(gradients),
                hyperparameters=list(hyperparameters),
                **self._variables_to_update(),
            )

    def open(
        self,
        replica: int,
        features: StepInputs,
    ) -> OpenLookup:
        """Opens a lookup, which gradients may follow or not."""
        engine = self._handle
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and hasattr(graph, "capture"):
            engine = graph.capture(engine)
        arguments = {"engine": engine, "replica": tf.cast(replica, tf.int32)}
        with tf.device(self._handle.device):
            # Packed batches of keys were unpacked when they were read.
            if self._spec.has_open_tables and not isinstance(
                features, packing.PackedIds
            ):
                token, evicted = ops.open_keys(
                    **arguments,
                    **batch_inputs(features, of_keys=True),
                    **self._keys.arguments(features),
                )
                self._keys.tell(engine, evicted)
            else:
                token = ops.open_step(**arguments, **batch_inputs(features))
        return OpenLookup(engine, {replica: token})

    def look_up(self, replica: int, lookup: OpenLookup) -> list[tf.Tensor]:
        """Returns the activations of an open lookup, one per feature."""
        with tf.device(self._handle.device):
            return ops.look_up_step(
                engine=lookup.engine,
                replica=tf.cast(replica, tf.int32),
                token=lookup.tokens[replica],
                **self._what_to_look_up(),
            )

    def follow(
        self,
        replica: int,
        lookup: OpenLookup,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Keeps gradients of a lookup until they are applied, or expire.

        Returns:
          Their mark, of `MARK_SHAPE`: marks are added up and scaled as
          gradients are, and then given to `apply_followed`.
        """
        with tf.device(self._handle.device):
            return ops.follow_step(
                engine=lookup.engine,
                replica=tf.cast(replica, tf.int32),
                token=lookup.tokens[replica],
                gradients=list(gradients),
            )

    def apply_followed(
        self,
        replica: int,
        marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies what the marks of all replicas stand for, as one update."""
        with tf.device(self._handle.device):
            return ops.apply_followed(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                marks=marks,
                hyperparameters=list(hyperparameters),
                **self._variables_to_update(),
            )

    def land(self, replica: int = 0, *, always: bool = True):
        """Lands the update that pipelining holds back, if there is one.

        Args:
          replica: Who asks.
          always: False: only before a forward-only step of that replica.
        """
        with tf.device(self._handle.device):
            return ops.land_update(
                engine=self._handle,
                replica=tf.cast(replica, tf.int32),
                always=always,
                **self._variables_to_update(),
            )

    def _what_to_look_up(self) -> dict[str, Any]:
        return {
            "shards": _handles(self._shards),
            **activation_attrs(self._spec),
        }

    def _variables_to_update(self) -> dict[str, list[tf.Tensor]]:
        return {
            "shards": _handles(self._shards),
            "slots": _handles(self._slots),
            "rounding_steps": _handles(self._rounding_steps),
        }

    def retire(self, why: str):
        """Refuses every later call, as `why` says; none if it is empty.

        Raises:
          tf.errors.FailedPreconditionError: If steps are in flight.
        """
        with tf.device(self._handle.device):
            ops.retire_host_engine(engine=self._handle, why=why)

    def reset(self):
        """Forgets every step in flight."""
        with tf.device(self._handle.device):
            return ops.reset_host_engine(engine=self._handle)

    def describe(self) -> dict[str, Any]:
        """Returns what the engine holds, as Python values."""
        return describe_counts(self._handle, self._spec)


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]
