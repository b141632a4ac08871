"""Reads and checks the inputs of a step for the cores of a TPU.

The enqueue op takes three lists with one entry per feature. The rank and the
length of an entry in the first list determine whether the input is dense,
sparse or ragged. The op takes int64 ids and int32 sample indices. However, the
TPU looks up ids as 32-bit numbers, and the result for an out-of-range id is not
documented. Outside `strategy.run`, the ids are on the host, and `check_ids`
checks them. The check reads all ids once.

Inside `strategy.run`, a program must call `enqueue` at the top level of the
function, with arguments of the function as inputs. The compiler moves the
enqueue op from the TPU program to the host. The op then runs before the TPU
program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_layoutmap.embedding import inputs, packing, replicas, tpu_program
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.tpu import config_proto
from tf_layoutmap.embedding.tpu import shapes as tpu_shapes
from tf_layoutmap.sharded.routing import assertions

_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass
class EnqueueLists:
    """Inputs of the enqueue op, one entry per feature.

    Attributes:
      splits: int32 tensors: indices `[num_ids, rank]` of a sparse input, row
        splits `[num_samples + 1]` of a ragged input, or `[0]` for a dense
        input.
      ids: `[num_ids]` int64 tensors.
      weights: `[num_ids]` float32 tensors, or `[0]` if all weights are 1.
    """

    splits: list[tf.Tensor] = dataclasses.field(default_factory=list)
    ids: list[tf.Tensor] = dataclasses.field(default_factory=list)
    weights: list[tf.Tensor] = dataclasses.field(default_factory=list)


def convert_inputs(feature: config.FeatureSpec, value: Any) -> Any:
    """Converts an input to a dense, sparse or ragged tensor.

    Raises:
      TypeError: If int64 cannot represent all ids.
      ValueError: If `value` cannot be converted to a tensor.
    """
    if not isinstance(value, (tf.SparseTensor, tf.RaggedTensor, tf.Tensor)):
        if not (isinstance(value, tf.Variable) or hasattr(value, "__array__")):
            raise ValueError(
                f"Input {feature.name!r} must be a tf.Tensor, "
                "tf.SparseTensor or tf.RaggedTensor. Received: an object of "
                f"unknown type {type(value)}."
            )
        value = tf.convert_to_tensor(value)
    inputs.check_id_type(feature, value.dtype)
    return value


def check_weight(feature: config.FeatureSpec, value: Any, weight: Any):
    """Checks that weights match their ids.

    Raises:
      TypeError: If the weights are not numbers.
      ValueError: If the weights have another tensor type than the ids, if the
        numbers of weights and ids differ, or if the input does not support
        weights.
    """
    if weight is None:
        return
    if feature.is_sequence:
        raise ValueError(
            f"Weight specified for sequence feature {feature.name!r}. "
            "Sequence features do not combine ids and do not support "
            "weights; pass None."
        )
    if isinstance(value, tf.Tensor):
        raise ValueError(
            f"Weight specified for dense input {feature.name!r}. Only "
            "tf.SparseTensor and tf.RaggedTensor inputs support weights."
        )
    inputs.check_weights(feature, value, weight)


def read_lists(
    features: Sequence[config.FeatureSpec],
    values: Sequence[Any],
    weights: Sequence[Any],
) -> EnqueueLists:
    """Converts checked inputs of one core to lists for the enqueue op."""
    lists = EnqueueLists()
    # Features without splits or weights share these two empty tensors.
    no_splits = tf.zeros([0], tf.int32)
    no_weights = tf.zeros([0], tf.float32)
    for feature, value, weight in zip(features, values, weights):
        if isinstance(value, tf.SparseTensor):
            splits, ids = _sparse_indices(feature, value), value.values
        elif isinstance(value, tf.RaggedTensor):
            splits, ids = value.row_splits, value.values
        else:
            splits, ids = no_splits, tf.reshape(value, [-1])
        lists.splits.append(tf.cast(splits, tf.int32))
        lists.ids.append(tf.cast(ids, tf.int64))
        lists.weights.append(
            no_weights if weight is None else tf.cast(weight.values, tf.float32)
        )
    return lists


def _sparse_indices(feature, value: tf.SparseTensor) -> tf.Tensor:
    for axis, size in enumerate(value.shape.as_list()):
        if size is not None and size > _MAX_INT32:
            raise ValueError(
                "A TPU stores the indices of a sparse tensor in 32 bits, so "
                f"every dimension must be at most {_MAX_INT32}. Received: "
                f"shape {value.shape}, axis {axis} (input {feature.name!r})."
            )
    indices = tf.cast(value.indices, tf.int32)
    if value.shape.rank == 2:
        if feature.is_sequence:
            # In a sequence, each position has an activation. The TPU requires
            # an additional index for the ids at a position. The additional
            # index is 0, because each position has one id.
            indices = tf.pad(indices, [[0, 0], [0, 1]])
    elif feature.is_sequence:
        logging.warning(
            "`max_sequence_length` of feature %s is ignored: its input has "
            "rank %d, and a sequence must have rank 2.",
            feature.name,
            value.shape.rank,
        )
    return indices


def check_on_host(named_values: Sequence[tuple[str, Any]]):
    """Checks that a dataset has not copied the inputs to a TPU.

    Raises:
      ValueError: If an input is on a TPU. The message names the input and the
        device.
    """
    for path, value in named_values:
        for tensor in tf.nest.flatten(value, expand_composites=True):
            for device in _devices_of(tensor):
                if tf.DeviceSpec.from_string(device).device_type == "TPU":
                    raise ValueError(
                        f"Received input {path!r} which is on a TPU input "
                        f"device {device}; the ids of `enqueue` must be on "
                        "the host. Distribute the dataset with "
                        "tf.distribute.InputOptions("
                        "experimental_fetch_to_device=False)."
                    )


def _devices_of(tensor: tf.Tensor) -> list[str]:
    input_device_of = tpu_program.emulated_input_device()
    if input_device_of is not None:
        return [input_device_of(_device_before_program(tensor))]
    if hasattr(tensor, "numpy"):  # An eager tensor.
        return [tensor.device or ""]
    source = tensor.op
    if source.type == "Identity" and (
        source.inputs[0].op.type == "TPUReplicatedInput"
    ):
        return [tensor.device for tensor in source.inputs[0].op.inputs]
    return [tensor.device]


def _device_before_program(tensor: tf.Tensor) -> str:
    """Returns the device of an input outside of the emulated program."""
    if not hasattr(tensor, "numpy"):
        if tpu_program.is_program_input(tensor.op):
            tensor = tensor.op.inputs[0]
        if tensor.op.type == "Placeholder":
            # The device of a placeholder is the device scope in which a loop
            # was traced, and not the device of the input.
            return ""
    return tensor.device or ""


Inputs = list[Any] | packing.PackedIds
Step = tuple[Inputs, list[Any] | None]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A checked batch that can be enqueued on the cores.

    Attributes:
      steps: For each replica, a tuple of its flat inputs and weights, or of a
        packed batch and None.
      device: Name of the core that runs the step, or None.
      in_program: Whether a TPU program enqueues the batch.
    """

    steps: list[Step]
    device: str | None
    in_program: bool


