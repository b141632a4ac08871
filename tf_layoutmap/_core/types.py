"""Type aliases and protocols of public signatures.

This module imports no other package at run time, so that signatures do not
import TensorFlow or Keras. Other modules import its names for type checkers
only.

The type stubs of TensorFlow lack `tf.tpu` and most of `tf.distribute`. For type
checkers, a union with a missing name accepts every object. Therefore, protocols
describe the objects of these packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NotRequired,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
)

if TYPE_CHECKING:
    import keras
    import numpy as np
    import numpy.typing as npt
    import tensorflow as tf

_Leaf = TypeVar("_Leaf")
_Object = TypeVar("_Object", covariant=True)

TensorLike: TypeAlias = "tf.Tensor | tf.IndexedSlices | npt.ArrayLike"
"""A value that `tf.convert_to_tensor` accepts: tensor, variable or array."""

ShapeLike: TypeAlias = (
    "tf.TensorShape | Iterable[SupportsIndex | None] | SupportsIndex"
)
"""A value that `tf.TensorShape` accepts."""

DTypeLike: TypeAlias = "tf.DType | npt.DTypeLike | int"
"""A value that `tf.as_dtype` accepts."""

RowNumbers: TypeAlias = "np.ndarray | tf.Tensor"
"""Integers that number rows or shards."""

PlacementFunction: TypeAlias = (
    "Callable[[RowNumbers], tuple[RowNumbers, RowNumbers]]"
)
"""A function of global rows that returns shards and local rows."""

ShardCounts: TypeAlias = "Callable[..., Sequence[int]]"
"""A partitioner: a callable of shape and dtype with a number for each axis."""


class VariableSpec(Protocol):
    """The spec of a `tf.Variable`, which TensorFlow keeps private."""

    @property
    def shape(self) -> tf.TensorShape: ...

    @property
    def dtype(self) -> tf.DType: ...

    @property
    def trainable(self) -> bool: ...


class StockShardedVariable(Protocol):
    """TensorFlow's own `ShardedVariable`, which has no stub."""

    @property
    def variables(self) -> Sequence[tf.Variable]: ...

    def __getattr__(self, name: str) -> Any: ...


class Reference(Protocol[_Object]):
    """A hashable reference to an object, like the result of `Tensor.ref`."""

    def deref(self) -> _Object: ...


class Record(Protocol):
    """An object of a data class or attrs class, which `tf.nest` may support."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# A mapping with another type of keys than `Any` would not accept all dicts,
# because `Mapping` is invariant in the type of its keys.
Nested: TypeAlias = (
    "_Leaf | Mapping[Any, Nested[_Leaf]] | Sequence[Nested[_Leaf]] | Record"
)
"""A nested structure of `tf.nest` with leaves of one type, or one leaf."""


class DistributedValue(Protocol):
    """A value of several replicas: `tf.distribute.DistributedValues`."""

    @property
    def values(self) -> tuple[object, ...]: ...


SparseIds: TypeAlias = "tf.RaggedTensor | tf.SparseTensor"
"""A tensor with any number of ids per sample."""

KerasInput: TypeAlias = "TensorLike | SparseIds | keras.KerasTensor"
"""A value that a Keras model passes to its layers."""

FeatureTensor: TypeAlias = "KerasInput | DistributedValue | None"
"""The ids, weights or gradients of one feature; None for missing ones."""

Features: TypeAlias = "Nested[FeatureTensor]"
"""Nested structure of ids, weights or gradients, as the feature config."""


class TableConfig(Protocol):
    """`TableConfig` of `tf.tpu.experimental.embedding` or of keras-rs."""

    @property
    def vocabulary_size(self) -> int: ...


class FeatureConfig(Protocol):
    """`FeatureConfig` of `tf.tpu.experimental.embedding` or of keras-rs."""

    @property
    def table(self) -> TableConfig: ...


FeatureConfigs: TypeAlias = "Nested[FeatureConfig]"
"""Nested structure of `FeatureConfig`."""

# The name of a table, or its config, as a key of mappings.
TableKey = TypeVar("TableKey", bound="str | TableConfig")


class EmbeddingOptimizer(Protocol):
    """An optimizer of `tf.tpu.experimental.embedding` or `tlm.optimizers`."""

    @property
    def use_gradient_accumulation(self) -> bool: ...


LayerOptimizer: TypeAlias = (
    "EmbeddingOptimizer | keras.optimizers.Optimizer | str | None"
)
"""The optimizer of a layer's tables; also one of Keras, or its name."""

Initializer: TypeAlias = "str | Mapping[str, Any] | Callable[..., object]"
"""An initializer of Keras: its name, its config, or a callable."""

WeightFunction: TypeAlias = (
    "str | Mapping[str, Any] | Callable[..., object] | None"
)
"""A regularizer or a constraint of Keras, in the same forms."""

InputShape: TypeAlias = "Nested[ShapeLike | None]"
"""Shapes of inputs that Keras passes to `build`."""


class KerasLayer(Protocol):
    """A layer or a model of Keras 3 or tf_keras."""

    @property
    def trainable_weights(self) -> object: ...

    def count_params(self) -> object: ...


class HasEmbedding(Protocol):
    """A layer of `tlm.layers` with tables, for Keras 3 or tf_keras."""

    @property
    def embedding(self) -> object: ...


class HasTables(Protocol):
    """A `tlm.TPUEmbedding`, or a layer with the same property."""

    @property
    def embedding_tables(self) -> object: ...


class HasSlots(Protocol):
    """A table on the host or on a mesh that creates its slot variables."""

    @property
    def name(self) -> str: ...

    def new_slot(self, slot: Any) -> object: ...


AnyEmbedding: TypeAlias = "HasEmbedding | HasTables"
"""A `tlm.TPUEmbedding`, or a layer of `tlm.layers` with tables."""

# Key of a mapping from tables or layers.
TableOrLayer = TypeVar("TableOrLayer", bound="str | TableConfig | AnyEmbedding")


class Logs(Protocol):
    """The dict to which a callback of Keras adds numbers."""

    def update(self, values: Mapping[str, float], /) -> None: ...


class Weights(Protocol):
    """Saved arrays of one object by name, as Keras passes them."""

    def keys(self) -> Iterable[str]: ...

    def __getitem__(self, name: str, /) -> Any: ...

    def __setitem__(self, name: str, value: Any, /) -> None: ...


class VocabularyStats(TypedDict):
    """The result of `Vocabulary.stats`, which describes the entries."""

    num_keys: int
    num_rows: int
    load: float
    step: int
    num_lookups: int
    num_known: int
    num_probes: int
    num_admitted: int
    num_rejected: int
    num_full: int
    num_evicted: int
    num_expired: int
    hit_rate: float | None
    key_type: str | None
    # Only with `keep_strings=True`.
    num_strings: NotRequired[int]
    num_string_bytes: NotRequired[int]
    num_collisions: NotRequired[int]
    collisions: NotRequired[list[tuple[bytes, bytes]]]


class LayerOptions(TypedDict, total=False):
    """Arguments of every layer of Keras 3 or tf_keras."""

    name: str | None
    dtype: object
    trainable: bool
    autocast: bool
    activity_regularizer: WeightFunction
    input_shape: ShapeLike
    # Only in tf_keras.
    batch_input_shape: ShapeLike
    batch_size: int | None
    dynamic: bool
    weights: Sequence[TensorLike] | None
    implementation: object
