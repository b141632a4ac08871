"""Reads the input of a step for the cores of a TPU, and checks it."""

# DOC-MERGE: Refuses ids that are no row of their table, before they reach a TPU.
#
# A TPU keeps ids in 32 bits and says nothing of what it does with one that is
# out of range. Outside of `strategy.run` ids are on the host, where they can be
# checked for the price of reading them once.
#
# DOC-MERGE: Turns the inputs of a step into the parallel lists of the enqueue op.
#
# It tells dense, sparse and ragged inputs apart by the rank and length of the
# first list. Ids go in as 64 bits and are looked up as 32, sample numbers as
# 32: what is known to be too big is refused here, the rest by `id_checks`.
#
# DOC-MERGE: Whether `enqueue` is called by a TPU program, and what it may be given.
#
# In `strategy.run` all inputs of `enqueue` must be arguments of the function,
# and it must be called at its top level: the compiler takes the operation out of
# the TPU's program and puts it before that, on the host.
#
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs, packing, replicas
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.tpu import config_proto
from tf_layoutmap.embedding.tpu import shapes as tpu_shapes
from tf_layoutmap.sharded.routing import assertions

_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass
class EnqueueLists:
    """Inputs of the enqueue op, one entry per feature.

    Attributes:
      splits: int32: `[num_ids, rank]` indices of a sparse input,
        `[num_samples + 1]` row_splits of a ragged one, `[0]` of a dense one.
      ids: `[num_ids]` int64.
      weights: `[num_ids]` float32, or `[0]` for 1 each.
    """

    splits: list[tf.Tensor] = dataclasses.field(default_factory=list)
    ids: list[tf.Tensor] = dataclasses.field(default_factory=list)
    weights: list[tf.Tensor] = dataclasses.field(default_factory=list)


def convert_inputs(feature: config.FeatureSpec, value: Any) -> Any:
    """Returns an input as one of the three kinds of tensor.

    Raises:
      TypeError: If its ids are not integers that int64 holds.
      ValueError: If it is something else.
    """
    if not isinstance(value, (tf.SparseTensor, tf.RaggedTensor, tf.Tensor)):
        if not (isinstance(value, tf.Variable) or hasattr(value, "__array__")):
            raise ValueError(
                f"Input {feature.name!r} is of unknown type {type(value)}; "
                "pass a tf.Tensor, tf.SparseTensor or tf.RaggedTensor."
            )
        value = tf.convert_to_tensor(value)
    inputs.check_id_type(feature, value.dtype)
    return value


def check_weight(feature: config.FeatureSpec, value: Any, weight: Any):
    """Refuses weights that do not go with their ids.

    Raises:
      TypeError: If they are not numbers.
      ValueError: If they are of another kind or number, or there can be none.
    """
    if weight is None:
        return
    if feature.is_sequence:
        raise ValueError(
            f"Weight specified for sequence feature {feature.name!r}, which "
            "has no combiner to use it; pass None."
        )
    if isinstance(value, tf.Tensor):
        raise ValueError(
            f"Weight specified for dense input {feature.name!r}; only a "
            "tf.SparseTensor or tf.RaggedTensor has weights."
        )
    inputs.check_weights(feature, value, weight)


def read_lists(
    features: Sequence[config.FeatureSpec],
    values: Sequence[Any],
    weights: Sequence[Any],
) -> EnqueueLists:
    """Reads the checked inputs of one core."""
    found = EnqueueLists()
    # Shared by all features that have nothing to say.
    no_splits = tf.zeros([0], tf.int32)
    no_weights = tf.zeros([0], tf.float32)
    for feature, value, weight in zip(features, values, weights):
        if isinstance(value, tf.SparseTensor):
            splits, ids = _sparse_indices(feature, value), value.values
        elif isinstance(value, tf.RaggedTensor):
            splits, ids = value.row_splits, value.values
        else:
            splits, ids = no_splits, tf.reshape(value, [-1])
        found.splits.append(tf.cast(splits, tf.int32))
        found.ids.append(tf.cast(ids, tf.int64))
        found.weights.append(
            no_weights if weight is None else tf.cast(weight.values, tf.float32)
        )
    return found


def _sparse_indices(feature, value: tf.SparseTensor) -> tf.Tensor:
    for axis, size in enumerate(value.shape.as_list()):
        if size is not None and size > _MAX_INT32:
            raise ValueError(
                "A TPU holds the indices of a sparse tensor in 32 bits. "
                f"Received: shape {value.shape}, axis {axis} (input "
                f"{feature.name!r})."
            )
    indices = tf.cast(value.indices, tf.int32)
    if value.shape.rank == 2:
        if feature.is_sequence:
            # The position is a dimension of the output, and one id is
            # combined at each.
            indices = tf.pad(indices, [[0, 0], [0, 1]])
    elif feature.is_sequence:
        logging.warning(
            "`max_sequence_length` of feature %s is ignored: its input is of "
            "rank %d, and sequences are of rank 2.",
            feature.name,
            value.shape.rank,
        )
    return indices


