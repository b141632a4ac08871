"""The one module that imports Keras' private names.

Each name stands below with the reason we need it. All are looked up when this
module is imported, so that a Keras that moved one is refused here, with the
remedy, and not in the middle of a training run. To add one: a line, a why.
"""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import requirements
from tf_layoutmap._core.private_names import PrivateNames

# One minor version: what passes through our hooks changes with each. With 3.14
# all names are there, and slot variables are replicated, without an error.
SUPPORTED_VERSION = requirements.KERAS

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tf_layoutmap needs Keras on the TensorFlow backend. Received: "
        f"backend {keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow "
        "before Keras is imported."
    )

_NAMES = PrivateNames(
    "Keras", "keras.src", keras.__version__, SUPPORTED_VERSION
)
_private = _NAMES.find
_method = _NAMES.check_method
_refuse = _NAMES.refusal

# Whether a call only traces shapes: no value may be read or made then.
in_stateless_scope = _private(
    "backend.common.stateless_scope", "in_stateless_scope"
)
in_symbolic_scope = _private(
    "backend.common.symbolic_scope", "in_symbolic_scope"
)

# Who is creating a variable: the stack of name scopes and their callers. And
# which layer is being called.
_get_global_attribute = _private(
    "backend.common.global_state", "get_global_attribute"
)

# Builds the weights of a model from shapes, without computing anything.
compute_output_spec = _private("backend", "compute_output_spec")

# The class that fit, evaluate and predict ask for their step function.
TensorFlowTrainer = _private("backend.tensorflow.trainer", "TensorFlowTrainer")
BaseTrainer = _private("trainers.trainer", "Trainer")

# All steps of an epoch run inside its `catch_stop_iteration`, whose end other
# processes are told.
TFEpochIterator = _private("backend.tensorflow.trainer", "TFEpochIterator")
_private("backend.tensorflow.trainer", "TFEpochIterator.catch_stop_iteration")

# What an epoch iterates over, made of arrays or by the user.
_private("backend.tensorflow.trainer", "TFEpochIterator._get_iterator")
ArrayDataAdapter = _private(
    "trainers.data_adapters.array_data_adapter", "ArrayDataAdapter"
)

# Where every optimizer learns its variables and gets its gradients.
BaseOptimizer = _private("optimizers.base_optimizer", "BaseOptimizer")

# How an optimizer writes to its variables: with rows, for sparse gradients.
TFOptimizer = _private("backend.tensorflow.optimizer", "TFOptimizer")

# A model whose layers are known by their names, not by attributes.
Functional = _private("models.functional", "Functional")
_method(Functional, "_run_through_graph", "inputs", "operation_fn", "call_fn")
_method(Functional, "_standardize_inputs", "inputs")

# What a model that is no graph of layers was last called with.
get_input_signature = _private("export.export_utils", "get_input_signature")

# Random initializers that can draw from a seed given as a tensor.
RandomInitializer = _private(
    "initializers.random_initializers", "RandomInitializer"
)
Orthogonal = _private("initializers.random_initializers", "Orthogonal")

# Scales losses of float16 models up, and their gradients down again.
LossScaleOptimizer = _private(
    "optimizers.loss_scale_optimizer", "LossScaleOptimizer"
)

# An HDF5 file of weights: the one store of which parts can be read.
_H5IOStore = _private("saving.saving_lib", "H5IOStore")
_safe_get_h5_dataset = _private("saving.saving_lib", "safe_get_h5_dataset")

# Where optimizers divide the rows of a sparse gradient, and where layers,
# metrics and losses do what DTensor cannot.
backend_numpy = _private("backend", "numpy")
backend_nn = _private("backend", "nn")
backend_core = _private("backend", "core")

# Where recurrent layers loop over time.
backend = importlib.import_module("keras.src.backend")
_method(backend, "rnn", "inputs", "time_major", "input_length", "unroll")

for _module, _names in (
    (
        backend_numpy,
        (
            "divide",
            "true_divide",
            "flip",
            "diag",
            "einsum",
            "eye",
            "add",
            "repeat",
        ),
    ),
    (backend_nn, ("ctc_loss", "one_hot")),
    (backend_core, ("scatter",)),
):
    for _name in _names:
        if not callable(getattr(_module, _name, None)):
            raise _refuse(f"where `{_module.__name__}.{_name}` is missing")

# What all distributions of Keras have in common, and the layout map of one.
Distribution = _private("distribution.distribution_lib", "Distribution")
_method(
    Distribution,
    "__init__",
    "device_mesh",
    "batch_dim_name",
    "auto_shard_dataset",
)

# Weights with their LoRA part added, on their way to a file.
for _layer in (keras.layers.Dense, keras.layers.EinsumDense):
    _method(_layer, "_get_kernel_with_merged_lora")
_method(keras.layers.Embedding, "_get_embeddings_with_merged_lora")

# Hands the outputs of a step to all metrics of `compile`.
CompileMetrics = _private("trainers.compile_utils", "CompileMetrics")

# A variable without a value, and how it comes by one.
_method(keras.Variable, "_initialize", "value")
_method(keras.Variable, "_initialize_with_initializer", "initializer")
_method(keras.Variable, "_deferred_initialize")
_method(keras.Variable, "_direct_assign", "value")
_method(keras.Variable, "value")
_method(keras.Variable, "__init__", "initializer", "shape", "dtype")

# The step functions that fit, evaluate and predict ask for, and what builds
# metrics and slot variables before the first step is traced.
for _name in (
    "make_train_function",
    "make_test_function",
    "make_predict_function",
):
    _method(TensorFlowTrainer, _name, "force")
