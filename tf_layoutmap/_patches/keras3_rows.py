"""Names of Keras 3, replaced for models made under a layout map."""

from tf_layoutmap._patches.rows import KERAS, Patch

GROUP = "keras3"
_CODE, _TESTS = "layout.keras3.", "tests/layout/keras3/"


def _row(owner: str, name: str, ours: str, why: str, test: str) -> Patch:
    return Patch(GROUP, owner, name, _CODE + ours, why, KERAS, _TESTS + test)


def _backend(
    module: str, names: str, ours: str, why: str, test: str
) -> list[Patch]:
    # A name of its own unless `ours` names the function.
    return [
        _row(
            f"_keras_private:{module}",
            name,
            ours if ":" in ours else f"{ours}:{name}",
            why,
            test,
        )
        for name in names.split()
    ]


_TRAINER = "_keras_private:TensorFlowTrainer"
_OPTIMIZER = "_keras_private:TFOptimizer"

ROWS = [
    _row(
        "keras:Variable",
        "__init__",
        "patches:init_variable",
        "A variable is whole on the host; it has to wait for its layout.",
        "test_variable.py",
    ),
    _row(
        "keras:layers.Layer",
        "__new__",
        "patches:new_layer",
        "A layer does not know the layout map that it was made under.",
        "test_layers.py",
    ),
    _row(
        "keras:layers.Layer",
        "__call__",
        "layer_calls:call",
        "Tensors from the host are not on the mesh of the weights.",
        "test_layer_calls.py",
    ),
    _row(
        "_keras_private:Functional",
        "_run_through_graph",
        "host_layers:run_through_graph",
        "Devices of a mesh cannot look strings up, which the host can.",
        "test_host_layers.py",
    ),
    _row(
        "keras:layers.Embedding",
        "call",
        "embedding_rows:embedding_call",
        "Each device looks ids up in its own part of the table.",
        "test_embedding_rows.py",
    ),
    *(
        _row(
            f"keras:layers.{layer}",
            name,
            "lora_saving:merged",
            "The LoRA part of a weight is added on the host, in part.",
            "test_lora_saving.py",
        )
        for layer, name in (
            ("Dense", "_get_kernel_with_merged_lora"),
            ("EinsumDense", "_get_kernel_with_merged_lora"),
            ("Embedding", "_get_embeddings_with_merged_lora"),
        )
    ),
    *(
        _row(
            _TRAINER,
            f"make_{verb}_function",
            f"step:make_{verb}_function",
            "The step of `fit` does not run on the mesh of the weights.",
            "test_step.py",
        )
        for verb in ("train", "test", "predict")
    ),
    _row(
        "_keras_private:BaseTrainer",
        "get_metrics_result",
        "step:get_metrics_result",
        "Results of metrics on a mesh cannot be read as numbers.",
        "test_step.py",
    ),
    Patch(
        GROUP,
        "_keras_private:TFEpochIterator",
        "catch_stop_iteration",
        "layout.processes.epoch:of_epoch",
        "Other processes wait for a batch that does not come.",
        KERAS,
        "tests/layout/processes/test_checks.py",
    ),
    _row(
        "_keras_private:TFEpochIterator",
        "_get_iterator",
        "step:data_of_epoch",
        "The end of data that autotunes can take a minute.",
        "test_step.py",
    ),
    _row(
        "_keras_private:BaseOptimizer",
        "build",
        "optimizers:build",
        "Slot variables are whole on every device.",
        "test_optimizers.py",
    ),
    # Which of them scales losses looks at all gradients first.
    *(
        _row(
            f"_keras_private:{kind}",
            "apply",
            "optimizers:apply",
            "A step that fails has written some of the weights.",
            "test_optimizers.py",
        )
        for kind in ("BaseOptimizer", "LossScaleOptimizer")
    ),
    _row(
        "keras:optimizers.Adagrad",
        "update_step",
        "optimizers:adagrad_step",
        "Rows of a sparse gradient are added to the whole accumulator.",
        "test_optimizers.py",
    ),
    *(
        _row(
            _OPTIMIZER,
            name,
            f"optimizers:{name}",
            "Rows of a sparse gradient are written into each device's part.",
            "test_optimizers.py",
        )
        for name in ("assign", "assign_add", "assign_sub")
    ),
    *_backend(
        "backend_numpy",
        "divide true_divide",
        "optimizers:divide",
        "Rows of a sparse gradient are divided by all of a variable.",
        "test_optimizers.py",
    ),
    *_backend(
        "backend_numpy",
        "einsum add eye repeat",
        "backend_ops",
        "Keras makes it by operations that DTensor cannot divide.",
        "test_layer_calls.py",
    ),
    Patch(
        GROUP,
        "_keras_private:backend",
        "rnn",
        "layout.tf_ops.recurrent:rnn",
        "A loop over time ends the process in DTensor's compiler.",
        KERAS,
        _TESTS + "test_layers.py",
    ),
    _row(
        "_keras_private:CompileMetrics",
        "update_state",
        "metrics:update_state",
        "Metrics count the samples of one device only.",
        "test_metrics.py",
    ),
    *_backend(
        "backend_numpy",
        "flip diag",
        "metrics",
        "DTensor lacks the operation.",
        "test_metrics.py",
    ),
    *_backend(
        "backend_core",
        "scatter",
        "metrics",
        "Positions in the whole are taken for positions in a part.",
        "test_metrics.py",
    ),
    *_backend(
        "backend_nn",
        "ctc_loss one_hot",
        "metrics",
        "DTensor divides the classes of a sample.",
        "test_metrics.py",
    ),
]
