"""Warning about a distribution of Keras that has no effect.

`keras.distribution` shards nothing on TensorFlow before the program calls
`tlm.distribution.enable`. Importing this package must neither import Keras nor
replace its functions, so no function of this package runs when a program sets a
distribution. Python's garbage collector therefore calls `_check`, many times
while a model is created.
"""

import gc
import sys
from typing import Any

from tf_layoutmap._core import user_warnings

# The attribute that marks distributions that have an effect on TensorFlow.
EFFECTIVE = "_context_if_set_in_keras"


_warned = False


def start() -> None:
    """Starts watching the current distribution, until the first warning."""
    if not _warned and _check not in gc.callbacks:
        gc.callbacks.append(_check)


def stop() -> None:
    """Stops watching the current distribution."""
    if _check in gc.callbacks:
        gc.callbacks.remove(_check)


def _check(phase: str, info: dict[str, int]) -> None:
    global _warned
    del info
    # At the end of the process, `sys.modules` is None.
    keras: Any = (sys.modules or {}).get("keras")
    # These names are missing while Keras is being imported.
    api = getattr(keras, "distribution", None)
    current = getattr(api, "distribution", None)
    if phase != "stop" or current is None:
        return
    value: object = current()
    if value is None or hasattr(type(value), EFFECTIVE):
        return
    stop()
    _warned = True
    if keras.backend.backend() == "tensorflow":
        user_warnings.warn(
            "On the TensorFlow backend, keras.distribution shards nothing "
            "before `tf_layoutmap.distribution.enable()`. Received: "
            f"{type(value).__name__} as the current distribution. Call "
            "`tf_layoutmap.distribution.enable()` before the model is created.",
        )