# Says of a graph whether an emulated TPU's program is traced into it; those of
# a real one are known by their context.
_is_emulated: Callable[[Any], bool] | None = None
# What a TPU's name is for the device of an input.
_input_device_of: Callable[[str], str] | None = None


def set_emulated(
    is_emulated: Callable[[Any], bool] | None,
    input_device_of: Callable[[str], str] | None = None,
):
    """Lets an emulation say what its programs are; None takes it back.

    Args:
      is_emulated: Whether a graph is traced as the program of a core.
      input_device_of: From the device of an input to its name on a TPU.
    """
    global _is_emulated, _input_device_of
    _is_emulated, _input_device_of = is_emulated, input_device_of


def is_in_tpu_program() -> bool:
    """Whether the calling code is traced as a replica's program on a TPU.

    Raises:
      RuntimeError: If it is, but in control flow or in a function of its own.
    """
    here = tf.compat.v1.get_default_graph()
    graph = here
    while graph is not None and not _is_replicated(graph):
        graph = getattr(graph, "outer_graph", None)
    if graph is None:
        return False
    if graph is not here:
        raise RuntimeError(
            "`enqueue` must be called directly in the function that is given "
            "to `strategy.run`, not in control flow or a tf.function inside "
            "it: it could not be taken out of the TPU's program. The current "
            f"graph {here} does not match graph {graph}, which contains the "
            "TPUReplicateContext."
        )
    return True


def _is_replicated(graph: Any) -> bool:
    if _is_emulated is not None and _is_emulated(graph):
        return True
    context = tf_private.control_flow_context_of(graph)
    while context is not None:
        if isinstance(context, tf_private.tpu_replication.TPUReplicateContext):
            return True
        context = context.outer_context
    return False


def run_on_host(function: Callable[[], None]):
    """Calls `function` so that its operations run on the replica's host."""
    tf_private.tpu_replication.outside_compilation(function)


def check_direct_inputs(named_values: Sequence[tuple[str, Any]]):
    """Refuses what is no argument of the function that `strategy.run` runs.

    Raises:
      ValueError: It names the input and the operation that made it.
    """
    for path, value in named_values:
        for tensor in tf.nest.flatten(value, expand_composites=True):
            if tensor.op.type == "Placeholder" or _is_program_input(tensor.op):
                continue
            raise ValueError(
                "Inside `strategy.run`, `enqueue` must be given arguments of "
                "the function that is run, unchanged. Received: input "
                f"{path!r}, which is the output of op {tensor.op.name} (type "
                f"{tensor.op.type}) and does not have the "
                "`_tpu_input_identity` attr. A dynamic batch size can cause "
                "this: pass tf.distribute.RunOptions("
                "experimental_enable_dynamic_batch_size=False) to "
                "`strategy.run`; or a Keras layer that casts its inputs."
            )


def _is_program_input(op: tf.Operation) -> bool:
    try:
        return bool(op.get_attr("_tpu_input_identity"))
    except ValueError:
        return False


def check_on_host(named_values: Sequence[tuple[str, Any]]):
    """Refuses inputs that a dataset has brought to a TPU already.

    Raises:
      ValueError: It names the input and the device.
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
    if _input_device_of is not None:
        return [_input_device_of(_device_before_program(tensor))]
    if hasattr(tensor, "numpy"):  # Eager.
        return [tensor.device or ""]
    source = tensor.op
    if source.type == "Identity" and (
        source.inputs[0].op.type == "TPUReplicatedInput"
    ):
        return [one.device for one in source.inputs[0].op.inputs]
    return [tensor.device]


def _device_before_program(tensor: tf.Tensor) -> str:
    """Where what came into an emulated core's program as this input was."""
    if not hasattr(tensor, "numpy"):
        if _is_program_input(tensor.op):
            tensor = tensor.op.inputs[0]
        if tensor.op.type == "Placeholder":
            return ""  # Its device is only where a loop was traced.
    return tensor.device or ""


Inputs = list[Any] | packing.PackedIds
Step = tuple[Inputs, list[Any] | None]


