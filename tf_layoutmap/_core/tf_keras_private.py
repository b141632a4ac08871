"""Private names of tf_keras. No other module imports private names of tf_keras.

A comment explains why each name is required. The module is imported only if the
program uses tf_keras.
"""

import importlib
import inspect
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap._core import requirements, tf_private
from tf_layoutmap._core.private_names import PrivateNames

SUPPORTED_VERSION = requirements.built_for()

_NAMES = PrivateNames(
    "tf_keras", "tf_keras.src", tf_keras.__version__, (SUPPORTED_VERSION,)
)

# In its own layout scope, tf_keras first creates weights without a value. When
# the position of a weight in the model is known, tf_keras replaces the weight
# with a DVariable.
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

# With this method, the layer can select a fused operation, which DTensor does
# not support.
LayerNormalization = _NAMES.find(
    "layers.normalization.layer_normalization", "LayerNormalization"
)
_NAMES.check_method(LayerNormalization, "_fused_can_be_used", "ndims")

# A Functional model calls its layers in a graph to infer the shapes of their
# outputs. This graph is never executed. The name of this graph ends with this
# suffix.
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
    """Returns whether a layer is called only to infer its output shapes."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "name", "").endswith(_SCRATCH_GRAPH)


def is_inside_shape_inference() -> bool:
    """Returns `is_only_for_shapes` for the layer that calls a function."""
    return any(
        getattr(graph, "name", "").endswith(_SCRATCH_GRAPH)
        for graph in tf_private.graphs_around()
    )


# Name of the graph in which tf_keras builds a subclassed model.
_BUILD_GRAPH = "build_graph"
if (
    _BUILD_GRAPH
    not in inspect.unwrap(
        _NAMES.find("engine.training", "Model.build")
    ).__code__.co_consts
):
    raise _NAMES.refusal(f"where `Model.build` names no {_BUILD_GRAPH!r}")


def is_building_a_model() -> bool:
    """Returns whether `Model.build` is calling a layer, with float inputs."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "name", "") == _BUILD_GRAPH


# `set_weights`, loading and callbacks use this function to assign values.
backend = importlib.import_module("tf_keras.src.backend")
_NAMES.find("backend", "_assign_value_to_variable")

# The random generator that initializers and dropout use. Its seed is drawn when
# the generator is first used.
RandomGenerator = _NAMES.find("backend", "RandomGenerator")
_NAMES.check_method(RandomGenerator, "_maybe_init")
_NAMES.check_method(RandomGenerator, "make_legacy_seed")

# The class that creates and caches the dropout masks of recurrent cells.
DropoutRNNCellMixin = _NAMES.find(
    "layers.rnn.dropout_rnn_cell_mixin", "DropoutRNNCellMixin"
)
for _name in (
    "get_dropout_mask_for_cell",
    "get_recurrent_dropout_mask_for_cell",
):
    _NAMES.check_method(DropoutRNNCellMixin, _name, "inputs", "training")

# The class and the function that determine the scale of initial values.
VarianceScaling = _NAMES.find("initializers.initializers", "VarianceScaling")
compute_fans = _NAMES.find("initializers.initializers", "_compute_fans")

# The function that runs the loop of all recurrent layers, and the layers that
# select a CPU or GPU implementation before the loop.
_NAMES.check_method(
    backend, "rnn", "inputs", "time_major", "input_length", "unroll"
)
LSTM_MODULE = importlib.import_module("tf_keras.src.layers.rnn.lstm")
GRU_MODULE = importlib.import_module("tf_keras.src.layers.rnn.gru")
for _name in ("lstm", "gru"):
    for _function in ("standard_{}", "{}_with_backend_selection"):
        _NAMES.find(f"layers.rnn.{_name}", _function.format(_name))

# The cells of recurrent layers, whose weights contain one block per gate.
ConvLSTMCell = _NAMES.find("layers.rnn.base_conv_lstm", "ConvLSTMCell")
for _cell in (LSTM_MODULE.LSTMCell, GRU_MODULE.GRUCell, ConvLSTMCell):
    _NAMES.check_method(_cell, "call", "inputs", "states", "training")
_NAMES.check_method(
    LSTM_MODULE.LSTMCell, "_compute_carry_and_output_fused", "z", "c_tm1"
)
_NAMES.check_method(ConvLSTMCell, "input_conv", "x", "w", "b", "padding")
_NAMES.check_method(ConvLSTMCell, "recurrent_conv", "x", "w")

