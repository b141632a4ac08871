"""Types of TensorFlow that signatures name."""

import tensorflow as tf

Mesh = tf.experimental.dtensor.Mesh
Layout = tf.experimental.dtensor.Layout
