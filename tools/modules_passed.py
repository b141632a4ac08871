"""Counts the modules of the package whose functions run in common calls.

    python tools/modules_passed.py

The fewer modules a call uses, the fewer files a developer has to open to
understand the call. A module is counted if one of its functions is called. All
modules are imported first, because imports also call functions. Each call runs
in a separate process, because the mesh of one call would add modules to later
calls.
"""

import importlib
import importlib.machinery
import os
import pathlib
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Python adds only the folder of this file to its search path.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

PACKAGE = str(pathlib.Path(tlm.__file__).parent)


def import_all_modules() -> None:
    """Imports all Python modules of the package except programs."""
    for module in pkgutil.walk_packages(tlm.__path__, "tf_layoutmap."):
        loader = module.module_finder.find_spec(module.name, None).loader
        if not module.name.endswith("__main__") and isinstance(
            loader, importlib.machinery.SourceFileLoader
        ):
            importlib.import_module(module.name)


def modules_of(function: Callable[[], Any]) -> list[str]:
    """Returns the modules whose functions run in a call, by first use."""
    modules: dict[str, None] = {}

    def enter(frame, event, _):
        file = frame.f_code.co_filename
        if (
            event == "call"
            and file.startswith(PACKAGE)
            and frame.f_code.co_name != "<module>"
        ):
            modules[file[len(PACKAGE) + 1 :]] = None

    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(None)
    return list(modules)


X = np.ones([8, 4], np.float32)
Y = np.ones([8, 1], np.float32)


def layout_map() -> tlm.distribution.LayoutMap:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    mesh = tlm.distribution.DeviceMesh(
        (1, 2), ["batch", "model"], ["cpu:0", "cpu:1"]
    )
    mapping = tlm.distribution.LayoutMap(mesh)
    mapping["first.kernel"] = (None, "model")
    return mapping


def two_layers(layouts: tlm.distribution.LayoutMap) -> keras.Model:
    with tlm.layout_map_scope(layouts):
        return keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Dense(4, name="first"),
                keras.layers.Dense(1, name="second"),
            ]
        )


def fit(model: keras.Model, x: Any = X) -> None:
    model.compile("sgd", "mse")
    model.fit(x, Y, batch_size=4, verbose=0)


# A NumPy array is used because creating a tensor would initialize TensorFlow's
# devices.
IDS = {"word": np.array([1, 2, 3], np.int64)}


def embedding() -> tlm.TPUEmbedding:
    config = tf.tpu.experimental.embedding
    table = config.TableConfig(16, 4, name="words")
    made = tlm.TPUEmbedding(
        {"word": config.FeatureConfig(table)}, config.SGD(0.1)
    )
    made.build()
    made.enqueue(IDS)
    made.dequeue()
    made.apply_gradients({"word": tf.ones([3, 4])})
    return made


def build_route() -> Callable[[], Any]:
    layouts = layout_map()
    return lambda: two_layers(layouts)


def fit_route() -> Callable[[], Any]:
    model = two_layers(layout_map())
    return lambda: fit(model)


def enqueue_route() -> Callable[[], Any]:
    made = embedding()
    return lambda: made.enqueue(IDS)


def export_route() -> Callable[[], Any]:
    made, folder = embedding(), tempfile.mkdtemp()
    return lambda: tlm.export(made, f"{folder}/model")


def layer_route() -> Callable[[], Any]:
    model = keras.Sequential(
        [
            keras.Input([2], dtype="int64"),
            tlm.layers.ShardedEmbedding(16, 4, optimizer="adagrad"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    return lambda: fit(model, np.ones([8, 2], np.int64))


def gather_route() -> Callable[[], Any]:
    rows = tlm.ShardedVariable.create(tf.ones([8, 2]), num_shards=2)
    tf.gather(rows, [1])
    return lambda: tf.gather(rows, [1, 2])


ROUTES = {
    "build a model under layout_map_scope": build_route,
    "its first fit": fit_route,
    "TPUEmbedding.enqueue": enqueue_route,
    "tlm.export": export_route,
    "fit with a ShardedEmbedding": layer_route,
    "tf.gather of a ShardedVariable": gather_route,
}


def main() -> None:
    options = [option for option in sys.argv[1:] if option == "--list"]
    names = [name for name in sys.argv[1:] if name in ROUTES]
    if not names:
        for name in ROUTES:
            subprocess.run(
                [sys.executable, "-m", "tools.modules_passed", *options, name],
                check=True,
            )
        return
    for name in names:
        route = ROUTES[name]()
        import_all_modules()
        passed = modules_of(route)
        print(f"{len(passed):3}  {name}")
        if options:
            print("     " + "\n     ".join(passed))


if __name__ == "__main__":
    main()
