"""Rows of the patch table for replaced names of Keras 3 and tf_keras.

The functions of a group are imported when the group is first used.
"""

from tf_layoutmap._patches.rows import KERAS, TF_KERAS, Patch, Replacement

KERAS3_GROUP = "keras3"
_KERAS3_TESTS = "tests/layout/keras3/"


def _keras3_row(
    owner: str, name: str, ours: Replacement, why: str, test: str
) -> Patch:
    return Patch(
        KERAS3_GROUP,
        owner,
        name,
        ours,
        why,
        KERAS,
        _KERAS3_TESTS + test,
    )


def _backend_rows(
    module: str, why: str, test: str, **functions: Replacement
) -> list[Patch]:
    """Returns the rows of functions of a backend module of Keras 3."""
    return [
        _keras3_row(f"_core.keras_private:{module}", name, ours, why, test)
        for name, ours in functions.items()
    ]


_TRAINER = "_core.keras_private:TensorFlowTrainer"
_OPTIMIZER = "_core.keras_private:TFOptimizer"
_BASE_OPTIMIZER = "_core.keras_private:BaseOptimizer"


def keras3_rows() -> list[Patch]:
    """Returns the rows of Keras 3 for models on a mesh."""
    from tf_layoutmap.layout.keras3 import (
        backend_ops,
        embedding_rows,
        host_layers,
        step,
        variable,
    )
    from tf_layoutmap.layout.keras3 import optimizers as keras3_optimizers
    from tf_layoutmap.layout.ops import loops
    from tf_layoutmap.layout.processes import checks

    return [
        _keras3_row(
            "keras:Variable",
            "__init__",
            variable.init_variable,
            "Keras creates a variable in full on the host before its layout "
            "is known.",
            "test_variable.py",
        ),
        _keras3_row(
            "keras:layers.Layer",
            "__new__",
            variable.new_layer,
            "Keras does not record the layout map of a new layer.",
            "test_layers.py",
        ),
        _keras3_row(
            "keras:layers.Layer",
            "__call__",
            step.call,
            "Input tensors on the host are not on the mesh of the weights.",
            "test_layer_calls.py",
        ),
        _keras3_row(
            "_core.keras_private:Functional",
            "_run_through_graph",
            host_layers.run_through_graph,
            "Devices of a mesh cannot look up strings, so these layers run on "
            "the host.",
            "test_host_layers.py",
        ),
        _keras3_row(
            "keras:layers.Embedding",
            "call",
            embedding_rows.embedding_call,
            "Each device looks up global ids in its shard of the table.",
            "test_embedding_rows.py",
        ),
        *(
            _keras3_row(
                f"keras:layers.{layer}",
                name,
                variable.merged_lora_weight,
                "A sharded weight with its LoRA part added cannot be written "
                "to a file.",
                "test_lora_saving.py",
            )
            for layer, name in (
                ("Dense", "_get_kernel_with_merged_lora"),
                ("EinsumDense", "_get_kernel_with_merged_lora"),
                ("Embedding", "_get_embeddings_with_merged_lora"),
            )
        ),
        *(
            _keras3_row(
                _TRAINER,
                f"make_{verb}_function",
                ours,
                "The step of `fit` does not run on the mesh of the weights.",
                "test_step.py",
            )
            for verb, ours in (
                ("train", step.make_train_function),
                ("test", step.make_test_function),
                ("predict", step.make_predict_function),
            )
        ),
        _keras3_row(
            "_core.keras_private:BaseTrainer",
            "get_metrics_result",
            step.get_metrics_result,
            "Results of metrics on a mesh cannot be read as host values.",
            "test_step.py",
        ),
        Patch(
            KERAS3_GROUP,
            "_core.keras_private:TFEpochIterator",
            "catch_stop_iteration",
            checks.epoch_scope,
            "Other processes wait for a batch after one process has ended its "
            "epoch.",
            KERAS,
            "tests/layout/processes/test_checks.py",
        ),
        _keras3_row(
            "_core.keras_private:TFEpochIterator",
            "_get_iterator",
            step.data_of_epoch,
            "Ending a dataset that autotunes can take a minute.",
            "test_step.py",
        ),
        _keras3_row(
            _BASE_OPTIMIZER,
            "build",
            keras3_optimizers.build,
            "Slot variables are replicated on all devices.",
            "test_optimizers.py",
        ),
        # LossScaleOptimizer checks all gradients before it applies them.
        *(
            _keras3_row(
                f"_core.keras_private:{kind}",
                "apply",
                keras3_optimizers.apply,
                "A failed step has already updated some of the weights.",
                "test_optimizers.py",
            )
            for kind in ("BaseOptimizer", "LossScaleOptimizer")
        ),
        _keras3_row(
            "keras:optimizers.Adagrad",
            "update_step",
            keras3_optimizers.adagrad_step,
            "Keras adds the rows of a sparse gradient to the full accumulator.",
            "test_optimizers.py",
        ),
        *(
            _keras3_row(
                _OPTIMIZER,
                name,
                ours,
                "Each device writes all rows of a sparse update to its shard.",
                "test_optimizers.py",
            )
            for name, ours in (
                ("assign", keras3_optimizers.assign),
                ("assign_add", keras3_optimizers.assign_add),
                ("assign_sub", keras3_optimizers.assign_sub),
            )
        ),
        *_backend_rows(
            "backend_numpy",
            "Keras divides a sparse gradient by the full slot variable.",
            "test_optimizers.py",
            divide=keras3_optimizers.divide,
            true_divide=keras3_optimizers.divide,
        ),
        *_backend_rows(
            "backend_numpy",
            "Keras uses operations that DTensor cannot partition.",
            "test_layer_calls.py",
            einsum=backend_ops.einsum,
            add=backend_ops.add,
            eye=backend_ops.eye,
            repeat=backend_ops.repeat,
        ),
        Patch(
            KERAS3_GROUP,
            "_core.keras_private:backend",
            "rnn",
            loops.rnn,
            "DTensor's compiler ends the process for a loop over time steps.",
            KERAS,
            _KERAS3_TESTS + "test_layers.py",
        ),
        _keras3_row(
            "_core.keras_private:CompileMetrics",
            "update_state",
            step.update_state,
            "Metrics count only the samples of one device.",
            "test_metrics.py",
        ),
        *_backend_rows(
            "backend_numpy",
            "DTensor does not support the operation.",
            "test_metrics.py",
            flip=step.flip,
            diag=step.diag,
        ),
        *_backend_rows(
            "backend_core",
            "DTensor uses global indices as indices into a shard.",
            "test_metrics.py",
            scatter=step.scatter,
        ),
        *_backend_rows(
            "backend_nn",
            "DTensor shards the classes of a sample.",
            "test_metrics.py",
            ctc_loss=step.ctc_loss,
            one_hot=step.one_hot,
        ),
    ]