# All steps of an epoch run inside `catch_stop_iteration`. When this context
# ends, the end of the epoch is reported to the other processes.
DataHandler = _NAMES.find("engine.data_adapter", "DataHandler")
_NAMES.check_method(DataHandler, "catch_stop_iteration")

# The method that creates the dataset of `fit` from arrays or other data.
_NAMES.check_method(DataHandler, "_configure_dataset_and_inferred_steps")
TensorLikeDataAdapter = _NAMES.find(
    "engine.data_adapter", "TensorLikeDataAdapter"
)

# The methods that create the variables of an optimizer and run its step.
Optimizer = _NAMES.find("optimizers.optimizer", "Optimizer")
BaseOptimizer = _NAMES.find("optimizers.optimizer", "_BaseOptimizer")
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
_NAMES.check_method(BaseOptimizer, "_use_weight_decay", "variable")

# The same methods in legacy optimizers, and the method that finalizes moving
# averages.
LegacyOptimizer = _NAMES.find("optimizers.legacy.optimizer_v2", "OptimizerV2")
_NAMES.check_method(BaseOptimizer, "finalize_variable_values", "var_list")
_NAMES.check_method(BaseOptimizer, "_trackable_children", "save_type")
_NAMES.check_method(BaseOptimizer, "save_own_variables", "store")
_NAMES.check_method(BaseOptimizer, "load_own_variables", "store")
_NAMES.check_method(LegacyOptimizer, "apply_gradients", "grads_and_vars")
_NAMES.check_method(LegacyOptimizer, "_create_all_weights", "var_list")

# Restored values for slot variables that do not exist yet.
if not hasattr(tf.Module, "_deferred_dependencies"):
    raise _NAMES.refusal("where `Trackable._deferred_dependencies` is missing")

# Returns the weights of a layer in the order of legacy .h5 files.
HDF5_FORMAT = importlib.import_module("tf_keras.src.saving.legacy.hdf5_format")
_NAMES.find("saving.legacy.hdf5_format", "_legacy_weights")

# Used to check which tf_keras layer is being called.
call_context = _NAMES.find("engine.base_layer_utils", "call_context")


# The epoch and step at which an interrupted `fit` resumes, and the step
# counter.
_NAMES.check_method(
    tf_keras.Model,
    "_maybe_load_initial_counters_from_ckpt",
    "steps_per_epoch",
    "initial_epoch",
)
# This check reads the code of the method instead of creating a model, because
# variables cannot be created in every context in which this module is imported.
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
    """Returns the epoch and step at which `fit` starts."""
    # Only the `BackupAndRestore` callback sets this attribute.
    if getattr(model, "_training_state", None) is None:
        return initial_epoch, 0
    return model._maybe_load_initial_counters_from_ckpt(
        steps_per_epoch, initial_epoch
    )


def count_step(model: Any) -> None:
    """Increments the training step counter of a model."""
    model._train_counter.assign_add(1)


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Returns whether an optimizer decays a variable."""
    return optimizer._use_weight_decay(variable)


def learning_rate_of(optimizer: Any) -> Any:
    """Returns the learning rate of the next step of an optimizer.

    The public attribute of an optimizer with a schedule is the learning rate of
    the last step.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, tf_keras.optimizers.schedules.LearningRateSchedule):
        return rate(optimizer.iterations)
    return rate


def layout_map_in_use() -> Any:
    """Returns the layout map that tf_keras uses in this thread."""
    return LAYOUT_MODULE.get_current_layout_map()


def use_layout_map(layout_map: Any) -> None:
    """Sets the layout map of models that this thread creates."""
    LAYOUT_MODULE._LAYOUT_MAP.layout_map = layout_map


def stateless_seed_of(initializer: Any) -> Any:
    """Returns the seed of an initializer's next random numbers.

    If user code passes no seed, the initializer draws a seed. The seed is
    required so that the initial values of the shards of a table are equal to
    the initial values of the unsharded table.

    Returns:
      int32 tensor of shape `[2]`; None if the generator has state.
    """
    generator = initializer._random_generator
    generator._maybe_init()
    if generator._rng_type != generator.RNG_STATELESS:
        return None
    return tf.constant(generator.make_seed_for_stateless_op(), tf.int32)