class BatchReader:
    """A reader of the batches of one embedding."""

    def __init__(
        self,
        feature_config: Any,
        features: Sequence[config.FeatureSpec],
        strategy_replicas: replicas.Replicas,
        strategy_cores: config_proto.Cores,
        shapes: tpu_shapes.OutputShapes,
    ):
        """Creates a reader for batches of the given features.

        Args:
          feature_config: Nested structure of features.
          features: The flat list of these features.
          strategy_replicas: Replicas of the strategy.
          strategy_cores: Cores of the strategy.
          shapes: Known shapes of the activations.
        """
        self._feature_config = feature_config
        self._features = features
        self._replicas = strategy_replicas
        self._cores = strategy_cores
        self._shapes = shapes

    def read(
        self,
        features: Any,
        weights: Any,
        device: str | None,
        *,
        checks_shapes: bool,
        settles_shapes: bool,
    ) -> Batch:
        """Returns a batch that can be enqueued.

        Args:
          features: Ids in the structure of the feature config, or a packed
            batch.
          weights: None, or the same structure with None or the weights of the
            ids.
          device: Name of the core that runs the step, or None.
          checks_shapes: Whether the shapes are compared with the known shapes.
          settles_shapes: Whether this batch sets shapes that are not known yet.

        Raises:
          TypeError: If the structure of `features` or `weights` has other types
            than the feature config, or if ids are not integers.
          ValueError: If a structure, size or rank does not match the feature
            config or the known shapes, or if weights do not match their ids.
        """
        is_packed = self._is_packed(features)
        if not is_packed:
            inputs.check_same_structure(
                features, "features", self._feature_config, "feature_config"
            )
            if weights is not None:
                inputs.check_same_structure(
                    weights, "weights", self._feature_config, "feature_config"
                )
        in_program = tpu_program.is_in_tpu_program()
        steps = self._split(features, weights, device, in_program)
        if checks_shapes:
            self._check_shapes(
                [values for values, _ in steps], device is None, settles_shapes
            )
        for values, flat_weights in steps:
            named = self._named_tensors(values)
            check_on_host(named)
            if in_program:
                tpu_program.check_direct_inputs(named)
            if flat_weights is None or isinstance(values, packing.PackedIds):
                continue
            for feature, value, weight in zip(
                self._features, values, flat_weights
            ):
                check_weight(feature, value, weight)
        return Batch(steps, device, in_program)

    def _is_packed(self, features):
        """Returns whether `features` contains packed batches."""
        return not tf.nest.is_nested(features) and all(
            packing.is_packed(batch, self._feature_config)
            for batch in self._replicas.strategy.experimental_local_results(
                features
            )
        )

    def _named_tensors(self, values: Inputs) -> list[tuple[str, Any]]:
        if isinstance(values, packing.PackedIds):
            return [("packed", values.given)]
        return [
            (feature.name, value)
            for feature, value in zip(self._features, values)
        ]

    def _split(self, features, weights, device, in_program) -> list[Step]:
        """Returns the flat inputs and weights of each replica."""
        if in_program or device is not None:
            if in_program and device is not None:
                raise ValueError(
                    "Argument `device` must be None inside `strategy.run`. "
                    f"Received: device={device!r}."
                )
            steps = [(features, weights)]
        else:
            steps = zip(
                self._replicas.split(features, "features"),
                self._replicas.split(weights, "weights"),
            )
        return [self._flatten(*step) for step in steps]

    def _flatten(self, features, weights) -> Step:
        if packing.is_packed(features, self._feature_config):
            if self._cores.num_cores_per_replica:
                raise ValueError(
                    "A replica with several cores (SPMD) does not support "
                    "packed batches, because their samples are not split "
                    "over the cores. Pass the features as tf.SparseTensors."
                )
            return packing.read_packed(
                features, weights, self._feature_config
            ), None
        values = [
            convert_inputs(feature, value)
            for feature, value in zip(self._features, tf.nest.flatten(features))
        ]
        if self._cores.num_cores_per_replica and any(
            isinstance(value, tf.RaggedTensor) for value in values
        ):
            raise ValueError(
                "A replica with several cores (SPMD) does not support "
                "tf.RaggedTensor inputs, because their samples are not split "
                "over the cores. Convert them with `to_sparse()`."
            )
        flat_weights = inputs.flatten_weights(
            weights, self._feature_config, like="feature_config"
        )
        return values, flat_weights

    def _check_shapes(self, values_of_replicas, is_split, settles_shapes):
        num_cores = self._cores.num_cores_per_replica if is_split else None
        for values in values_of_replicas:
            if isinstance(values, packing.PackedIds):
                values = packing.packed_placeholders(
                    values, len(self._features)
                )
            incoming = [
                tpu_shapes.input_shape(feature, value, num_cores)
                for feature, value in zip(self._features, values)
            ]
            if settles_shapes:
                self._shapes.settle(incoming)
            self._shapes.check(
                incoming,
                [isinstance(value, tf.RaggedTensor) for value in values],
            )


