"""Patch table entries for replaced names of Keras 3 and tf_keras.

The replacement functions of a group are imported when the group is first used.
"""

from tf_layoutmap._patches.rows import (
    KERAS,
    TENSORFLOW,
    TF_KERAS,
    Patch,
    Replacement,
)

KERAS3_GROUP = "keras3"
_KERAS3_TESTS = "tests/layout/keras3/"
KERAS_DISTRIBUTION_GROUP = "keras_distribution"
_DISTRIBUTION_TESTS = "tests/distribution/test_keras_backend.py"


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
    """Returns the patches of functions in a backend module of Keras 3."""
    return [
        _keras3_row(f"_core.keras_private:{module}", name, ours, why, test)
        for name, ours in functions.items()
    ]


_TRAINER = "_core.keras_private:TensorFlowTrainer"
_OPTIMIZER = "_core.keras_private:TFOptimizer"
_BASE_OPTIMIZER = "_core.keras_private:BaseOptimizer"


def keras3_rows() -> list[Patch]:
    """Returns the patches of Keras 3 for models on a mesh."""
    from tf_layoutmap.layout.keras3 import (
        backend_ops,
        embedding_rows,
        host_layers,
        sharded_rows,
        step,
        variable,
    )
    from tf_layoutmap.layout.keras3 import optimizers as keras3_optimizers
    from tf_layoutmap.layout.ops import corrections, gates, loops
    from tf_layoutmap.layout.processes import checks

    return [
        _keras3_row(
            "keras:Variable",
            "__init__",
            variable.init_variable,
            "Keras creates the full value of a variable on the host before "
            "the layout of the variable is known.",
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
            "The inputs of a layer are on the host, but its weights are on a "
            "mesh.",
            "test_layer_calls.py",
        ),
        _keras3_row(
            "_core.keras_private:Functional",
            "_run_through_graph",
            host_layers.run_through_graph,
            "The devices of a mesh cannot look up strings, so layers that "
            "look up strings must run on the host.",
            "test_host_layers.py",
        ),
        _keras3_row(
            "keras:layers.Embedding",
            "call",
            embedding_rows.embedding_call,
            "Each device uses ids of the full table as row indices of its "
            "shard.",
            "test_embedding_rows.py",
        ),
        Patch(
            KERAS3_GROUP,
            "_core.tf_private:gen_math_ops",
            "unsorted_segment_sum",
            sharded_rows.segment_sum_of_table,
            "Each device computes the dense form of a sparse gradient for the "
            "full table.",
            TENSORFLOW,
            _KERAS3_TESTS + "test_sharded_rows.py",
            make=corrections.correct,
        ),
        *(
            _keras3_row(
                f"keras:layers.{layer}",
                name,
                variable.merged_lora_weight,
                "If a weight is sharded, Keras cannot write the sum of the "
                "weight and its LoRA matrices to a file.",
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
            "The results of metrics are on a mesh, and Keras cannot read "
            "their values.",
            "test_step.py",
        ),
        Patch(
            KERAS3_GROUP,
            "_core.keras_private:TFEpochIterator",
            "catch_stop_iteration",
            checks.epoch_scope,
            "After one process has ended its epoch, the other processes wait "
            "for it forever.",
            KERAS,
            "tests/layout/processes/test_checks.py",
        ),
        Patch(
            KERAS3_GROUP,
            "_core.tf_private:Function",
            "__call__",
            step.call_function,
            "If the `call` method of a layer is a tf.function, the layer is "
            "never trained.",
            TENSORFLOW,
            _KERAS3_TESTS + "test_layer_functions.py",
        ),
        Patch(
            KERAS3_GROUP,
            "_core.tf_private:Function",
            "get_concrete_function",
            step.get_concrete_function,
            "A concrete function that a layer creates in its first call reads "
            "no weights, so the layer is never trained.",
            TENSORFLOW,
            _KERAS3_TESTS + "test_layer_functions.py",
        ),
        _keras3_row(
            "_core.keras_private:TFEpochIterator",
            "_get_iterator",
            step.data_of_epoch,
            "If autotuning is enabled, deleting the iterator of a dataset can "
            "take a minute.",
            "test_step.py",
        ),
        _keras3_row(
            _BASE_OPTIMIZER,
            "build",
            keras3_optimizers.build,
            "Slot variables are replicated instead of sharded.",
            "test_optimizers.py",
        ),
        # `LossScaleOptimizer` calls this function to check all gradients before
        # it applies them.
        *(
            _keras3_row(
                f"_core.keras_private:{kind}",
                "apply",
                keras3_optimizers.apply,
                "If a step fails, it may already have updated some of the "
                "weights.",
                "test_optimizers.py",
            )
            for kind in ("BaseOptimizer", "LossScaleOptimizer")
        ),
        _keras3_row(
            "keras:optimizers.Adagrad",
            "update_step",
            keras3_optimizers.adagrad_step,
            "Keras computes with the full accumulator, although a sparse "
            "gradient contains only some rows.",
            "test_optimizers.py",
        ),
        *(
            _keras3_row(
                _OPTIMIZER,
                name,
                ours,
                "Each device writes all rows of a sparse update to its shard, "
                "even rows that belong to other shards.",
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
            "Keras divides or multiplies a sparse gradient by the full slot "
            "variable.",
            "test_optimizers.py",
            multiply=keras3_optimizers.multiply,
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
        *_backend_rows(
            "backend_numpy",
            "DTensor gathers all dimensions except the first one.",
            "../replication/test_generate.py",
            stack=backend_ops.stack,
            take_along_axis=backend_ops.take_along_axis,
        ),
        Patch(
            KERAS3_GROUP,
            "_core.keras_private:backend",
            "rnn",
            loops.rnn,
            "DTensor's compiler ends the process if a recurrent layer "
            "contains a loop over time steps.",
            KERAS,
            _KERAS3_TESTS + "test_layers.py",
        ),
        *(
            Patch(
                KERAS3_GROUP,
                owner,
                "call",
                ours,
                "DTensor cannot split the sharded weights of a recurrent cell "
                "into gates.",
                KERAS,
                "tests/layout/ops/test_gates.py",
            )
            for owner, ours in (
                ("keras:layers.LSTMCell", gates.lstm),
                ("keras:layers.GRUCell", gates.gru),
                ("_core.keras_private:ConvLSTMCell", gates.conv_lstm),
            )
        ),
        _keras3_row(
            "keras:Variable",
            "_direct_assign",
            keras3_optimizers.assign_host_variable,
            "Every device writes a seed that was created outside the scope, "
            "such as the seed of a sampler.",
            "../replication/test_generate.py",
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
            "DTensor uses indices into the full tensor as indices into a "
            "shard.",
            "test_metrics.py",
            scatter=step.scatter,
        ),
        *_backend_rows(
            "backend_core",
            "DTensor gathers the tensor on every device.",
            "../replication/test_generate.py",
            slice_update=backend_ops.slice_update,
        ),
        *_backend_rows(
            "backend_nn",
            "The probabilities of tokens differ in the last bit from one "
            "device.",
            "../replication/test_generate.py",
            softmax=backend_ops.softmax,
        ),
        *_backend_rows(
            "backend_nn",
            "DTensor shards the classes of a sample, but the operation "
            "requires all classes on one device.",
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


def keras_distribution_rows() -> list[Patch]:
    """Returns the rows of `keras.distribution`, for `distribution.enable`."""
    from tf_layoutmap.distribution import keras_backend

    def backend_row(
        name: str, ours: Replacement, why: str, *, is_missing: bool = False
    ) -> Patch:
        return Patch(
            KERAS_DISTRIBUTION_GROUP,
            "_core.keras_private:distribution_backend",
            name,
            ours,
            why,
            KERAS,
            _DISTRIBUTION_TESTS,
            is_missing=is_missing,
        )

    return [
        Patch(
            KERAS_DISTRIBUTION_GROUP,
            "_core.keras_private:Distribution",
            "_context_if_set_in_keras",
            keras_backend.context_if_set,
            "Keras creates unsharded weights while a distribution is set.",
            KERAS,
            _DISTRIBUTION_TESTS,
            make=keras_backend.as_property,
            is_missing=True,
        ),
        Patch(
            KERAS_DISTRIBUTION_GROUP,
            "_core.keras_private:Distribution",
            "auto_shard_dataset",
            keras_backend.set_auto_shard_dataset,
            "A process would train on a part of its own samples only, and no "
            "error would be raised.",
            KERAS,
            _DISTRIBUTION_TESTS,
            make=keras_backend.with_checked_setter,
        ),
        backend_row(
            "list_devices",
            keras_backend.list_devices,
            "The list contains devices of several types on a TPU host.",
        ),
        backend_row(
            "_to_backend_mesh",
            keras_backend.to_backend_mesh,
            "Keras' function fails if DTensor is not initialized.",
        ),
        backend_row(
            "_to_backend_layout",
            keras_backend.to_backend_layout,
            "DTensor's error for a repeated axis does not contain the layout.",
        ),
        *(
            backend_row(
                name,
                ours,
                "The TensorFlow backend of Keras does not have this function.",
                is_missing=True,
            )
            for name, ours in (
                ("distribute_tensor", keras_backend.distribute_tensor),
                ("get_device_count", keras_backend.get_device_count),
                ("initialize", keras_backend.initialize),
                ("num_processes", keras_backend.num_processes),
                ("process_id", keras_backend.process_id),
            )
        ),
        Patch(
            KERAS_DISTRIBUTION_GROUP,
            "_core.keras_private:TFDatasetAdapter",
            "__init__",
            keras_backend.init_dataset_adapter,
            "Keras shards a dataset over processes, but a step on a mesh "
            "requires the full batch in each process.",
            KERAS,
            _DISTRIBUTION_TESTS,
        ),
    ]


def tf_keras_rows() -> list[Patch]:
    """Returns the patches of tf_keras for models on a mesh."""
    from tf_layoutmap.layout.ops import gates, loops
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
            "DTensor shards dimensions of a sample, such as the width of an "
            "image, but convolutions require unsharded samples.",
        ),
        Patch(
            TF_KERAS_GROUP,
            "_core.tf_private:Function",
            "__call__",
            calls.call_function,
            "If the `call` method of a layer is a tf.function, it reads "
            "variables that are not on the mesh.",
            TENSORFLOW,
            "tests/layout/tf_keras/test_calls.py",
        ),
        _tf_keras_row(
            _MODEL,
            "__call__",
            calls.call_model,
            "The inputs of a layer are on the host, but its weights are on a "
            "mesh.",
        ),
        _tf_keras_row(
            _MODEL,
            "build",
            calls.build_model,
            "The weights of a model have no value after `build`.",
        ),
        _tf_keras_row(
            _MODEL,
            "compile",
            optimizers.compile_model,
            "The counters of the optimizer are not on the mesh of the weights.",
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
            "After one process has ended its epoch, the other processes wait "
            "for it forever.",
        ),
        _tf_keras_row(
            _PRIVATE + "DataHandler",
            "_configure_dataset_and_inferred_steps",
            step.make_data,
            "If autotuning is enabled, deleting the iterator of a dataset can "
            "take a minute.",
        ),
        _tf_keras_row(
            _PRIVATE + "LayerNormalization",
            "_fused_can_be_used",
            patches.can_be_fused,
            "DTensor does not support the fused operation of layer "
            "normalization.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "add_variable_from_reference",
            optimizers.add_slot,
            "Slot variables are replicated instead of sharded.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "apply_gradients",
            optimizers.apply_gradients,
            "If a step fails, it may already have updated some of the weights.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "_deduplicate_sparse_grad",
            optimizers.deduplicate,
            "DTensor does not support the operations with which tf_keras sums "
            "repeated rows of a gradient.",
        ),
        _tf_keras_row(
            _PRIVATE + "Optimizer",
            "_internal_apply_gradients",
            optimizers.update,
            "tf_keras can update moving averages only under a distribution "
            "strategy, but a mesh does not use a strategy.",
        ),
        _tf_keras_row(
            _PRIVATE + "backend",
            "_assign_value_to_variable",
            patches.assign_value,
            "An assigned value is on the host, but the variable is on a mesh.",
        ),
        _tf_keras_row(
            _PRIVATE + "backend",
            "rnn",
            loops.rnn,
            "DTensor's compiler ends the process if a recurrent layer "
            "contains a loop over time steps.",
        ),
        _tf_keras_row(
            _PRIVATE + "RandomGenerator",
            "make_legacy_seed",
            patches.make_legacy_seed,
            "A step on a mesh is traced more or less often than on one device, "
            "so a seeded layer draws different numbers.",
        ),
        *(
            _tf_keras_row(
                _PRIVATE + "DropoutRNNCellMixin",
                name,
                patches.dropout_mask,
                "A loop draws new dropout masks in each step, but an unrolled "
                "loop draws them once.",
            )
            for name in (
                "get_dropout_mask_for_cell",
                "get_recurrent_dropout_mask_for_cell",
            )
        ),
        *(
            _tf_keras_row(
                _PRIVATE + owner,
                "call",
                ours,
                "DTensor cannot split the sharded weights of a recurrent cell "
                "into gates.",
            )
            for owner, ours in (
                ("LSTM_MODULE.LSTMCell", gates.lstm),
                ("GRU_MODULE.GRUCell", gates.gru),
                ("ConvLSTMCell", gates.conv_lstm),
            )
        ),
        *(
            _tf_keras_row(
                f"{_PRIVATE}{kind.upper()}_MODULE",
                f"{kind}_with_backend_selection",
                ours,
                "tf_keras creates functions for the CPU and the GPU, and "
                "DTensor's compiler ends the process when it compiles them.",
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