@dataclasses.dataclass(frozen=True)
class Batch:
    """What is enqueued on the cores.

    Attributes:
      steps: Flat inputs and weights of each replica; or a packed batch, and
        None.
      device: The core whose step it is, if the caller says so.
      in_program: Whether a TPU's program enqueues it.
    """

    steps: list[Step]
    device: str | None
    in_program: bool


class BatchReader:
    """Reads batches of one embedding."""

    def __init__(
        self,
        feature_config: Any,
        features: Sequence[config.FeatureSpec],
        strategy_replicas: replicas.Replicas,
        strategy_cores: config_proto.Cores,
        shapes: tpu_shapes.OutputShapes,
    ):
        """Takes what the batches must fit.

        Args:
          feature_config: Nested structure of features.
          features: The same, flat.
          strategy_replicas: Those of the strategy.
          strategy_cores: Its cores.
          shapes: Of the activations, as far as they are known.
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
          features: Structure of the feature config with ids, or a packed
            batch.
          weights: None, or the same structure with None or weights.
          device: The core whose step it is, or None.
          checks_shapes: Whether shapes are compared with those known.
          settles_shapes: Whether those that are not known are taken from it.

        Raises:
          TypeError: Structures differ in types, or ids are not integers.
          ValueError: Structures, sizes, ranks or weights do not match.
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
        in_program = is_in_tpu_program()
        steps = self._split(features, weights, device, in_program)
        if checks_shapes:
            self._check_shapes(
                [values for values, _ in steps], device is None, settles_shapes
            )
        for values, given in steps:
            named = self._named_tensors(values)
            check_on_host(named)
            if in_program:
                check_direct_inputs(named)
            if given is None or isinstance(values, packing.PackedIds):
                continue
            for feature, value, weight in zip(self._features, values, given):
                check_weight(feature, value, weight)
        return Batch(steps, device, in_program)

    def _is_packed(self, features):
        """Whether it is a packed batch, or one for each replica."""
        return not tf.nest.is_nested(features) and all(
            packing.is_packed(one, self._feature_config)
            for one in self._replicas.strategy.experimental_local_results(
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
        """Flat inputs and weights of each replica that enqueues here."""
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
                    "A replica of several cores (SPMD) does not take a packed "
                    "batch: its samples cannot be divided among them. Pass "
                    "the features as tf.SparseTensors."
                )
            return packing.read_packed(
                features, weights, self._feature_config
            ), None
        values = [
            convert_inputs(feature, value)
            for feature, value in zip(self._features, tf.nest.flatten(features))
        ]
        if self._cores.num_cores_per_replica and any(
            isinstance(one, tf.RaggedTensor) for one in values
        ):
            raise ValueError(
                "A replica of several cores (SPMD) does not take a "
                "tf.RaggedTensor: its samples cannot be divided among them. "
                "Pass `to_sparse()` of it."
            )
        flat_weights = inputs.flatten_weights(
            weights, self._feature_config, like="feature_config"
        )
        return values, flat_weights

    def _check_shapes(self, values_of_replicas, is_divided, settles_shapes):
        num_cores = self._cores.num_cores_per_replica if is_divided else None
        for values in values_of_replicas:
            if isinstance(values, packing.PackedIds):
                values = packing.packed_placeholders(
                    values, len(self._features)
                )
            incoming = [
                tpu_shapes.of_input(feature, value, num_cores)
                for feature, value in zip(self._features, values)
            ]
            if settles_shapes:
                self._shapes.settle(incoming)
            self._shapes.check(
                incoming, [isinstance(one, tf.RaggedTensor) for one in values]
            )


# Under which its operations are found in a graph.
ID_CHECK_SCOPE = "tf_layoutmap_id_check"


def check_ids(spec: config.EmbeddingSpec, ids: Sequence[tf.Tensor]) -> list:
    """Returns operations that fail on an id outside its table.

    Args:
      spec: Tables and features.
      ids: `[num_ids]` int64 of each feature.

    Raises:
      tf.errors.InvalidArgumentError: Of eager ids.
    """
    checks = []
    with tf.name_scope(ID_CHECK_SCOPE):
        for feature, one in zip(spec.features, ids):
            table = spec.table_of(feature)
            lowest, highest = tf.reduce_min(one), tf.reduce_max(one)
            # Of no ids the lowest is the largest int64.
            is_inside = tf.logical_or(
                tf.equal(tf.size(one), 0),
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
            # The raw op: tf.debugging.Assert would put a branch around it,
            # which waits for every stateful operation before it.
            checks.append(
                tf.raw_ops.Assert(
                    condition=is_inside,
                    data=[sentence, lowest, "to", highest],
                    summarize=3,
                )
            )
    return [one for one in checks if one is not None]
