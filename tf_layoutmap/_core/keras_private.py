"""Private names of Keras. No other module imports private names of Keras.

A comment explains why each name is required. All names are checked when this
module is imported. If a name is missing, the import raises an error with a
remedy, and training does not start. If you add a name, also add its check and a
comment with the reason.
"""

import contextlib
import functools
import importlib
import random
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import (
    checks,
    function_traces,
    private_names,
    requirements,
)

# The differences between the supported minor versions, one column per version.
# A name that is at the same place in all versions is not in the columns. Adding
# a version adds a column, and dropping a version deletes its column.
_UNTIL_3_15: dict[str, Any] = {
    "base_trainer": "trainers.trainer.Trainer",
    "trainer": "backend.tensorflow.trainer.TensorFlowTrainer",
    # Modules with functions that DTensor does not support, for example
    # `divide` for sparse gradients.
    "backend_core": "backend.core",
    "backend_nn": "backend.nn",
    "backend_numpy": "backend.numpy",
    # The module whose function `rnn` recurrent layers call.
    "rnn_loop": "backend",
    # The methods that add the LoRA part to a weight before saving.
    "merged_lora": {
        "layers.Dense": "_get_kernel_with_merged_lora",
        "layers.EinsumDense": "_get_kernel_with_merged_lora",
        "layers.Embedding": "_get_embeddings_with_merged_lora",
    },
    # Replacements that are not installed: functions that Keras does not have or
    # does not call. These versions do not shard a `PyDataset` over processes.
    "unneeded": {"PyDatasetAdapter.__init__"},
}
_UNTIL_3_14: dict[str, Any] = {
    **_UNTIL_3_15,
    # The attributes of a `VarianceScaling` that `compute_fans` receives.
    "fan_axes": (),
    # Public classes of optimizers that contain optimizers.
    "nesting": ("LossScaleOptimizer",),
}
_COLUMNS: dict[str, dict[str, Any]] = {
    "3.12": {
        **_UNTIL_3_14,
        "unneeded": {
            *_UNTIL_3_14["unneeded"],
            "distribution_backend.get_device_count",
        },
    },
    "3.13": _UNTIL_3_14,
    "3.14": _UNTIL_3_14,
    "3.15": {
        **_UNTIL_3_15,
        "fan_axes": ("input_axes", "output_axes"),
        "nesting": ("LossScaleOptimizer", "MultiOptimizer"),
    },
    "3.16": {
        "base_trainer": "trainers.trainer.BaseTrainer",
        "trainer": "backend.tensorflow.trainer.Trainer",
        "backend_core": "backend.ops.core",
        "backend_nn": "backend.ops.nn",
        "backend_numpy": "backend.ops.numpy",
        "rnn_loop": "backend.rnn",
        "merged_lora": {"layers.Layer": "_get_weight_with_merged_lora"},
        "unneeded": (),
        "fan_axes": ("input_axes", "output_axes"),
        "nesting": ("LossScaleOptimizer", "MultiOptimizer"),
    },
}

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tf_layoutmap requires Keras on the TensorFlow backend. Received: "
        f"backend {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow "
        "before importing Keras."
    )

_NEWEST = [*_COLUMNS][-1]
_IS_UNTESTED = private_names.is_allowed_untested(keras.__version__, _NEWEST)
_NAMES = private_names.PrivateNames(
    "Keras",
    "keras.src",
    keras.__version__,
    tuple(_COLUMNS),
    is_allowed=_IS_UNTESTED,
)
# The column of the installed version.
COLUMN = _NEWEST if _IS_UNTESTED else requirements.minor(keras.__version__)
_column = _COLUMNS[COLUMN]
_private = _NAMES.find
_method = _NAMES.check_method
_methods = _NAMES.check_methods

# Used to check whether a call only traces shapes. In this case, values must not
# be read or created.
in_stateless_scope = _private(
    "backend.common.stateless_scope", "in_stateless_scope"
)
in_symbolic_scope = _private(
    "backend.common.symbolic_scope", "in_symbolic_scope"
)