# Name scope of the ops that `check_ids` adds to a graph.
ID_CHECK_SCOPE = "tf_layoutmap_id_check"


def check_ids(spec: config.EmbeddingSpec, ids: Sequence[tf.Tensor]) -> list:
    """Returns assertions that fail if an id is outside of its table.

    Args:
      spec: Tables and features.
      ids: `[num_ids]` int64 tensor of each feature.

    Raises:
      tf.errors.InvalidArgumentError: If an id is outside of its table, and the
        call is eager.
    """
    checks = []
    with tf.name_scope(ID_CHECK_SCOPE):
        for feature, feature_ids in zip(spec.features, ids):
            table = spec.table_of(feature)
            lowest, highest = (
                tf.reduce_min(feature_ids),
                tf.reduce_max(feature_ids),
            )
            # For an empty tensor, the minimum and the maximum are not ids, so
            # the size is checked separately.
            is_inside = tf.logical_or(
                tf.equal(tf.size(feature_ids), 0),
                tf.logical_and(lowest >= 0, highest < table.num_rows),
            )
            sentence = (
                f"Feature {feature.name!r}: ids must be in [0, "
                f"{table.num_rows}), the rows of table {table.name!r}. "
                "Received ids from"
            )
            if tf.executing_eagerly():
                checks += assertions.require(
                    is_inside, f"{sentence} ", lowest, " to ", highest
                )
                continue
            # `tf.debugging.Assert` is not used, because it wraps the op in a
            # conditional. The conditional would wait for all earlier stateful
            # operations.
            checks.append(
                tf.raw_ops.Assert(
                    condition=is_inside,
                    data=[sentence, lowest, "to", highest],
                    summarize=3,
                )
            )
    return [check for check in checks if check is not None]