TF_KERAS_GROUP = "tf_keras"
_PRIVATE = "_core.tf_keras_private:"


def _tf_keras_row(owner: str, name: str, ours: Replacement, why: str) -> Patch:
    return Patch(
        TF_KERAS_GROUP,
        owner,
        name,
        ours,
        why,
        TF_KERAS,
        "tests/layout/tf_keras/test_models.py",
    )


_LAYER, _MODEL = "tf_keras:layers.Layer", "tf_keras:Model"
_STEP = "The step of `fit` does not run on the mesh of the weights."


def tf_keras_rows() -> list[Patch]:
    """Returns the rows of tf_keras for models on a mesh."""
    from tf_layoutmap.layout.ops import loops
    from tf_layoutmap.layout.processes import checks
    from tf_layoutmap.layout.tf_keras import calls, optimizers, patches, step

    return [
        _tf_keras_row(
            _LAYER,
            "add_weight",
            patches.add_weight,
            "tf_keras initializes a weight before its layout is known.",
        ),
        _tf_keras_row(
            _MODEL,
            "__init__",
            patches.init_model,
            "tf_keras does not record the layout map of a new model.",
        ),
        _tf_keras_row(
            _LAYER,
            "__call__",
            calls.call_layer,
            "DTensor shards images and time series within a sample.",
        ),
        _tf_keras_row(
            _MODEL,
            "__call__",
            calls.call_model,
            "Input tensors on the host are not on the mesh of the weights.",
        ),
        _tf_keras_row(
            _MODEL,
            "build",
            calls.build_model,
            "Weights have no value after `build`.",
        ),
        _tf_keras_row(
            _MODEL,
            "compile",
            optimizers.compile_model,
            "The optimizer's counters are not on the mesh of the weights.",
        ),
        *(
            _tf_keras_row(_MODEL, f"make_{verb}_function", ours, _STEP)
            for verb, ours in (
                ("train", step.make_train_function),
                ("test", step.make_test_function),
                ("predict", step.make_predict_function),
            )
        ),
        _tf_keras_row(
            _PRIVATE + "DataHandler",
            "catch_stop_iteration",
            checks.epoch_scope,
            "Other processes wait for a batch after one process has ended its "
            "epoch.",
        ),
        _tf_keras_row(
            _PRIVATE + "DataHandler",
            "_configure_dataset_and_inferred_steps",
            step.make_data,
            "Ending a dataset that autotunes can take a minute.",
        ),
        _tf_keras_row(
            _PRIVATE + "LayerNormalization",
            "_fused_can_be_used",
            patches.can_be_fused,
            "DTensor does not support the fused operation.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "add_variable_from_reference",
            optimizers.add_slot,
            "Slot variables are replicated on all devices.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "apply_gradients",
            optimizers.apply_gradients,
            "A failed step has already updated some of the weights.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "_deduplicate_sparse_grad",
            optimizers.deduplicate,
            "DTensor does not support the operations that sum repeated rows.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "_internal_apply_gradients",
            optimizers.update,
            "tf_keras requires a strategy to update moving averages, and a "
            "mesh has none.",
        ),
        _tf_keras_row(
            _PRIVATE + "backend",
            "_assign_value_to_variable",
            patches.assign_value,
            "Assigned host values are not on the mesh of the variable.",
        ),
        _tf_keras_row(
            _PRIVATE + "backend",
            "rnn",
            loops.rnn,
            "DTensor's compiler ends the process for a loop over time steps.",
        ),
        *(
            _tf_keras_row(
                f"{_PRIVATE}{kind.upper()}_MODULE",
                f"{kind}_with_backend_selection",
                ours,
                "DTensor's compiler ends the process for the functions that "
                "select a CPU or GPU implementation.",
            )
            for kind, ours in (
                ("lstm", patches.choose_lstm),
                ("gru", patches.choose_gru),
            )
        ),
        *(
            _tf_keras_row(
                _PRIVATE + "LAYOUT_MODULE",
                name,
                patches.map_model,
                "tf_keras supports only its own layout maps.",
            )
            for name in (
                "_map_functional_model_variable",
                "_map_subclass_model_variable",
            )
        ),
    ]


