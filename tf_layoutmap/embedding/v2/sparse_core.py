"""`TPUEmbeddingV2` on TPUs with SparseCores.

The class of an embedding is a subclass of `SparseCoreMethods` and of
TensorFlow's class, and traces the operations of TensorFlow's class. It also
does the following:

- Ids that are not rows of their table raise an error. In TensorFlow's class,
  such an id is a row of another table of the stack.
- Settings that TensorFlow's class ignores raise an error.
- The initial rows are the rows that the initializer returns for the full table.
  TensorFlow's class calls the initializer for each chip, and the rows of a chip
  do not have consecutive ids.
- Stacks are computed from the samples of all features. TensorFlow's class
  counts only the first feature.
- A gradient can be None, also if the table is padded.
- An asynchronous checkpoint contains the tables.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding import (
    inputs,
    replicas,
    steps,
    table_variable,
    tpu_program,
)
from tf_layoutmap.embedding.checkpoints import layouts
from tf_layoutmap.embedding.checkpoints.restoring import SparseCoreRestore
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.state import EmbeddingState
from tf_layoutmap.embedding.tpu import batches
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase, EmbeddingOptions
from tf_layoutmap.embedding.v2.stacked_table import (
    StackedTable,
    copy_in_async_checkpoints,
)
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import initial_value

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Features

_tpu = tf.tpu.experimental.embedding

# TensorFlow's class has lists with this number of elements.
_MAX_CORES_PER_CHIP = 4
# Limit of the ids of a stack if a program does not set it.
_DEFAULT_LIMIT: int = tf_private.TPUEmbeddingV2.DEFAULT_MAX_IDS_PER_TABLE
# Optimizers for which SparseCores have an operation.
_OPTIMIZERS = ("SGD", "Adagrad", "AdagradMomentum", "Adam", "FTRL")
# Settings of optimizers that the operations do not have, and their defaults.
_UNSUPPORTED: Mapping[str, Any] = {
    "clip_weight_min": None,
    "clip_weight_max": None,
    "clip_gradient_min": None,
    "clip_gradient_max": None,
    "weight_decay_factor": None,
    "multiply_weight_decay_factor_by_learning_rate": None,
    "use_gradient_accumulation": True,
    "lazy_adam": True,
}
_ADVICE = 'Pass engine="host" for tables on the host.'
# Name scope of the operations that raise an error if a batch has too many ids.
# The error message contains the name of the operation.
_LIMITS_SCOPE = "limits_of_tlm.inspect_ids.sparse_core_limits"


if TYPE_CHECKING:

    class _Embedding(SparseCoreRestore, _tpu.TPUEmbeddingV2, EmbeddingBase):
        pass
else:
    _Embedding = object


class SparseCoreMethods(_Embedding):
    """Methods of `TPUEmbeddingV2` that override methods of TensorFlow's class.

    `embedding_tables` and `variables` have the form of TensorFlow's class:
    their keys are the names of stacks.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        sparse_core_embedding_config: Any = None,
        **options: Any,
    ):
        """Reads and checks the configuration; see `TPUEmbeddingV2`."""
        _check_options(options)
        strategy_replicas = replicas.Replicas()
        spec, table_configs = config.read_feature_config(
            inputs.flatten_with_paths(feature_config),
            optimizer,
            takes_slot_fn=True,
            takes_layout=True,
        )
        cores_per_chip = _cores_per_chip(strategy_replicas.strategy)
        num_samples = [
            _num_samples(feature, cores_per_chip) for feature in spec.features
        ]
        if sparse_core_embedding_config is None:
            sparse_core_embedding_config = _tpu.SparseCoreEmbeddingConfig()
        copies = [
            _copy_of_table(table_config, table, optimizer)
            for table_config, table in zip(table_configs, spec.tables)
        ]
        table_layouts = _layouts_of(
            copies,
            spec,
            num_samples,
            num_chips=strategy_replicas.num_replicas,
            cores_per_chip=cores_per_chip,
            table_stacking=(
                not sparse_core_embedding_config.disable_table_stacking
            ),
        )
        for table in copies:
            table.layout = table_layouts[table.name]
        sparse_core_embedding_config = dataclasses.replace(
            sparse_core_embedding_config,
            **_limits_by_stack(
                sparse_core_embedding_config, table_layouts.values()
            ),
        )
        flat = []
        for feature, feature_spec in zip(
            tf.nest.flatten(feature_config), spec.features
        ):
            flat.append(copy.copy(feature))
            flat[-1].table = copies[feature_spec.table]
        super().__init__(
            tf.nest.pack_sequence_as(feature_config, flat),
            None,
            pipeline_execution_with_tensor_core,
            sparse_core_embedding_config,
        )
        self._initializers = types.MappingProxyType(
            {table.name: table.initializer for table in copies}
        )
        if _initializes_on_host(sparse_core_embedding_config):
            # The initializers are called in `_create_variables_and_slots`.
            for tables in self._stacked_table_to_tables.values():
                for table in tables:
                    table.initializer = tf.zeros_initializer()
        self._state = EmbeddingState(
            feature_config,
            spec,
            table_configs,
            strategy_replicas,
            "error",
            _Backend(self),  # pyright: ignore[reportArgumentType] See `_Backend`.
            False,
        )

    def _create_variables_and_slots(self) -> dict[str, dict[str, Any]]:
        variables = self._created_variables()
        for of_stack in variables.values():
            for variable in of_stack.values():
                copy_in_async_checkpoints(variable)
        return variables

    def _created_variables(self) -> dict[str, dict[str, Any]]:
        config = self._sparse_core_embedding_config
        if not _initializes_on_host(config):
            return super()._create_variables_and_slots()
        shards: dict[str, list[layouts.Array]] = {}

        def create(next_creator: Any, **kwargs: Any) -> Any:
            # TensorFlow calls this function for each chip. The name of a shard
            # is the name of its stack and the index of the replica.
            stack, _, index = kwargs["name"].rpartition("/")
            initializer = kwargs["initial_value"]
            if (
                stack in self._stacked_table_to_tables
                and isinstance(initializer, functools.partial)
                # The values of a checkpoint are not computed by a function.
                and inspect.isfunction(initializer.func)
            ):
                if stack not in shards:
                    shards.clear()
                    shards[stack] = self._initial_shards(stack)
                value = shards[stack][int(index)]
                kwargs["initial_value"] = lambda *_, **__: tf.constant(value)
            return next_creator(**kwargs)

        with tf.variable_creator_scope(create):
            return super()._create_variables_and_slots()

    def _initial_shards(self, stack: str) -> list[layouts.Array]:
        """Returns the initial rows of a stack on each chip."""
        layouts_of_stack = layouts.by_stack(self.embedding_layouts.values())[
            stack
        ]
        with tf.device(HOST):
            rows = [
                self._initial_rows(layout.table_name, layout.unsharded_shape)
                for layout in layouts_of_stack
            ]
        return np.split(
            layouts.stacked(
                ((of_table, 0.0) for of_table in rows), layouts_of_stack
            ),
            layouts_of_stack[0].num_partitions,
        )

    def _initial_rows(self, table: str, shape: Iterable[int]) -> layouts.Array:
        num_rows, dim = shape
        return initial_value.of_shard(
            table_variable.bind_shape(
                self._initializers[table], (num_rows, dim)
            ),
            (num_rows, dim),
            tf.float32,
            RowPartition.from_sizes([num_rows]),
            0,
            table,
        ).numpy()

    def build(self, *_: Any, **__: Any) -> None:
        """Creates the variables, if they do not exist yet.

        The arguments of `TPUEmbedding.build` have no effect, because the
        `output_shape` of each feature contains the number of samples.
        """
        super().build()

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """Returns the rows by table name; see `TPUEmbeddingV2`."""
        with tf.init_scope():
            self.build()
        return {
            name: tf.constant(variables["parameters"].numpy())
            for name, variables in self._variables_of_tables().items()
        }

    @property
    def slot_variables(self) -> dict[Any, dict[str, Any]]:
        """Dict from each `TableConfig` to its unsharded slot variables."""
        with tf.init_scope():
            self.build()
        by_name = self._variables_of_tables()
        return {
            table_config: {
                name: variable
                for name, variable in by_name[table.name].items()
                if name != "parameters"
            }
            for table_config, table in self._tables()
        }

    def _rows_to_export(self) -> dict[Any, Any]:
        variables = self._variables_of_tables()
        return {
            table_config: variables[table.name]["parameters"].copy()
            for table_config, table in self._tables()
        }

    def _variables_of_tables(self) -> dict[str, dict[str, Any]]:
        return {
            table.name: {
                name: StackedTable(
                    variable, self.embedding_layouts[table.name], name
                )
                for name, variable in self._variables[
                    self.embedding_layouts[table.name].stacked_table_name
                ].items()
            }
            for table in self._state.spec.tables
        }

    def enqueue(
        self,
        features: Features,
        weights: Features | None = None,
        device: str | None = None,
    ) -> Any:
        """Prepares a batch on the host; see `TPUEmbeddingV2`."""
        flat_weights = steps.check_structures(
            features, weights, self._state.feature_config
        )
        for feature, value, weight in zip(
            self._state.spec.features, tf.nest.flatten(features), flat_weights
        ):
            batches.convert_inputs(feature, value)
            if weight is not None and not isinstance(value, tf.Tensor):
                inputs.check_weights(feature, value, weight)
        return super().enqueue(features, weights, device)

    def _preprocess_features(self, *args: Any, **kwargs: Any) -> Any:
        # TensorFlow casts ids to int32, so they are checked before.
        checks = batches.check_ids(
            self._state.spec,
            [
                value.values
                if isinstance(value, tf.SparseTensor | tf.RaggedTensor)
                else value
                for value in kwargs["flat_inputs"]
            ],
        )
        with tf.control_dependencies(checks), tf.name_scope(_LIMITS_SCOPE):
            return super()._preprocess_features(*args, **kwargs)

    def _stack_gradients(self, gradients: Any) -> Any:
        checked = []
        for feature, gradient in zip(
            self._state.spec.features, tf.nest.flatten(gradients)
        ):
            table = self._state.spec.table_of(feature)
            shape = [*(feature.output_shape or ()), table.dim]
            if gradient is not None:
                gradient = steps.read_gradient(
                    feature, gradient, tf.TensorShape(shape)
                )
            elif self._table_to_padding_columns[table.name]:
                gradient = steps.zero_gradient(feature, shape)
            checked.append(gradient)
        return super()._stack_gradients(
            tf.nest.pack_sequence_as(self._feature_config, checked)
        )


