"""Replaced names of TensorFlow and Keras 3, for parameter servers."""

from tf_layoutmap._core.patch_entry import KERAS, TENSORFLOW, Patch, unwrapped
from tf_layoutmap.ps import (
    exits,
    fit_accumulation,
    fit_keras3,
    keras3_variables,
    lost_calls,
)

KERAS3_PS_GROUP = "keras3_ps"
EXIT_GROUP = "ps_exit"
CALLS_GROUP = "ps_calls"
_LOST_COUNTS = (
    "Keras 3 reads and writes a count in two operations. An increment by "
    "another worker between these operations is lost."
)

PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            KERAS3_PS_GROUP,
            "_core.keras_private:TensorFlowTrainer",
            verb,
            ours,
            "Keras 3 raises an error under a ParameterServerStrategy.",
            KERAS,
            "tests/ps/fit/test_fit.py",
        )
        for verb, ours in (
            ("fit", fit_keras3.fit),
            ("evaluate", fit_keras3.evaluate),
            ("predict", fit_keras3.predict),
        )
    ),
    Patch(
        KERAS3_PS_GROUP,
        "keras:Model",
        "save_weights",
        fit_keras3.save_weights,
        "If a server fails while a backup is written, an incomplete file "
        "replaces the previous backup.",
        KERAS,
        "tests/ps/fit/test_fit.py",
    ),
    *(
        Patch(
            KERAS3_PS_GROUP,
            "keras:Variable",
            verb,
            ours,
            _LOST_COUNTS,
            KERAS,
            "tests/ps/test_keras3_counts.py",
        )
        for verb, ours in (
            ("assign", keras3_variables.assign),
            ("assign_add", keras3_variables.assign_add),
            ("assign_sub", keras3_variables.assign_sub),
        )
    ),
    Patch(
        KERAS3_PS_GROUP,
        "_core.keras_private:BaseOptimizer",
        "_backend_apply_gradients",
        fit_accumulation.apply_gradients,
        "Keras 3 accumulates gradients in a `tf.cond`, in which TensorFlow "
        "does not update variables on parameter servers.",
        KERAS,
        "tests/ps/fit/test_fit.py",
    ),
    *(
        Patch(
            EXIT_GROUP,
            owner,
            name,
            exits.remove,
            "A destructor waits for all servers and workers without a "
            "timeout, so the process cannot end if one of them has stopped "
            "responding.",
            TENSORFLOW,
            "tests/ps/test_faults.py",
        )
        for owner, name in [
            ("_core.tf_private:EagerContext", "remove_function"),
            ("_core.tf_private:EagerResourceDeleter", "__del__"),
            ("_core.tf_private:CapturableResource", "__del__"),
        ]
    ),
    *(
        Patch(
            CALLS_GROUP,
            f"_core.tf_private:{owner}",
            name,
            ours,
            "If a server or worker is lost, the error of a call often does not "
            "name the process.",
            TENSORFLOW,
            "tests/ps/guard/test_lost_calls.py",
            make=make,
        )
        for owner, name, ours, make in [
            (
                "eager_core",
                "_status_to_exception",
                lost_calls.status_to_exception,
                None,
            ),
            *(
                ("pywrap_tfe", name, lost_calls.call, unwrapped)
                for name in (
                    "TFE_Py_FastPathExecute",
                    "TFE_Py_Execute",
                    "TFE_Py_ExecuteCancelable",
                )
            ),
            ("EagerContext", "sync_executors", lost_calls.call, None),
            ("constant_op", "convert_to_eager_tensor", lost_calls.call, None),
        ]
    ),
)