SELF_TRAINING = "keras3_self_training"
SHARD_SLOTS = "keras3_shard_slots"
KERAS3_EMBEDDINGS = "keras3_embedding_creation"
TF_KERAS_EMBEDDINGS = "tf_keras_embedding_creation"
TF_KERAS_LAYERS = "tf_keras_self_training"

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
    """Returns the rows of Keras 3 for weights with a `RowOptimizer`."""
    from tf_layoutmap.layers.keras3 import row_optimizer

    return [
        _self_training_row(
            _SCALED,
            "_overwrite_variable_with_gradient",
            row_optimizer.overwrites,
            "The gradient of a table is not divided by the loss scale.",
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
            "Keras creates an accumulator as large as the table.",
            "test_model_optimizers.py",
        ),
        _self_training_row(
            _BASE_OPTIMIZER,
            "_overwrite_variables_directly_with_gradients",
            row_optimizer.overwrite_or_accumulate,
            "Keras keeps the largest of several gradients instead of their "
            "sum.",
            "test_model_optimizers.py",
        ),
        _self_training_row(
            _BASE_OPTIMIZER,
            "_filter_empty_gradients",
            row_optimizer.filter_empty,
            "Keras skips a table without a gradient and warns about it.",
            "test_tpu_embedding_training.py",
        ),
    ]


def shard_slot_rows() -> list[Patch]:
    """Returns the rows of Keras 3 for slot variables of shards."""
    from tf_layoutmap.layers.keras3 import shard_slots

    return [
        _shard_slot_row(
            _BASE_OPTIMIZER,
            "build",
            shard_slots.build,
            "Keras does not record which shard a slot variable belongs to.",
        ),
        _shard_slot_row(
            _OPTIMIZER,
            "add_variable_from_reference",
            shard_slots.add_variable,
            "Keras does not record which shard a slot variable belongs to.",
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
    """Returns the rows of tf_keras for the layers of `tlm.layers`."""
    from tf_layoutmap.layers.tf_keras import patches

    return [
        _tf_keras_layer_row(
            "Optimizer",
            "add_variable_from_reference",
            patches.add_variable,
            "tf_keras creates slot variables as large as the table.",
        ),
        _tf_keras_layer_row(
            "Optimizer",
            "apply_gradients",
            patches.apply_gradients,
            "The optimizer updates all rows of a table.",
        ),
        _tf_keras_layer_row(
            "BaseOptimizer",
            "finalize_variable_values",
            patches.finalize,
            "tf_keras reads moving averages of a table, which do not exist.",
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
            "The optimizer updates all rows of a table.",
        ),
        _tf_keras_layer_row(
            "LegacyOptimizer",
            "_create_all_weights",
            patches.legacy_create,
            "tf_keras creates slot variables as large as the table.",
        ),
        _tf_keras_layer_row(
            "HDF5_FORMAT",
            "_legacy_weights",
            patches.legacy_weights,
            "Legacy .h5 files do not contain tables with keys.",
        ),
    ]
