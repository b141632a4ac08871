"""Entries of the patch table for the layers, in Keras 3 and in tf_keras.

The functions of a group are imported when the group is first used.
"""

from tf_layoutmap._patches.rows import (
    KERAS,
    TENSORFLOW,
    TF_KERAS,
    Patch,
    Replacement,
)

_OPTIMIZER = "_core.keras_private:TFOptimizer"
_BASE_OPTIMIZER = "_core.keras_private:BaseOptimizer"

SELF_TRAINING = "keras3_self_training"
SHARD_SLOTS = "keras3_shard_slots"
KERAS3_EMBEDDINGS = "keras3_embedding_creation"
TF_KERAS_EMBEDDINGS = "tf_keras_embedding_creation"
TF_KERAS_LAYERS = "tf_keras_self_training"
STRING_BATCHES = "keras3_string_batches"
PROCESSES = "keras3_processes"
SHAPE_INFERENCE = "keras3_shape_inference"

_SCALED = "_core.keras_private:LossScaleOptimizer"
_LAYER_TESTS = "tests/layers/"


def _self_training_row(
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


def _shard_slot_row(
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


def _tf_keras_layer_row(
    owner: str, name: str, ours: Replacement, why: str
) -> Patch:
    return Patch(
        TF_KERAS_LAYERS,
        f"_core.tf_keras_private:{owner}",
        name,
        ours,
        why,
        TF_KERAS,
        _LAYER_TESTS + "tf_keras/test_sharded_embedding.py",
    )


def self_training_rows() -> list[Patch]:
    """Returns the patches of Keras 3 for weights with a `RowOptimizer`."""
    from tf_layoutmap.layers.keras3 import row_optimizer

    return [
        _self_training_row(
            _SCALED,
            "_overwrite_variable_with_gradient",
            row_optimizer.overwrites,
            "Keras does not divide the gradient of a table by the loss scale.",
            "test_model_optimizers.py",
        ),
        _self_training_row(
            _SCALED,
            "check_finite",
            row_optimizer.check_finite,
            "Keras checks every element of a table for NaN.",
            "test_model_optimizers.py",
        ),
        _self_training_row(
            _OPTIMIZER,
            "add_variable_from_reference",
            row_optimizer.add_variable,
            "Keras creates a gradient accumulator that is as large as the "
            "table.",
            "test_model_optimizers.py",
        ),
        _self_training_row(
            _BASE_OPTIMIZER,
            "_overwrite_variables_directly_with_gradients",
            row_optimizer.overwrite_or_accumulate,
            "Keras uses the largest of several gradients of a table instead "
            "of their sum.",
            "test_model_optimizers.py",
        ),
        _self_training_row(
            _BASE_OPTIMIZER,
            "_filter_empty_gradients",
            row_optimizer.filter_empty,
            "If a table has no gradient, Keras skips the table and issues a "
            "warning.",
            "test_tpu_embedding_training.py",
        ),
    ]


def shape_inference_rows() -> list[Patch]:
    """Returns the patch of functions in layers that contain a table."""
    from tf_layoutmap.layers.keras3 import shape_inference

    return [
        Patch(
            SHAPE_INFERENCE,
            "_core.tf_private:Function",
            "__call__",
            shape_inference.call_function,
            "If a table is called inside a tf.function of a layer, the table "
            "returns zeros and is never trained.",
            TENSORFLOW,
            _LAYER_TESTS + "keras3/test_shape_inference.py",
        )
    ]


def shard_slot_rows() -> list[Patch]:
    """Returns the patches of Keras 3 for slot variables of sharded weights."""
    from tf_layoutmap.layers.keras3 import shard_slots

    return [
        _shard_slot_row(
            _BASE_OPTIMIZER,
            "build",
            shard_slots.build,
            "Keras does not record to which shard a slot variable belongs.",
        ),
        _shard_slot_row(
            _OPTIMIZER,
            "add_variable_from_reference",
            shard_slots.add_variable,
            "Keras does not record to which shard a slot variable belongs.",
        ),
        _shard_slot_row(
            _BASE_OPTIMIZER,
            "_track_variable",
            shard_slots.track_variable,
            "A checkpoint restores values into the wrong slot variables.",
        ),
        _shard_slot_row(
            _OPTIMIZER,
            "_trackable_children",
            shard_slots.trackable_children,
            "The contents of a checkpoint depend on the number of shards.",
        ),
        _shard_slot_row(
            _BASE_OPTIMIZER,
            "save_own_variables",
            shard_slots.save_own_variables,
            "The contents of a weights file depend on the number of shards.",
        ),
        _shard_slot_row(
            _BASE_OPTIMIZER,
            "load_own_variables",
            shard_slots.load_own_variables,
            "The contents of a weights file depend on the number of shards.",
        ),
    ]


def string_batch_rows() -> list[Patch]:
    """Returns the row for strings in models on several replicas."""
    from tf_layoutmap.layers.keras3 import string_batches

    return [
        Patch(
            STRING_BATCHES,
            "_core.keras_private:TensorFlowTrainer",
            "_maybe_symbolic_build",
            string_batches.build_with_first_replica,
            "Keras computes the mean of the batches of all replicas before "
            "the first step, which raises an error for strings.",
            KERAS,
            "tests/layers/base/test_open_tables.py",
        )
    ]


def process_rows() -> list[Patch]:
    """Returns the rows for `fit` of Keras 3 in several processes."""
    from tf_layoutmap.layers.keras3 import process_fit

    def row(owner: str, name: str, ours: Replacement, why: str) -> Patch:
        return Patch(
            PROCESSES,
            f"_core.keras_private:{owner}",
            name,
            ours,
            why,
            KERAS,
            _LAYER_TESTS + "keras3/test_processes.py",
        )

    return [
        row(
            "TensorFlowTrainer",
            "_maybe_symbolic_build",
            process_fit.build_from_specs,
            "Before the first step, Keras computes the mean of the batches of "
            "all processes, which raises an error outside of a `tf.function`.",
        ),
        row(
            "trainer_module",
            "reduce_per_replica",
            process_fit.reduce_metrics,
            "Keras averages axis 0 of the metrics of all processes, which "
            "raises an error for scalars.",
        ),
        row(
            "TFEpochIterator",
            "__init__",
            process_fit.create_epochs,
            "Each process shuffles arrays in a different order, so that an "
            "epoch contains some samples twice and others not at all.",
        ),
        row(
            "TensorFlowTrainer",
            "_make_function",
            process_fit.make_function,
            "With several steps per execution, the keys of collectives are "
            "placeholders without a value.",
        ),
    ]


def _embedding_creation_row(group: str, owner: str, version: str) -> Patch:
    from tf_layoutmap.layers.base import construction

    return Patch(
        group,
        f"{owner}:Embedding",
        "__init__",
        construction.init_embedding,
        "The optimizer of a model updates all rows of an Embedding.",
        version,
        "tests/layers/test_embedding_replacement.py",
        make=construction.with_signature,
    )


def keras3_embedding_rows() -> list[Patch]:
    """Returns the row by which a scope replaces layers of Keras 3."""
    return [_embedding_creation_row(KERAS3_EMBEDDINGS, "keras.layers", KERAS)]


def tf_keras_embedding_rows() -> list[Patch]:
    """Returns the row by which a scope replaces layers of tf_keras."""
    return [
        _embedding_creation_row(
            TF_KERAS_EMBEDDINGS, "tf_keras.layers", TF_KERAS
        )
    ]


def tf_keras_layer_rows() -> list[Patch]:
    """Returns the patches of tf_keras for the layers of `tlm.layers`."""
    from tf_layoutmap.layers.tf_keras import patches

    return [
        _tf_keras_layer_row(
            "Optimizer",
            "add_variable_from_reference",
            patches.add_variable,
            "tf_keras creates slot variables that are as large as the table.",
        ),
        _tf_keras_layer_row(
            "Optimizer",
            "apply_gradients",
            patches.apply_gradients,
            "The optimizer of the model updates all rows of a table instead "
            "of the rows of the batch.",
        ),
        _tf_keras_layer_row(
            "BaseOptimizer",
            "finalize_variable_values",
            patches.finalize,
            "tf_keras reads the moving averages of a table, but a table has "
            "no moving averages.",
        ),
        _tf_keras_layer_row(
            "BaseOptimizer",
            "save_own_variables",
            patches.save_own_variables,
            "A stock model cannot read the optimizer of a weight file.",
        ),
        _tf_keras_layer_row(
            "BaseOptimizer",
            "load_own_variables",
            patches.load_own_variables,
            "A weight file of a stock model raises an error.",
        ),
        _tf_keras_layer_row(
            "LegacyOptimizer",
            "apply_gradients",
            patches.legacy_apply_gradients,
            "The optimizer of the model updates all rows of a table instead "
            "of the rows of the batch.",
        ),
        _tf_keras_layer_row(
            "LegacyOptimizer",
            "_create_all_weights",
            patches.legacy_create,
            "tf_keras creates slot variables that are as large as the table.",
        ),
        _tf_keras_layer_row(
            "HDF5_FORMAT",
            "_legacy_weights",
            patches.legacy_weights,
            "Legacy .h5 files omit tables with an open vocabulary.",
        ),
    ]
