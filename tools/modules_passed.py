"""Counts the modules of the package that common calls pass through.

    python -m tools.modules_passed

A module counts if a function of it is called. Fewer modules on a route mean
fewer files to open for a reader who follows it.
"""

import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

PACKAGE = str(pathlib.Path(tlm.__file__).parent)


def modules_of(function: Callable[[], Any]) -> list[str]:
    """Returns the modules whose functions a call passes, in their order."""
    found: dict[str, None] = {}

    def enter(frame, event, _):
        file = frame.f_code.co_filename
        if (
            event == "call"
            and file.startswith(PACKAGE)
            and frame.f_code.co_name != "<module>"
        ):
            found[file[len(PACKAGE) + 1 :]] = None

    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(None)
    return list(found)


def routes() -> dict[str, Callable[[], Any]]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    mesh = tlm.distribution.DeviceMesh(
        (1, 2), ["batch", "model"], ["cpu:0", "cpu:1"]
    )
    layout_map = tlm.distribution.LayoutMap(mesh)
    layout_map["first.kernel"] = (None, "model")
    models: list[keras.Model] = []
    x, y = np.ones([8, 4], np.float32), np.ones([8, 1], np.float32)

    def build():
        with tlm.layout_map_scope(layout_map):
            models.append(
                keras.Sequential(
                    [
                        keras.Input([4]),
                        keras.layers.Dense(4, name="first"),
                        keras.layers.Dense(1, name="second"),
                    ]
                )
            )

    def fit():
        models[0].compile("sgd", "mse")
        models[0].fit(x, y, batch_size=4, verbose=0)

    config = tf.tpu.experimental.embedding
    table = config.TableConfig(16, 4, name="words")
    embedding = tlm.TPUEmbedding(
        {"word": config.FeatureConfig(table)}, config.SGD(0.1)
    )
    embedding.build()
    ids = {"word": tf.constant([1, 2, 3], tf.int64)}
    embedding.enqueue(ids)
    embedding.dequeue()
    embedding.apply_gradients({"word": tf.ones([3, 4])})
    rows = tlm.ShardedVariable.create(tf.ones([8, 2]), num_shards=2)
    words = keras.Sequential(
        [
            keras.Input([2], dtype="int64"),
            tlm.layers.ShardedEmbedding(16, 4, optimizer="adagrad"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    words.compile("sgd", "mse")
    folder = tempfile.mkdtemp()
    tf.gather(rows, [1])
    return {
        "build a model under layout_map_scope": build,
        "its first fit": fit,
        "TPUEmbedding.enqueue": lambda: embedding.enqueue(ids),
        "tlm.export": lambda: tlm.export(embedding, f"{folder}/model"),
        "fit with a ShardedEmbedding": lambda: words.fit(
            np.ones([8, 2], np.int64), y, verbose=0
        ),
        "tf.gather of a ShardedVariable": lambda: tf.gather(rows, [1, 2]),
    }


def main() -> None:
    for name, call in routes().items():
        passed = modules_of(call)
        print(f"{len(passed):3}  {name}")
        if "--list" in sys.argv:
            print("     " + "\n     ".join(passed))


if __name__ == "__main__":
    main()