class _Backend:
    """The parts of the interface in `embedding.backend` for SparseCores.

    TensorFlow's class runs the steps. The checkpoint hooks and the layers call
    the methods of this class.
    """

    is_on_tpu: ClassVar[bool] = True
    has_ordered_steps: ClassVar[bool] = True
    is_sharded: ClassVar[bool] = False
    has_row_steps: ClassVar[bool] = False
    # As for `TPUBackend`.
    mark_shape: ClassVar[tuple[int, ...]] = ()
    variable_device: ClassVar[str] = HOST

    def __init__(self, embedding: SparseCoreMethods):
        """Stores the embedding."""
        self._embedding = embedding

    @property
    def is_built(self) -> bool:
        """Whether the tables exist."""
        return self._embedding._built

    def is_in_program(self) -> bool:
        """Whether the caller is being traced as part of a TPU program."""
        try:
            return tpu_program.is_in_tpu_program()
        except RuntimeError:  # In control flow.
            return False

    @property
    def store(self) -> Any:
        """Raises NotImplementedError; only deltas use this attribute."""
        raise NotImplementedError(
            "tlm.deltas does not support tables on SparseCores. Write deltas "
            f"of a TPUEmbeddingV2 with tables on the host. {_ADVICE}"
        )

    def before_read(self) -> None:
        """Does nothing, because steps use the variables."""

    before_async_copy = before_read
    load_variables = before_read
    retrieve_variables = before_read

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Tables on SparseCores do not support `{name}`. Restore their "
            'checkpoint into a tlm.TPUEmbeddingV2 with engine="host".'
        )


