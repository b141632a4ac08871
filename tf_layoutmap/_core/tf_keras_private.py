"""The one module that imports tf_keras' private names, if tf_keras is used.

Each name stands below with the reason we need it.
"""

import importlib
import inspect
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap._core import requirements
from tf_layoutmap._core.private_names import PrivateNames

SUPPORTED_VERSION = requirements.TF_KERAS

_NAMES = PrivateNames(
    "tf_keras", "tf_keras.src", tf_keras.__version__, SUPPORTED_VERSION
)

# tf_keras makes weights without a value under its own scope for layouts, and
# swaps each for a DVariable once its place in the model is known.
LAYOUT_MODULE = importlib.import_module("tf_keras.src.dtensor.layout_map")
for _name in (
    "_map_functional_model_variable",
    "_map_subclass_model_variable",
    "_KERAS_ATTRIBUTES_TO_SKIP",
    "_LAYOUT_MAP",
):
    _NAMES.find("dtensor.layout_map", _name)
LazyInitVariable = _NAMES.find("dtensor.lazy_variable", "LazyInitVariable")
lazy_init_scope = _NAMES.find("dtensor.lazy_variable", "lazy_init_scope")

# It computes with an operation that DTensor lacks, when told that it can.
LayerNormalization = _NAMES.find(
    "layers.normalization.layer_normalization", "LayerNormalization"
)
_NAMES.check_method(LayerNormalization, "_fused_can_be_used", "ndims")

# Where a functional model calls its layers for the shapes of their outputs: in
# a graph that nobody runs, known by the end of its name.
_SCRATCH_GRAPH = "_scratch_graph"
if (
    _SCRATCH_GRAPH
    not in _NAMES.find(
        "engine.base_layer", "Layer._infer_output_signature"
    ).__code__.co_consts
):
    raise _NAMES.refusal(
        f"where `Layer._infer_output_signature` names no {_SCRATCH_GRAPH!r}"
    )


def is_only_for_shapes() -> bool:
    """Whether a layer is called for the shapes of its outputs."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "name", "").endswith(_SCRATCH_GRAPH)


# The same where it builds a subclassed model.
_BUILD_GRAPH = "build_graph"
if (
    _BUILD_GRAPH
    not in inspect.unwrap(
        _NAMES.find("engine.training", "Model.build")
    ).__code__.co_consts
):
    raise _NAMES.refusal(f"where `Model.build` names no {_BUILD_GRAPH!r}")


def is_building_a_model() -> bool:
    """Whether `Model.build` calls a layer, with floats in place of inputs."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "name", "") == _BUILD_GRAPH


# How numbers get into variables: set_weights, load, callbacks.
backend = importlib.import_module("tf_keras.src.backend")
_NAMES.find("backend", "_assign_value_to_variable")

# What draws for initializers and dropout; its seed is drawn at its first use.
RandomGenerator = _NAMES.find("backend", "RandomGenerator")
_NAMES.check_method(RandomGenerator, "_maybe_init")

# Where all recurrent layers loop, and the layers that choose between functions
# for CPUs and GPUs first.
_NAMES.check_method(
    backend, "rnn", "inputs", "time_major", "input_length", "unroll"
)
LSTM_MODULE = importlib.import_module("tf_keras.src.layers.rnn.lstm")
GRU_MODULE = importlib.import_module("tf_keras.src.layers.rnn.gru")
for _name in ("lstm", "gru"):
    for _function in ("standard_{}", "{}_with_backend_selection"):
        _NAMES.find(f"layers.rnn.{_name}", _function.format(_name))

# All steps of an epoch run inside its `catch_stop_iteration`, whose end other
# processes are told.
DataHandler = _NAMES.find("engine.data_adapter", "DataHandler")
_NAMES.check_method(DataHandler, "catch_stop_iteration")

# Where the dataset of a `fit` is made, of arrays or of what the user has.
_NAMES.check_method(DataHandler, "_configure_dataset_and_inferred_steps")
TensorLikeDataAdapter = _NAMES.find(
    "engine.data_adapter", "TensorLikeDataAdapter"
)

