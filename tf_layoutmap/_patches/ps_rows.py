"""Names of TensorFlow and both Keras, replaced for parameter servers."""

from tf_layoutmap._patches.rows import KERAS, TENSORFLOW, TF_KERAS, Patch

KERAS3_GROUP = "keras3_ps"
TF_KERAS_GROUP = "tf_keras_ps"
# Installed once a process of the cluster does not answer.
EXIT_GROUP = "ps_exit"

_VERBS = ("fit", "evaluate", "predict")

ROWS = [
    *(
        Patch(
            KERAS3_GROUP,
            "_keras_private:TensorFlowTrainer",
            verb,
            f"ps.fit.keras3:{verb}",
            "Keras 3 refuses a ParameterServerStrategy.",
            KERAS,
            "tests/ps/fit/test_fit.py",
        )
        for verb in _VERBS
    ),
    Patch(
        KERAS3_GROUP,
        "keras:Model",
        "save_weights",
        "ps.fit.keras3:save_weights",
        "A server that is lost meanwhile leaves half a file, in place of the "
        "backup that was to be gone on from.",
        KERAS,
        "tests/ps/fit/test_fit.py",
    ),
    *(
        Patch(
            KERAS3_GROUP,
            "keras:Variable",
            verb,
            f"ps.keras3_counts:{verb}",
            "Keras 3 reads, then writes: what another worker adds to a count "
            "meanwhile is lost.",
            KERAS,
            "tests/ps/test_keras3_counts.py",
        )
        for verb in ("assign_add", "assign_sub")
    ),
    *(
        Patch(
            TF_KERAS_GROUP,
            "tf_keras:Model",
            verb,
            f"ps.fit.tf_keras:{verb}",
            "tf_keras ends an epoch when one worker's dataset ends.",
            TF_KERAS,
            "tests/ps/fit/test_fit.py",
        )
        for verb in _VERBS
    ),
    *(
        Patch(
            EXIT_GROUP,
            owner,
            name,
            "ps.exits:remove",
            "A destructor waits for all servers and workers without a "
            "deadline, so that the process does not end while one is stopped.",
            TENSORFLOW,
            "tests/ps/test_faults.py",
        )
        for owner, name in [
            ("_tf_private:EagerContext", "remove_function"),
            ("_tf_private:EagerResourceDeleter", "__del__"),
            ("_tf_private:CapturableResource", "__del__"),
        ]
    ),
]