# Used to read the values that `stateless_call` passes to weights.
_get_stateless_scope = _private(
    "backend.common.stateless_scope", "get_stateless_scope"
)
_private("backend.common.stateless_scope", "StatelessScope.get_current_value")

# Used to read the stack of name scopes and the layer that is being called. Each
# name scope records its caller, which is the object that creates variables in
# this scope.
_get_global_attribute = _private(
    "backend.common.global_state", "get_global_attribute"
)

# The planner calls models and creates optimizers while a layer is being built
# or called. This must not change the state of Keras in the thread.
# `clear_session` replaces the object.
_private("backend.common.global_state", "GLOBAL_STATE_TRACKER")
_global_state = importlib.import_module("keras.src.backend.common.global_state")

# Builds the weights of a model from shapes, without running it.
compute_output_spec = _private("backend", "compute_output_spec")

# The classes that create the step functions of fit, evaluate and predict.
TensorFlowTrainer = _private("", _column["trainer"])
BaseTrainer = _private("", _column["base_trainer"])
# Builds a model before its first step. This function computes the mean of the
# batches of all replicas, which fails for strings.
_method(TensorFlowTrainer, "_maybe_symbolic_build", "iterator", "data_batch")

# Creates the function that runs the steps of an execution. The function loops
# over the steps in a graph.
_method(TensorFlowTrainer, "_make_function", "step_function")

# The module whose functions reduce the results of all replicas after a step.
# Under `MultiWorkerMirroredStrategy`, `reduce_per_replica` averages axis 0 of
# the metrics.
trainer_module = importlib.import_module(TensorFlowTrainer.__module__)
_method(trainer_module, "reduce_per_replica", "values", "strategy", "reduction")

# All steps of an epoch run inside `catch_stop_iteration`. When this context
# ends, the end of the epoch is reported to the other processes.
TFEpochIterator = _private("backend.tensorflow.trainer", "TFEpochIterator")
_private("backend.tensorflow.trainer", "TFEpochIterator.catch_stop_iteration")

# The data of an epoch, created from arrays or by user code.
_private("backend.tensorflow.trainer", "TFEpochIterator._get_iterator")
_method(TFEpochIterator, "__init__", "distribute_strategy")
ArrayDataAdapter = _private(
    "trainers.data_adapters.array_data_adapter", "ArrayDataAdapter"
)

# These names select samples of arrays for a batch. Keras shuffles arrays in a
# different order in each process.
_method(ArrayDataAdapter, "get_tf_dataset")
can_convert_arrays = _private(
    "trainers.data_adapters.array_data_adapter", "can_convert_arrays"
)
_array_slicing = importlib.import_module(
    "keras.src.trainers.data_adapters.array_slicing"
)
_method(_array_slicing, "convert_to_sliceable", "arrays", "target_backend")
_methods(
    _array_slicing, "slice_tensorflow_sparse_wrapper(sparse_wrapper, indices)"
)
_private("trainers.data_adapters.array_slicing", "TensorflowSparseWrapper")

# The base class of all optimizers. Its methods receive the variables and
# gradients.
BaseOptimizer = _private("optimizers.base_optimizer", "BaseOptimizer")

# The class whose methods write to variables, including the rows of sparse
# gradients.
TFOptimizer = _private("backend.tensorflow.optimizer", "TFOptimizer")

# The class of models whose layers have names instead of attribute names.
Functional = _private("models.functional", "Functional")
_method(Functional, "_run_through_graph", "inputs", "operation_fn", "call_fn")
_method(Functional, "_standardize_inputs", "inputs")

# Returns the input signature of the last call of a subclassed model.
get_input_signature = _private("export.export_utils", "get_input_signature")

# The modules of the initializers, which identify the classes whose values can
# be computed in blocks, and functions that compute scales and seeds of these
# classes.
RandomInitializer = _private(
    "initializers.random_initializers", "RandomInitializer"
)
constant_initializers = _private("initializers", "constant_initializers")
_compute_fans = _private("initializers.random_initializers", "compute_fans")
_draw_seed = _private("random.seed_generator", "draw_seed")
_cast_seed = _private("backend.tensorflow.random", "_cast_seed")

