"""Runs all programs, with or without the patches of `tf_layoutmap`.

    python -m tests.stock.run plain
    python -m tests.stock.run patched [names of programs]

Prints a line with the name and the outcome of each program. For `plain`, the
caller must set the environment variables in
`tf_layoutmap.layout.dtensor_switches.SAFE`. For `patched`, importing
`tf_layoutmap` sets the variables.
"""

import json
import sys
import warnings

import tensorflow as tf


def use_everything():
    """Trains models on a mesh, reads tables and installs all patches."""
    import keras
    import numpy as np
    import tf_keras

    import tf_layoutmap as tlm
    from tf_layoutmap._core import patches

    dtensor = tf.experimental.dtensor
    # This mesh has other axes than the meshes of the programs.
    mesh = dtensor.create_mesh([("model", 2)], devices=["CPU:0", "CPU:1"])
    for package in (keras, tf_keras):
        layout_map = tlm.LayoutMap(mesh=mesh)
        layout_map[".*kernel"] = dtensor.Layout(
            [dtensor.UNSHARDED, "model"], mesh
        )
        with tlm.layout_map_scope(layout_map):
            model = package.Sequential(
                [package.Input((4,)), package.layers.Dense(2)]
            )
        model.compile("sgd", "mse")
        model.fit(np.ones([4, 4]), np.ones([4, 2]), verbose=0)
    rows = tlm.ShardedVariable.create(tf.ones([4, 2]), num_shards=2)
    tf.function(lambda: tf.nn.embedding_lookup(rows, [1, 3]))()
    for group in patches.GROUPS:
        # The patches of this group are installed only while an emulated TPU
        # exists.
        if group != "emulation":
            patches.ensure(group)


def main():
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    kind, *names = sys.argv[1:]
    if kind == "patched":
        use_everything()
    from tests.stock import (  # noqa: F401 - the imports register programs.
        in_graphs,
        of_keras,
        of_operations,
        of_strategies,
        on_a_mesh,
        outcome,
    )

    for name, function in outcome.PROGRAMS.items():
        if names and name not in names:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = outcome.outcome_of(function)
        warnings_of_package = [
            str(one.message)
            for one in caught
            if "tf_layoutmap" in one.category.__module__
        ]
        print(
            "FOUND", json.dumps([name, found, warnings_of_package]), flush=True
        )
    if kind == "plain":
        assert "tf_layoutmap" not in sys.modules


if __name__ == "__main__":
    main()