# Where an optimizer makes its variables and what it does in a step.
Optimizer = _NAMES.find("optimizers.optimizer", "Optimizer")
LossScaleOptimizer = _NAMES.find(
    "mixed_precision.loss_scale_optimizer", "BaseLossScaleOptimizer"
)
_NAMES.check_method(
    Optimizer,
    "add_variable_from_reference",
    "model_variable",
    "variable_name",
    "shape",
    "initial_value",
)
_NAMES.check_method(Optimizer, "apply_gradients", "grads_and_vars")
_NAMES.check_method(Optimizer, "_deduplicate_sparse_grad", "grads")
_NAMES.check_method(Optimizer, "_internal_apply_gradients", "grads_and_vars")
_NAMES.check_method(Optimizer, "_var_key", "variable")
_NAMES.check_method(Optimizer, "build", "var_list")

# What optimizers of its first years have instead, and what finishes averages.
BaseOptimizer = _NAMES.find("optimizers.optimizer", "_BaseOptimizer")
LegacyOptimizer = _NAMES.find("optimizers.legacy.optimizer_v2", "OptimizerV2")
_NAMES.check_method(BaseOptimizer, "finalize_variable_values", "var_list")
_NAMES.check_method(BaseOptimizer, "_trackable_children", "save_type")
_NAMES.check_method(LegacyOptimizer, "apply_gradients", "grads_and_vars")
_NAMES.check_method(LegacyOptimizer, "_create_all_weights", "var_list")

# What a checkpoint holds for slot variables that are not there yet.
if not hasattr(tf.Module, "_deferred_dependencies"):
    raise _NAMES.refusal("where `Trackable._deferred_dependencies` is missing")

# What .h5 files of old hold of a layer: its weights, in an order of their own.
HDF5_FORMAT = importlib.import_module("tf_keras.src.saving.legacy.hdf5_format")
_NAMES.find("saving.legacy.hdf5_format", "_legacy_weights")

# Whether a tf_keras layer is being called, and which.
call_context = _NAMES.find("engine.base_layer_utils", "call_context")


# Where a `fit` goes on that was interrupted, and how many steps it has made.
_NAMES.check_method(
    tf_keras.Model,
    "_maybe_load_initial_counters_from_ckpt",
    "steps_per_epoch",
    "initial_epoch",
)
# No model is made to see it: this may be imported where variables cannot be.
if (
    "_train_counter"
    not in inspect.unwrap(
        _NAMES.find("engine.training", "Model._init_batch_counters")
    ).__code__.co_names
):
    raise _NAMES.refusal("where `Model._train_counter` is missing")


def start_of_backup(
    model: Any, steps_per_epoch: int | None, initial_epoch: int
) -> tuple[int, int]:
    """Returns the epoch and the step at which a `fit` is to begin."""
    # BackupAndRestore sets it; it is not there otherwise.
    if getattr(model, "_training_state", None) is None:
        return initial_epoch, 0
    return model._maybe_load_initial_counters_from_ckpt(
        steps_per_epoch, initial_epoch
    )


def count_step(model: Any) -> None:
    """Notes a training step."""
    model._train_counter.assign_add(1)


def layout_map_in_use() -> Any:
    """Returns what tf_keras takes for the layout map of this thread."""
    return LAYOUT_MODULE.get_current_layout_map()


def use_layout_map(layout_map: Any) -> None:
    """Sets what models made in this thread take for their layout map."""
    LAYOUT_MODULE._LAYOUT_MAP.layout_map = layout_map


def stateless_seed_of(initializer: Any) -> Any:
    """Returns the seed of an initializer's next random numbers.

    Its default is drawn inside, and shards must begin with the values that one
    table would.

    Returns:
      `[2]` int32; None where the numbers come from a generator with state.
    """
    generator = initializer._random_generator
    generator._maybe_init()
    if generator._rng_type != generator.RNG_STATELESS:
        return None
    return tf.constant(generator.make_seed_for_stateless_op(), tf.int32)
