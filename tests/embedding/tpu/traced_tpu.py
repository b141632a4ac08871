"""Creates a TPUStrategy without a TPU. Programs can be traced, but not run.

The strategy is a `TPUStrategy` of TensorFlow. Its resolver reports cores that
do not exist. The functions that would contact the TPU are replaced, in
TensorFlow's `TPUEmbedding` and in tf_layoutmap: the check whether the TPU is
initialized, its initialization, and the transfer of tables. Hosts are the
logical CPUs of `tests.strategies`.
"""

import contextlib
import types
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.distribute import device_util
from tensorflow.python.tpu import (
    tpu,
    tpu_embedding_v2,
    tpu_system_metadata,
)
from tensorflow.python.tpu.ops import tpu_ops

from tests import strategies  # noqa: F401
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.tpu import ops, tables
from tf_layoutmap.emulation import tpu_answers

_DEVICE = "/job:localhost/replica:0/task:{}/device:TPU:{}"


# Numbers of `TPUHardwareFeature.EmbeddingFeature`.
UNSUPPORTED, V1, V2 = range(3)


def strategy_of(
    num_cores=1,
    num_hosts=1,
    num_cores_per_replica=None,
    embedding=V1,
    sparse_cores=0,
):
    """Returns a TPUStrategy of `num_cores` cores on `num_hosts` hosts.

    Args:
      num_cores: Number of all cores.
      num_hosts: Number of hosts.
      num_cores_per_replica: Number of cores of a replica, or None.
      embedding: Kind of the embedding engine that the TPU reports.
      sparse_cores: Number of SparseCores per chip that the TPU reports.
    """
    cores_per_host = num_cores // num_hosts
    devices = [
        session._DeviceAttributes(_DEVICE.format(host, core), "TPU", 1, 0)
        for host in range(num_hosts)
        for core in range(cores_per_host)
    ]
    resolver = types.SimpleNamespace(
        get_tpu_system_metadata=lambda: tpu_system_metadata.TPUSystemMetadata(
            num_cores, num_hosts, cores_per_host, None, devices
        ),
        cluster_spec=lambda: tf.train.ClusterSpec({}),
        tpu_hardware_feature=types.SimpleNamespace(
            embedding_feature=embedding,
            num_embedding_devices_per_chip=sparse_cores,
        ),
    )
    return tf.distribute.TPUStrategy(
        resolver, _assignment(num_cores, num_hosts, num_cores_per_replica)
    )


def _assignment(num_cores, num_hosts, num_cores_per_replica):
    if num_cores_per_replica is None:
        return None
    cores_per_host = num_cores // num_hosts
    # The coordinates of a chip are its index on its host and the index of the
    # host.
    coordinates = np.array(
        [
            [[core, host, 0, 0] for core in range(cores_per_host)]
            for host in range(num_hosts)
        ]
    )
    topology = tf.tpu.experimental.Topology(
        mesh_shape=[cores_per_host, num_hosts, 1, 1],
        device_coordinates=coordinates,
    )
    return tf.tpu.experimental.DeviceAssignment(
        topology, coordinates.reshape(-1, num_cores_per_replica, 4)
    )


def variables_on_cpus(next_creator, **keywords):
    """Creates each shard of a table on the logical CPU of its replica."""
    del next_creator
    replica = int(keywords["name"].rpartition("/")[2])
    with tf.device(f"/job:localhost/replica:0/task:0/device:CPU:{replica}"):
        return tf_private.ResourceVariable(
            tf.zeros(keywords["shape"]), trainable=False, name=keywords["name"]
        )


@contextlib.contextmanager
def replaced():
    """Replaces, in a `with` block, every function that would contact a TPU."""

    def nothing(*arguments, **keywords):
        del arguments, keywords

    def host_of(device, device_index=0):
        del device_index
        # The program has one process, in which CPU `n` stands for host `n`.
        task = tf.DeviceSpec.from_string(device).task or 0
        return f"/job:localhost/replica:0/task:0/device:CPU:{task}"

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (device_util, "get_host_for_device", host_of),
            (tpu_ops, "is_tpu_embedding_initialized", lambda: False),
            (tpu, "initialize_system_for_tpu_embedding", nothing),
            (tpu_embedding_v2, "_load_variables_impl", nothing),
            (ops, "is_initialized", lambda: False),
            (ops, "configure", nothing),
            (tables.TableSync, "load", nothing),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(tpu_answers.enum_patch_installed())
        yield