# The class that scales the loss and unscales the gradients of float16 models.
LossScaleOptimizer = _private(
    "optimizers.loss_scale_optimizer", "LossScaleOptimizer"
)
NESTING_OPTIMIZERS: tuple[type, ...] = tuple(
    getattr(keras.optimizers, name) for name in _column["nesting"]
)

# The store that writes weights to an HDF5 file. No other store supports partial
# reads.
_H5IOStore = _private("saving.saving_lib", "H5IOStore")

# This module contains `get_attr_skipset`, which creates an optimizer each time
# it is called, because it stores its result under another name than it reads.
saving_lib = importlib.import_module("keras.src.saving.saving_lib")
_private("saving.saving_lib", "get_attr_skipset")

backend_numpy = _private("", _column["backend_numpy"])
backend_nn = _private("", _column["backend_nn"])
backend_core = _private("", _column["backend_core"])

ConvLSTMCell = _private("layers.rnn.conv_lstm", "ConvLSTMCell")
for _cell in (keras.layers.LSTMCell, keras.layers.GRUCell, ConvLSTMCell):
    _method(_cell, "call", "inputs", "states", "training")
_methods(keras.layers.LSTMCell, "_compute_carry_and_output_fused(z, c_tm1)")
_methods(ConvLSTMCell, "get_dropout_mask(step_input)", "recurrent_conv(x, w)")
_methods(ConvLSTMCell, "get_recurrent_dropout_mask(step_input)")
_methods(ConvLSTMCell, "input_conv(x, w, b, padding)")

rnn_loop = _private("", _column["rnn_loop"])
_method(rnn_loop, "rnn", "inputs", "time_major", "input_length", "unroll")
# The module whose recurrent layers call cuDNN on a machine with a GPU.
backend_rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")
_method(backend_rnn, "cudnn_ok", "activation", "unroll", "use_bias")

_methods(backend_numpy, "divide", "multiply", "true_divide", "flip", "diag")
_methods(backend_numpy, "einsum", "eye", "add", "repeat", "stack")
_methods(backend_numpy, "take_along_axis")
_methods(backend_nn, "ctc_loss", "one_hot", "softmax")
_methods(backend_core, "scatter", "slice_update")

# The base class of distributions in Keras.
Distribution = _private("distribution.distribution_lib", "Distribution")
_methods(
    Distribution, "__init__(device_mesh, batch_dim_name, auto_shard_dataset)"
)

# The module of the TensorFlow backend that `keras.distribution` calls, and the
# class that passes datasets to a distribution. `tlm.distribution.enable`
# implements them.
distribution_backend = _private("backend.tensorflow", "distribution_lib")
_method(distribution_backend, "list_devices", "device_type")
_method(distribution_backend, "_to_backend_mesh", "device_mesh")
_method(distribution_backend, "_to_backend_layout", "tensor_layout")
TFDatasetAdapter = _private(
    "trainers.data_adapters.tf_dataset_adapter", "TFDatasetAdapter"
)
_method(TFDatasetAdapter, "__init__", "dataset", "class_weight", "distribution")
PyDatasetAdapter = _private(
    "trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter"
)
_method(PyDatasetAdapter, "__init__", "x", "class_weight", "shuffle")

# Maps the classes to their methods that add the LoRA part to a weight.
MERGED_LORA: dict[str, str] = _column["merged_lora"]
for _class, _name in MERGED_LORA.items():
    _method(functools.reduce(getattr, _class.split("."), keras), _name)

# Passes the outputs of a step to all metrics of `compile`.
CompileMetrics = _private("trainers.compile_utils", "CompileMetrics")

# The methods that initialize or write a variable. A host variable that a
# function on a mesh writes is moved to the mesh.
_methods(
    keras.Variable,
    "__init__(initializer, shape, dtype)",
    "_initialize(value)",
    "_initialize_with_initializer(initializer)",
    "_deferred_initialize",
    "_direct_assign(value)",
    "value",
)

