"""Reads TensorFlow's table and feature configs into frozen specs.

This module does not import TensorFlow. The module only reads the attributes of
`TableConfig` and `FeatureConfig` objects. The objects are not modified, so two
embeddings with different optimizers can share the same objects.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from tf_layoutmap.embedding.configs import optimizer_specs

COMBINERS = ("mean", "sum", "sqrtn")


OUT_OF_RANGE = ("error", "drop", "clip")

# Maximum number of buckets. Float32 cannot represent larger indices exactly.
_MAX_NUM_BUCKETS = 2**23
# The smallest positive normal float32 number.
_SMALLEST_FLOAT32 = 2.0**-126


# Attribute of a `TableConfig` in which a layer stores the title of the table.
TITLE = "_layoutmap_title"


@dataclasses.dataclass(frozen=True)
class QuantizationSpec:
    """Settings for rounding looked-up values to `num_buckets` values.

    The rounded values are evenly spaced from `lower` to `upper`.
    """

    lower: float
    upper: float
    num_buckets: int


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """Spec of one table of shape `[num_rows, dim]`.

    Attributes:
      name: Name, which is unique among the tables of an embedding.
      num_rows: Number of rows, at least 1.
      dim: Number of columns, at least 1.
      combiner: Operation that combines the rows of a sample; one of
        `COMBINERS`.
      initializer: Callable that takes a shape and returns initial rows.
      optimizer: The update rule, or None for a table that is only used for
        serving.
      quantization: How lookups round the values of rows, or None for no
        rounding.
      dtype: Storage dtype of rows: `"float32"`, `"bfloat16"` or `"float16"`.
      vocabulary: The `OpenTableSpec` of a table whose ids are keys, otherwise
        None. In a table with keys, all keys without a separate row share the
        last row.
      title: Name of the table in messages of the engine. If empty, the messages
        contain `name`.
    """

    name: str
    num_rows: int
    dim: int
    combiner: str
    initializer: Callable[..., Any]
    optimizer: optimizer_specs.OptimizerSpec | None
    quantization: QuantizationSpec | None = None
    dtype: str = "float32"
    vocabulary: Any = None
    title: str = ""

    @property
    def is_half(self) -> bool:
        """Whether rows are stored in 16 bits."""
        return self.dtype != "float32"

    @property
    def slots(self) -> Sequence[optimizer_specs.SlotSpec]:
        """Slot variables of the optimizer; empty without an optimizer."""
        return self.optimizer.slots if self.optimizer else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return (2 if self.is_half else 4) * self.num_rows * self.dim

    @property
    def num_slot_bytes(self) -> int:
        """Bytes of the slot variables, which are float32."""
        slots = self.slots
        return 4 * self.num_rows * sum(slot.dim(self.dim) for slot in slots)


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """Spec of one input feature and its table.

    Attributes:
      name: Path in the feature config, such as `"ads/clicks"`.
      table: Index of the table.
      max_sequence_length: Number of positions of a sequence feature. The value
        is 0 for all other features, whose ids are combined.
      output_shape: The activations' shape without `dim`. If None, the shape is
        derived from the input.
      validate: Whether serving checks ids before the lookup.
    """

    name: str
    table: int
    max_sequence_length: int
    output_shape: tuple[int | None, ...] | None = None
    validate: bool = True

    @property
    def is_sequence(self) -> bool:
        """Whether the lookup returns one activation per position."""
        return self.max_sequence_length > 0


@dataclasses.dataclass(frozen=True)
class EmbeddingSpec:
    """Specs of all tables and features, in a deterministic order.

    Attributes:
      tables: Tables, in the order in which features first use the tables.
      features: Features in `tf.nest.flatten` order.
    """

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]

    @property
    def has_open_tables(self) -> bool:
        """Whether a table has an open vocabulary, whose ids are keys."""
        return any(table.vocabulary is not None for table in self.tables)

    @property
    def vocabulary_settings(self) -> dict[str, Any]:
        """The `OpenVocabulary` of each table that has one, by table name."""
        return {
            table.name: table.vocabulary.settings
            for table in self.tables
            if table.vocabulary is not None
        }

    def has_keys(self) -> list[bool]:
        """Returns for each feature whether its ids are keys."""
        return [
            self.table_of(feature).vocabulary is not None
            for feature in self.features
        ]

    def table_of(self, feature: FeatureSpec) -> TableSpec:
        """Returns the table of `feature`."""
        return self.tables[feature.table]


def read_feature_config(
    named_features: Sequence[tuple[str, Any]],
    optimizer: Any,
    *,
    takes_slot_fn: bool = False,
    takes_layout: bool = False,
) -> tuple[EmbeddingSpec, list[Any]]:
    """Reads a flattened feature config.

    Args:
      named_features: `(path, FeatureConfig)` pairs in flatten order.
      optimizer: Optimizer of tables whose config has no optimizer, or None.
      takes_slot_fn: Whether optimizers with a `slot_variable_creation_fn` are
        accepted.
      takes_layout: Whether tables with a `layout` are accepted.

    Returns:
      A tuple of the spec and a list of the `TableConfig` objects, in the order
      of `spec.tables`.

    Raises:
      TypeError: If an entry is not a `FeatureConfig`.
      ValueError: If there is no feature, if two tables have the same name, or
        if the host engine does not support a setting.
    """
    if not named_features:
        raise ValueError(
            "Argument `feature_config` must hold at least one FeatureConfig. "
            "Received: an empty structure."
        )
    configs: list[Any] = []
    features: list[FeatureSpec] = []
    for path, feature in named_features:
        if not (
            hasattr(feature, "table")
            and hasattr(feature, "max_sequence_length")
        ):
            raise TypeError(
                "Argument `feature_config` must be a nested structure of "
                "tf.tpu.experimental.embedding.FeatureConfig. Received: "
                f"{type(feature)} at path {path!r}."
            )
        # Configs are compared by identity, so two equal configs represent two
        # tables.
        known = [table_config is feature.table for table_config in configs]
        if not any(known):
            configs.append(feature.table)
            known.append(True)
        features.append(_read_feature(path, feature, known.index(True)))
    tables = [
        _read_table(config, index, optimizer, takes_slot_fn, takes_layout)
        for index, config in enumerate(configs)
    ]
    _check_unique_names(tables)
    return EmbeddingSpec(tuple(tables), tuple(features)), configs


def index_of_table(
    key: Any, spec: EmbeddingSpec, table_configs: Sequence[Any], argument: str
) -> int:
    """Returns the index of the table to which a key of a mapping refers.

    Args:
      key: Name of the table, or the `TableConfig` of the table.
      spec: Spec with the tables.
      table_configs: The `TableConfig` of each table.
      argument: Name of the argument that contains the mapping, for the message.

    Raises:
      ValueError: If `key` does not match a table.
    """
    for index, table in enumerate(spec.tables):
        if key == table.name or key is table_configs[index]:
            return index
    raise ValueError(
        f"Argument `{argument}` must name tables of the feature config, "
        f"{[table.name for table in spec.tables]}. Received: {key!r}."
    )


def _read_feature(path: str, feature: Any, table: int) -> FeatureSpec:
    name = path or feature.name or "feature"
    output_shape = getattr(feature, "output_shape", None)
    # If `output_shape` is not set, FeatureConfig stores a TensorShape of
    # unknown rank.
    if output_shape is None or getattr(output_shape, "rank", None) is None:
        return FeatureSpec(
            name,
            table,
            int(feature.max_sequence_length),
            None,
            feature.validate_weights_and_indices,
        )
    shape = tuple(output_shape.as_list())
    if not shape or None in shape[1:] or 0 in shape[1:]:
        raise ValueError(
            "`output_shape` of a FeatureConfig must have at least one "
            "dimension, and only the first may be unknown. Received: "
            f"output_shape={output_shape} (feature {name!r})."
        )
    # As in TensorFlow, `max_sequence_length` is ignored if `output_shape` is
    # set. If a ragged input has fewer samples than the shape has positions, the
    # ids are distributed over the positions.
    return FeatureSpec(
        name, table, 0, shape, feature.validate_weights_and_indices
    )


def _read_table(
    config: Any,
    index: int,
    optimizer: Any,
    takes_slot_fn: bool,
    takes_layout: bool,
) -> TableSpec:
    name = f"table_{index}" if config.name is None else config.name
    where = f"(table {name!r})"
    if not isinstance(name, str) or not name:
        raise ValueError(
            "The name of a TableConfig must be a non-empty string. "
            f"Received: name={name!r}."
        )
    if getattr(config, "layout", None) is not None and not takes_layout:
        raise ValueError(
            "`layout` of a TableConfig must be None: the host engine does not "
            "support it, because it shards a table over SparseCores. "
            f"Received: layout={config.layout!r} {where}."
        )
    if getattr(config, "dtype", "float32") != "float32":
        raise ValueError(
            "The dtype of a TableConfig must be float32; for 16-bit rows, "
            "pass `table_dtypes` to TPUEmbedding. "
            f"Received: dtype={config.dtype!r} {where}."
        )
    if config.combiner not in COMBINERS:
        raise ValueError(
            f"The combiner of a TableConfig must be one of {COMBINERS}. "
            f"Received: combiner={config.combiner!r} {where}."
        )
    table_optimizer = config.optimizer
    return TableSpec(
        name=name,
        num_rows=int(config.vocabulary_size),
        dim=int(config.dim),
        combiner=config.combiner,
        initializer=config.initializer,
        optimizer=optimizer_specs.read_optimizer(
            optimizer if table_optimizer is None else table_optimizer,
            table=name,
            takes_slot_fn=takes_slot_fn,
        ),
        quantization=_read_quantization(
            getattr(config, "quantization_config", None), where
        ),
        title=getattr(config, TITLE, ""),
    )


def _read_quantization(quantization: Any, where: str):
    if quantization is None:
        return None
    limits = quantization.lower, quantization.upper
    if (
        not all(
            isinstance(limit, numbers.Real) and math.isfinite(limit)
            for limit in limits
        )
        or not limits[0] < limits[1]
    ):
        raise ValueError(
            "The limits of a QuantizationConfig must be finite, `lower` below "
            f"`upper`. Received: {quantization!r} {where}."
        )
    num_buckets = quantization.num_buckets
    if not isinstance(num_buckets, int) or not (
        2 <= num_buckets <= _MAX_NUM_BUCKETS
    ):
        raise ValueError(
            "`num_buckets` of a QuantizationConfig must be an int in [2, "
            f"{_MAX_NUM_BUCKETS}]. Received: {quantization!r} {where}."
        )
    # In TensorFlow's threads, the CPU flushes smaller float32 numbers to zero.
    if (limits[1] - limits[0]) / (num_buckets - 1) < _SMALLEST_FLOAT32:
        raise ValueError(
            "The limits of a QuantizationConfig must be at least "
            f"{_SMALLEST_FLOAT32:.2e} * (num_buckets - 1) apart. Received: "
            f"{quantization!r} {where}."
        )
    return QuantizationSpec(float(limits[0]), float(limits[1]), num_buckets)


def _check_unique_names(tables: Sequence[TableSpec]):
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ValueError(
                "Tables must have unique names; the name of a TableConfig "
                "defaults to `table_{i}`, where i is its position. Multiple "
                f"tables with name {table.name!r} found."
            )
        seen.add(table.name)
