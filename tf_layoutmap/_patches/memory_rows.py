"""What TensorFlow never frees, replaced where large variables are made."""

from tf_layoutmap._patches.rows import TENSORFLOW, Patch

GROUP = "memory"

ROWS = [
    Patch(
        GROUP,
        "_tf_private:custom_gradient",
        "_graph_mode_decorator",
        "_patches.freed_gradients:record",
        "A model that `fit` has trained is never freed, nor its variables.",
        TENSORFLOW,
        "tests/freed/test_gradients.py",
    ),
]