def _check_options(options: Mapping[str, Any]) -> None:
    """Checks that options of the host engine have their default values."""
    parameters = inspect.signature(EmbeddingBase.__init__).parameters
    for name, value in options.items():
        if name not in EmbeddingOptions.__annotations__:
            raise TypeError(
                "TPUEmbeddingV2.__init__() got an unexpected keyword argument "
                f"{name!r}."
            )
        default = parameters[name].default
        if value != default and (name, value) != ("engine", "tpu"):
            raise ValueError(
                f"Argument `{name}` must be {default!r} on SparseCores. "
                f"Received: {name}={value!r}. {_ADVICE}"
            )


def _cores_per_chip(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of SparseCores of each chip.

    Raises:
      RuntimeError: If the strategy does not know its TPU.
      NotImplementedError: If TensorFlow does not support this number.
    """
    feature = strategy.extended.tpu_hardware_feature
    if feature.tpu_hardware_feature_proto is None:
        raise RuntimeError(
            "The number of SparseCores of the TPU is unknown. Call "
            "tf.tpu.experimental.initialize_tpu_system(resolver) before the "
            "TPUStrategy is created."
        )
    # TensorFlow's class has the same default.
    cores_per_chip = feature.num_embedding_devices_per_chip or 4
    if cores_per_chip > _MAX_CORES_PER_CHIP:
        raise NotImplementedError(
            "TensorFlow's TPUEmbeddingV2 supports at most "
            f"{_MAX_CORES_PER_CHIP} SparseCores per chip. Received: "
            f"{cores_per_chip}. {_ADVICE}"
        )
    return cores_per_chip


def _num_samples(feature: config.FeatureSpec, cores_per_chip: int) -> int:
    """Returns the number of samples of a feature and of a replica.

    Raises:
      ValueError: If the number is unknown, or SparseCores do not divide it.
    """
    shape = feature.output_shape
    if shape is None or shape[0] is None:
        raise ValueError(
            "`output_shape` of each FeatureConfig must be set on SparseCores, "
            "for example to [number of samples of a replica]. Received: "
            f"output_shape={shape} (feature {feature.name!r})."
        )
    # Only the first size can be unknown.
    num_samples = math.prod(size or 0 for size in shape)
    if not num_samples or num_samples % cores_per_chip:
        raise ValueError(
            "The number of samples of each feature must be a positive multiple "
            f"of the {cores_per_chip} SparseCores of a chip. Received: "
            f"{num_samples} samples, output_shape={list(shape)} (feature "
            f"{feature.name!r})."
        )
    return num_samples


def _copy_of_table(
    table_config: Any, table: config.TableSpec, default_optimizer: Any
) -> Any:
    """Returns a `TableConfig` to which TensorFlow's class may write.

    Raises:
      ValueError: If the table has no optimizer, or another one than SparseCores
        support.
      NotImplementedError: If SparseCores do not support a setting of the
        optimizer.
    """
    copied = copy.copy(table_config)
    copied.name = table.name
    if copied.optimizer is None:
        copied.optimizer = default_optimizer
    kind = type(copied.optimizer).__name__
    where = f"(table {table.name!r})"
    if kind not in _OPTIMIZERS:
        raise ValueError(
            "The optimizer of each table on SparseCores must be one of "
            f"{_OPTIMIZERS} of tf.tpu.experimental.embedding. Received: "
            f"{copied.optimizer!r} {where}. {_ADVICE}"
        )
    for name, default in _UNSUPPORTED.items():
        value = getattr(copied.optimizer, name, default)
        if value != default:
            raise NotImplementedError(
                f"`{name}` of {kind} must be {default!r} on SparseCores, "
                "whose operations do not have this setting. Received: "
                f"{name}={value!r} {where}. {_ADVICE}"
            )
    return copied


def _layouts_of(
    table_configs: list[Any],
    spec: config.EmbeddingSpec,
    num_samples: list[int],
    **options: Any,
) -> dict[str, layouts.TableLayout]:
    """Returns the layout of each table, by its name.

    Args:
      table_configs: The `TableConfig` of each table, with name and optimizer.
      spec: Specs of the tables and features.
      num_samples: Number of samples of each feature and of a replica.
      **options: Further arguments of `tf_private.sparse_core_layouts`.
    """
    samples_of_table = {table.name: 0 for table in spec.tables}
    num_features = dict(samples_of_table)
    for feature, number in zip(spec.features, num_samples):
        name = spec.table_of(feature).name
        samples_of_table[name] += number
        num_features[name] += 1
    computed = tf_private.sparse_core_layouts(
        [table for table in table_configs if table.layout is None],
        samples_of_table,
        num_features,
        **options,
    )
    return {
        table.name: table.layout or computed[table.name]
        for table in table_configs
    }


def _limits_by_stack(
    config: Any, table_layouts: Iterable[Any]
) -> dict[str, dict[str, int]]:
    """Returns the id limits of the stacks, and warns of default limits.

    Raises:
      ValueError: If a limit belongs neither to a stack nor to a table.
    """
    tables: dict[str, list[str]] = {}
    for layout in table_layouts:
        tables.setdefault(layout.stacked_table_name, []).append(
            layout.table_name
        )
    missing: set[str] = set()
    by_stack: dict[str, dict[str, int]] = {}
    for name in ("max_ids_per_table", "max_unique_ids_per_table"):
        limits: Mapping[str, int] = getattr(config, name) or {}
        known = {
            *tables,
            *(table for names in tables.values() for table in names),
        }
        unknown = sorted(set(limits) - known)
        if unknown:
            raise ValueError(
                f"`{name}` of the SparseCoreEmbeddingConfig must have the "
                "names of tables, or of stacks of tables, "
                f"{sorted(known)}. Received: {unknown}."
            )
        by_stack[name] = {}
        for stack, names in tables.items():
            if stack in limits:
                by_stack[name][stack] = limits[stack]
            elif set(names) & set(limits):
                by_stack[name][stack] = sum(
                    limits.get(table, _DEFAULT_LIMIT) for table in names
                )
            else:
                missing.add(stack)
    if missing:
        logging.warning(
            "The SparseCoreEmbeddingConfig has no id limits for %s. A batch "
            "with more than %d ids for one SparseCore raises an error. "
            "tlm.inspect_ids(...).sparse_core_limits() computes the limits "
            "from data.",
            sorted(missing),
            _DEFAULT_LIMIT,
        )
    return by_stack


def _initializes_on_host(config: Any) -> bool:
    return (
        config.initialize_tables_on_host
        and not config.enable_fast_table_initialization
    )