# The methods that create step functions, and the methods that build metrics and
# slot variables before the first step is traced.
_methods(
    TensorFlowTrainer,
    *(f"make_{verb}_function(force)" for verb in ("train", "test", "predict")),
    *(f"{verb}(x, callbacks)" for verb in ("fit", "evaluate", "predict")),
)
_methods(BaseTrainer, "_symbolic_build(data_batch)", "get_metrics_result")
_methods(CompileMetrics, "update_state(y_true, y_pred, sample_weight)")
_methods(
    BaseOptimizer,
    "build(variables)",
    "apply(grads, trainable_variables)",
    "_get_variable_index(variable)",
    "_track_variable(variable)",
    "_backend_apply_gradients(grads, trainable_variables)",
    "_update_model_variables_moving_average",
    "_use_weight_decay(variable)",
    "save_own_variables(store)",
    "load_own_variables(store)",
)
_methods(
    TFOptimizer,
    "_overwrite_model_variables_with_average_value(trainable_variables)",
    "_trackable_children(save_type)",
    "add_variable_from_reference(reference_variable)",
    *(f"assign{verb}(variable, value)" for verb in ("", "_add", "_sub")),
)
_methods(
    keras.optimizers.Adagrad, "update_step(gradient, variable, learning_rate)"
)

# If a variable sets `overwrite_with_gradient`, optimizers use these methods to
# pass its gradient to its `assign` method. Tables with a `RowOptimizer` are
# trained in this way.
_methods(
    BaseOptimizer,
    "_overwrite_variables_directly_with_gradients(grads, vars)",
    "_filter_empty_gradients(grads, vars)",
)
_method(keras.Variable, "overwrite_with_gradient")
_method(LossScaleOptimizer, "_overwrite_variable_with_gradient", "variable")
_method(LossScaleOptimizer, "check_finite", "grads")

# Exchanges weights and their moving averages.
SwapEMAWeights = keras.callbacks.SwapEMAWeights
_methods(SwapEMAWeights, "_tf_swap_variables(optimizer)")
_methods(SwapEMAWeights, "_tf_finalize_ema_values(optimizer)")

if _IS_UNTESTED:  # All names have been found.
    private_names.check_untested(keras.__version__, _NEWEST)


