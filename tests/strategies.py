"""Strategies on logical CPUs, for tests that need more than one device.

Importing this module splits the CPU, which TensorFlow allows only before its
first op. Test modules must import this module at the top, so that the CPU is
split during collection.
"""

import tensorflow as tf

NUM_DEVICES = 8

_CPU = tf.config.list_physical_devices("CPU")[0]
if not tf.config.get_logical_device_configuration(_CPU):
    tf.config.set_logical_device_configuration(
        _CPU, [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    )


def mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """Returns a MirroredStrategy, or the default strategy for one replica."""
    if num_replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