_method(BaseTrainer, "_symbolic_build", "data_batch")
_method(BaseTrainer, "get_metrics_result")
for _name in ("fit", "evaluate", "predict"):
    _method(TensorFlowTrainer, _name, "x", "callbacks")
_method(CompileMetrics, "update_state", "y_true", "y_pred", "sample_weight")
_method(BaseOptimizer, "build", "variables")
_method(BaseOptimizer, "apply", "grads", "trainable_variables")
_method(BaseOptimizer, "_get_variable_index", "variable")
_method(BaseOptimizer, "_track_variable", "variable")
_method(BaseOptimizer, "save_own_variables", "store")
_method(BaseOptimizer, "load_own_variables", "store")
_method(TFOptimizer, "_trackable_children", "save_type")
_method(
    keras.optimizers.Adagrad,
    "update_step",
    "gradient",
    "variable",
    "learning_rate",
)
for _name in ("assign", "assign_add", "assign_sub"):
    _method(TFOptimizer, _name, "variable", "value")

# How the gradient of a variable with `overwrite_with_gradient` reaches the
# variable's `assign`, whatever the optimizer: a table then trains itself.
_method(
    BaseOptimizer,
    "_overwrite_variables_directly_with_gradients",
    "grads",
    "vars",
)
_method(BaseOptimizer, "_filter_empty_gradients", "grads", "vars")
_method(TFOptimizer, "add_variable_from_reference", "reference_variable")
_method(keras.Variable, "overwrite_with_gradient")
_method(LossScaleOptimizer, "_overwrite_variable_with_gradient", "variable")
_method(LossScaleOptimizer, "check_finite", "grads")


def imported_tf_keras() -> types.ModuleType | None:
    """Returns tf_keras if this program has imported it, else None.

    Who does not use tf_keras need not have it, nor wait for its import.
    """
    return sys.modules.get("tf_keras")


def name_scope_callers() -> list[Any]:
    """Returns who opened the name scopes of this thread, innermost first."""
    stack = _get_global_attribute("name_scope_stack") or ()
    return [
        entry.caller for entry in reversed(stack) if entry.caller is not None
    ]


def calling_layer() -> keras.layers.Layer | None:
    """Returns the outermost layer that is being called in this thread."""
    context = _get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def is_abstract() -> bool:
    """Whether Keras is only tracing shapes in this thread."""
    return in_stateless_scope() or in_symbolic_scope()


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what an optimizer was given: a schedule, a callable, a variable.

    `learning_rate` is what they give at the optimizer's own step.
    """
    return optimizer._learning_rate


def applying_optimizer() -> keras.optimizers.Optimizer | None:
    """Returns the optimizer inside whose `apply` this is called, if any."""
    caller = next(iter(name_scope_callers()), None)
    return caller if isinstance(caller, keras.optimizers.Optimizer) else None


def build_all(model: keras.Model, element_spec: Any) -> None:
    """Makes the variables of a model, its metrics and its optimizer.

    Args:
      model: Is compiled.
      element_spec: Of its batches.
    """
    model._symbolic_build(data_batch=element_spec)


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns a model and all layers inside of it."""
    return list(model._flatten_layers())


def epoch_of_backup(model: keras.Model) -> int | None:
    """Returns the epoch at which a BackupAndRestore wants to go on."""
    return model._initial_epoch


@contextlib.contextmanager
def without_strategy(model: keras.Model) -> Iterator[None]:
    """Lets a model forget the strategy that it was made under."""
    strategy, model._distribute_strategy = model._distribute_strategy, None
    # Made for another strategy, and after this again.
    functions = model.test_function, model.predict_function
    model.test_function = model.predict_function = None
    try:
        yield
    finally:
        model._distribute_strategy = strategy
        model.test_function, model.predict_function = functions


@contextlib.contextmanager
def values_in_a_trace(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Lets variables start at zero in a function being traced.

    What is assigned to them is their value from then on in that function; the
    variables themselves do not change.
    """
    before = [one._value for one in variables]
    try:
        for one in variables:
            one._value = tf.zeros(one.shape, one.dtype)
            # By this name `assign` finds it, on the variable before the class.
            one.__dict__["_direct_assign"] = functools.partial(
                setattr, one, "_value"
            )
        yield
    finally:
        for one, value in zip(variables, before):
            one.__dict__.pop("_direct_assign", None)
            one._value = value


@contextlib.contextmanager
def added_at_once(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Makes `assign_add` of variables one operation in a function being traced.

    Keras reads, adds and writes: of two workers one would not count.
    """
    try:
        for one in variables:
            one.__dict__["assign_add"] = functools.partial(_add_at_once, one)
        yield
    finally:
        for one in variables:
            one.__dict__.pop("assign_add", None)


def _add_at_once(variable: keras.Variable, value: Any) -> None:
    variable._value.assign_add(tf.cast(value, variable.dtype))


def layout_map_of(distribution: keras.distribution.ModelParallel) -> Any:
    """Returns the layout map that a ModelParallel of Keras was given."""
    return distribution._layout_map


def given_layout(variable: Any) -> Any:
    """Returns the `layout` that a variable of Keras was made with, or None."""
    return getattr(variable, "_layout", None)


def h5_dataset(
    store: Any,
    key: str,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> Any:
    """Returns the HDF5 dataset behind a key of a weights store, or None.

    A dataset reads and writes parts of itself; the store only all of it.

    Args:
      store: What `save_own_variables` or `load_own_variables` is given; by
        tf_keras, a group of an HDF5 file.
      key: A new one when `shape` is given, else one that is there.
      shape: Of the dataset to make.
      dtype: Of the dataset to make.
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
        return _safe_get_h5_dataset(store._h5_entry_group, key)
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group.create_dataset(key, shape, dtype)
