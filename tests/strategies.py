"""Strategies on logical CPUs, for the tests that need more than one device.

Importing it splits the CPU, which TensorFlow allows only before its first op:
import it at the head of a test module, so that collecting the tests does it.
"""

import tensorflow as tf

NUM_DEVICES = 8

_CPU = tf.config.list_physical_devices("CPU")[0]
if not tf.config.get_logical_device_configuration(_CPU):
    tf.config.set_logical_device_configuration(
        _CPU, [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    )


def mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """A MirroredStrategy of `num_replicas`; the default strategy for 1."""
    if num_replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
