"""Replaced names of Keras 3, for the layers of `tlm.layers`."""

from tf_layoutmap._core.patch_entry import KERAS, Patch, Replacement
from tf_layoutmap.layers import evaluation
from tf_layoutmap.layers.base import construction
from tf_layoutmap.layers.keras3 import (
    process_fit,
    row_optimizer,
    shard_slots,
    string_batches,
)

_OPTIMIZER = "_core.keras_private:TFOptimizer"
_BASE_OPTIMIZER = "_core.keras_private:BaseOptimizer"
SELF_TRAINING = "keras3_self_training"
SHARD_SLOTS = "keras3_shard_slots"
KERAS3_EMBEDDINGS = "keras3_embedding_creation"
STRING_BATCHES = "keras3_string_batches"
PROCESSES = "keras3_processes"
EVALUATION = "keras3_evaluation"
_SCALED = "_core.keras_private:LossScaleOptimizer"
_LAYER_TESTS = "tests/layers/"


def _self_training_entry(
    owner: str, name: str, ours: Replacement, why: str, test: str
) -> Patch:
    return Patch(
        SELF_TRAINING,
        owner,
        name,
        ours,
        why,
        KERAS,
        f"{_LAYER_TESTS}keras3/{test}",
    )


def _shard_slot_entry(
    owner: str, name: str, ours: Replacement, why: str
) -> Patch:
    return Patch(
        SHARD_SLOTS,
        owner,
        name,
        ours,
        why,
        KERAS,
        _LAYER_TESTS + "keras3/test_shard_slots.py",
    )


def _process_entry(owner: str, name: str, ours: Replacement, why: str) -> Patch:
    return Patch(
        PROCESSES,
        f"_core.keras_private:{owner}",
        name,
        ours,
        why,
        KERAS,
        _LAYER_TESTS + "keras3/test_processes.py",
    )


PATCHES: tuple[Patch, ...] = (
    _self_training_entry(
        _SCALED,
        "_overwrite_variable_with_gradient",
        row_optimizer.overwrites,
        "Keras does not divide the gradient of a table by the loss scale.",
        "test_model_optimizers.py",
    ),
    _self_training_entry(
        _SCALED,
        "check_finite",
        row_optimizer.check_finite,
        "Keras checks every element of a table for NaN.",
        "test_model_optimizers.py",
    ),
    _self_training_entry(
        _OPTIMIZER,
        "add_variable_from_reference",
        row_optimizer.add_variable,
        "Keras creates a gradient accumulator that is as large as the table.",
        "test_model_optimizers.py",
    ),
    _self_training_entry(
        _BASE_OPTIMIZER,
        "_overwrite_variables_directly_with_gradients",
        row_optimizer.overwrite_or_accumulate,
        "Keras uses the largest of several gradients of a table instead "
        "of their sum.",
        "test_model_optimizers.py",
    ),
    _self_training_entry(
        _BASE_OPTIMIZER,
        "_filter_empty_gradients",
        row_optimizer.filter_empty,
        "If a table has no gradient, Keras skips the table and issues a "
        "warning.",
        "test_tpu_embedding_training.py",
    ),
    _self_training_entry(
        _BASE_OPTIMIZER,
        "build",
        row_optimizer.build,
        "A table that follows the optimizer of its model has no slot "
        "variables.",
        "test_model_rules.py",
    ),
    _self_training_entry(
        _OPTIMIZER,
        "_overwrite_model_variables_with_average_value",
        row_optimizer.overwrite_with_averages,
        "With `use_ema`, Keras raises an error for a table, which has no "
        "moving average.",
        "test_moving_averages.py",
    ),
    *(
        _self_training_entry(
            "_core.keras_private:SwapEMAWeights",
            name,
            row_optimizer.swap_averages,
            "The callback raises an error for a table, which has no "
            "moving average.",
            "test_moving_averages.py",
        )
        for name in ("_tf_swap_variables", "_tf_finalize_ema_values")
    ),
    _self_training_entry(
        "_core.keras_private:saving_lib",
        "get_attr_skipset",
        row_optimizer.attributes_without_state,
        "Each time an optimizer is saved or loaded, Keras creates another "
        "optimizer, whose memory is not freed.",
        "test_saving.py",
    ),
    _shard_slot_entry(
        _BASE_OPTIMIZER,
        "build",
        shard_slots.build,
        "Keras does not record to which shard a slot variable belongs.",
    ),
    _shard_slot_entry(
        _OPTIMIZER,
        "add_variable_from_reference",
        shard_slots.add_variable,
        "Keras does not record to which shard a slot variable belongs.",
    ),
    _shard_slot_entry(
        _BASE_OPTIMIZER,
        "_track_variable",
        shard_slots.track_variable,
        "A checkpoint restores values into the wrong slot variables.",
    ),
    _shard_slot_entry(
        _OPTIMIZER,
        "_trackable_children",
        shard_slots.trackable_children,
        "The contents of a checkpoint depend on the number of shards.",
    ),
    _shard_slot_entry(
        _BASE_OPTIMIZER,
        "save_own_variables",
        shard_slots.save_own_variables,
        "The contents of a weights file depend on the number of shards.",
    ),
    _shard_slot_entry(
        _BASE_OPTIMIZER,
        "load_own_variables",
        shard_slots.load_own_variables,
        "The contents of a weights file depend on the number of shards.",
    ),
    Patch(
        STRING_BATCHES,
        "_core.keras_private:TensorFlowTrainer",
        "_maybe_symbolic_build",
        string_batches.build_with_first_replica,
        "Keras computes the mean of the batches of all replicas before "
        "the first step, which raises an error for strings.",
        KERAS,
        "tests/layers/base/test_open_tables.py",
    ),
    _process_entry(
        "TensorFlowTrainer",
        "_maybe_symbolic_build",
        process_fit.build_from_specs,
        "Before the first step, Keras computes the mean of the batches of "
        "all processes, which raises an error outside of a `tf.function`.",
    ),
    _process_entry(
        "trainer_module",
        "reduce_per_replica",
        process_fit.reduce_metrics,
        "Keras averages axis 0 of the metrics of all processes, which "
        "raises an error for scalars.",
    ),
    _process_entry(
        "TFEpochIterator",
        "__init__",
        process_fit.create_epochs,
        "Each process shuffles arrays in a different order, so that an "
        "epoch contains some samples twice and others not at all.",
    ),
    _process_entry(
        "TensorFlowTrainer",
        "_make_function",
        process_fit.make_function,
        "With several steps per execution, the keys of collectives are "
        "placeholders without a value.",
    ),
    *evaluation.patches_of_steps(
        EVALUATION, "_core.keras_private:TensorFlowTrainer", KERAS
    ),
    construction.patch_of_creation(KERAS3_EMBEDDINGS, "keras.layers", KERAS),
)