@contextlib.contextmanager
def swapping_only(callback: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Context in which `SwapEMAWeights` exchanges only certain variables.

    Some versions exchange the variables that the model lists. The others
    exchange the variables that the optimizer lists.
    """
    model = callback._model
    callback._model = types.SimpleNamespace(trainable_variables=variables)
    try:
        yield
    finally:
        callback._model = model


def imported_tf_keras() -> types.ModuleType | None:
    """Returns tf_keras if the program has imported it, otherwise None.

    Programs that do not use tf_keras do not have to install it.
    """
    return sys.modules.get("tf_keras")


def name_scope_callers() -> list[Any]:
    """Returns the objects that opened this thread's name scopes.

    The object that opened the innermost scope is first.
    """
    stack = _get_global_attribute("name_scope_stack") or ()
    return [
        entry.caller for entry in reversed(stack) if entry.caller is not None
    ]


def calling_layer() -> keras.layers.Layer | None:
    """Returns the outermost layer that is being called in this thread."""
    context = _get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def random_seed() -> int | None:
    """Returns the seed passed to `keras.utils.set_random_seed`, or None."""
    return _get_global_attribute("global_random_seed")


def is_abstract() -> bool:
    """Returns whether Keras is only tracing shapes in this thread.

    A `tf.function` in which this function is called is traced again for calls
    outside of the scopes of Keras.
    """
    return is_stateless() or is_symbolic()


def is_symbolic() -> bool:
    """Returns whether a symbolic call infers shapes; see `is_abstract`."""
    return function_traces.depends_on(in_symbolic_scope)


def is_stateless() -> bool:
    """Returns whether calls change no variable; see `is_abstract`."""
    return function_traces.depends_on(in_stateless_scope)


def stateless_value(variable: Any) -> Any:
    """Returns the value that a `StatelessScope` has for a variable, or None."""
    if not in_stateless_scope():
        return None
    return _get_stateless_scope().get_current_value(variable)


@contextlib.contextmanager
def separate_state() -> Iterator[None]:
    """Runs code outside of all scopes and layer calls of this thread.

    Afterwards, the state of Keras is the same as before, including the numbers
    in automatic names and the generator of random seeds.
    """
    state = vars(_global_state.GLOBAL_STATE_TRACKER)
    random_state = random.getstate()
    saved = dict(state)
    names = saved.get("object_name_uids")
    for name in (
        "current_call_ctx",
        "distribution",
        "name_scope_stack",
        "stateless_scope",
        "symbolic_scope",
    ):
        state.pop(name, None)
    if names is not None:
        state["object_name_uids"] = names.copy()
    try:
        with tf.init_scope():
            yield
    finally:
        state.clear()
        state.update(saved)
        random.setstate(random_state)


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """Unsets the distribution of Keras in this thread inside the context."""
    state = vars(_global_state.GLOBAL_STATE_TRACKER)
    distribution = state.pop("distribution", None)
    try:
        yield
    finally:
        state["distribution"] = distribution


def is_needed(owner: str, name: str) -> bool:
    """Returns whether this version of Keras requires a replacement."""
    return f"{owner}.{name}" not in _column["unneeded"]


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the learning rate argument: a schedule, callable or variable.

    In contrast, `optimizer.learning_rate` returns the value for the current
    step of the optimizer.
    """
    return optimizer._learning_rate


def step_counter_of(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts the calls of `apply`.

    If the optimizer accumulates gradients, `optimizer.iterations` is a quotient
    of this variable.
    """
    return optimizer._iterations


def accumulated_gradients(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]
) -> list[keras.Variable]:
    """Returns the variable of accumulated gradients for each variable."""
    return [
        optimizer._accumulated_gradients[optimizer._get_variable_index(v)]
        for v in variables
    ]


def update_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Updates the moving averages of weights, if the optimizer has any.

    Keras updates the averages also in steps that only accumulate gradients.
    """
    if optimizer.use_ema:
        optimizer._update_model_variables_moving_average(
            optimizer._trainable_variables
        )


def applying_optimizer() -> keras.optimizers.Optimizer | None:
    """Returns the optimizer whose `apply` is running, or None."""
    caller = next(iter(name_scope_callers()), None)
    return caller if isinstance(caller, keras.optimizers.Optimizer) else None


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Returns whether an optimizer decays a variable."""
    return optimizer._use_weight_decay(variable)


def build_all(model: keras.Model, element_spec: Any) -> None:
    """Creates the variables of a model, its metrics and its optimizer.

    Args:
      model: Compiled model.
      element_spec: Specs of a batch.
    """
    model._symbolic_build(data_batch=element_spec)


def distributed_dataset(epochs: Any) -> Any:
    """Returns the `tf.distribute.DistributedDataset` of a `TFEpochIterator`."""
    return epochs._distributed_dataset


def sizes_of_arrays(adapter: Any) -> tuple[int, int]:
    """Returns the number of samples and the batch size of arrays.

    Args:
      adapter: An `ArrayDataAdapter`.
    """
    return adapter._num_samples, adapter._batch_size


def batches_at(adapter: Any, indices: tf.data.Dataset) -> tf.data.Dataset:
    """Returns batches of the samples of arrays.

    The values are converted as in Keras, for example float64 to float32.

    Args:
      adapter: An `ArrayDataAdapter`.
      indices: Dataset of int64 vectors, the indices of the samples of a batch.
    """
    arrays = keras.tree.lists_to_tuples(
        _array_slicing.convert_to_sliceable(
            adapter._inputs, target_backend="tensorflow"
        )
    )

    def select(array: Any, where: tf.Tensor) -> Any:
        if isinstance(array, _array_slicing.TensorflowSparseWrapper):
            return _array_slicing.slice_tensorflow_sparse_wrapper(array, where)
        if isinstance(array, list | tuple | dict):
            return None  # `traverse` visits the elements.
        return tf.gather(array, where) if tf.is_tensor(array) else array

    return tf.data.Dataset.zip(
        indices, tf.data.Dataset.from_tensors(arrays).repeat()
    ).map(
        lambda where, values: keras.tree.traverse(
            lambda leaf: select(leaf, where), values
        ),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns a model and all layers that it contains."""
    return list(model._flatten_layers())


def epoch_of_backup(model: keras.Model) -> int | None:
    """Returns the epoch at which `BackupAndRestore` resumes, or None."""
    return model._initial_epoch


@contextlib.contextmanager
def without_strategy(model: keras.Model) -> Iterator[None]:
    """Removes the distribution strategy of a model inside the context."""
    strategy, model._distribute_strategy = model._distribute_strategy, None
    # The step functions depend on the strategy, so they are created again.
    functions = model.test_function, model.predict_function
    model.test_function = model.predict_function = None
    try:
        yield
    finally:
        model._distribute_strategy = strategy
        model.test_function, model.predict_function = functions


@contextlib.contextmanager
def values_in_a_trace(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Replaces the values of variables by zeros while a function is traced.

    In the traced function, an assignment replaces this value. The variables
    themselves do not change.
    """
    before = [variable._value for variable in variables]
    try:
        for variable in variables:
            variable._value = tf.zeros(variable.shape, variable.dtype)
            # `assign` calls this attribute of the object instead of the method
            # of its class.
            variable.__dict__["_direct_assign"] = functools.partial(
                setattr, variable, "_value"
            )
        yield
    finally:
        for variable, value in zip(variables, before):
            variable.__dict__.pop("_direct_assign", None)
            variable._value = value


@contextlib.contextmanager
def added_at_once(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Makes each traced `assign_add` call inside the context atomic.

    Keras reads the variable, adds to it and writes it in separate operations.
    If two workers run these operations at the same time, one of the two
    increments is lost.
    """
    try:
        for v in variables:
            v.__dict__["assign_add"] = functools.partial(_add_at_once, v)
        yield
    finally:
        for v in variables:
            v.__dict__.pop("assign_add", None)


def _add_at_once(variable: keras.Variable, value: Any) -> None:
    variable._value.assign_add(tf.cast(value, variable.dtype))


def layout_map_of(distribution: keras.distribution.ModelParallel) -> Any:
    """Returns the layout map of a ModelParallel of Keras."""
    return distribution._layout_map


def given_layout(variable: Any) -> Any:
    """Returns the `layout` passed to a Keras variable at creation, or None."""
    return getattr(variable, "_layout", None)


def h5_dataset(
    store: Any,
    key: str,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> Any:
    """Returns the HDF5 dataset of a key in a weights store, or None.

    A dataset supports partial reads and writes. The store itself does not.

    Args:
      store: The `store` argument of `save_own_variables` or
        `load_own_variables`. In tf_keras, the store is a group of an HDF5 file.
      key: Key of an existing dataset. If `shape` is passed, key of a new
        dataset.
      shape: Shape of the new dataset.
      dtype: Dtype of the new dataset.
    """
    if hasattr(store, "create_dataset"):
        return (
            store[key]
            if shape is None
            else store.create_dataset(key, shape, dtype)
        )
    if type(store) is not _H5IOStore:
        return None
    if shape is None:
        return checks.own_h5_dataset(store._h5_entry_group, key)
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group.create_dataset(key, shape, dtype)


def fans_of(initializer: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the numbers of input and output units of a `VarianceScaling`."""
    axes = {name: getattr(initializer, name) for name in _column["fan_axes"]}
    return _compute_fans(shape, **axes)


def stateless_seed_of(initializer: Any) -> Any:
    """Returns the seed of the next random numbers of an initializer.

    A `SeedGenerator` advances as in a call of the initializer.

    Returns:
      int32 array of shape `[2]`; None if the type of the seed is unknown.
    """
    seed = initializer.seed
    if type(seed) is not int and type(seed) is not keras.random.SeedGenerator:
        return None
    with tf.init_scope(), tf.device("CPU:0"):
        return keras.ops.convert_to_numpy(_cast_seed(_draw_seed(seed)))
