"""Replaced names of tf_keras, for parameter servers."""

from tf_layoutmap._core.patch_entry import TF_KERAS, Patch
from tf_layoutmap.ps import fit_tf_keras

GROUP = "tf_keras_ps"
_EARLY_EPOCH_END = "tf_keras ends an epoch when one worker's dataset ends."

PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            GROUP,
            "tf_keras:Model",
            verb,
            ours,
            _EARLY_EPOCH_END,
            TF_KERAS,
            "tests/ps/fit/test_fit.py",
        )
        for verb, ours in (
            ("fit", fit_tf_keras.fit),
            ("evaluate", fit_tf_keras.evaluate),
            ("predict", fit_tf_keras.predict),
        )
    ),
)
