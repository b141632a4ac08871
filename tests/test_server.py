"""Tests the arguments of the server, and a small cluster on this machine."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tf_layoutmap import server
from tf_layoutmap.local_cluster import free_ports

CLUSTER = json.dumps({"ps": ["a:1", "b:1"], "worker": ["c:1"]})
TF_CONFIG = json.dumps(
    {"cluster": {"ps": ["a:1", "b:1"]}, "task": {"type": "ps", "index": 1}}
)


def test_tf_config_provides_missing_arguments():
    jobs = {"ps": ["a:1", "b:1"]}
    assert server.read_task(None, None, None, TF_CONFIG) == (jobs, "ps", 1)
    assert server.read_task(None, None, 0, TF_CONFIG) == (jobs, "ps", 0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((None, "ps", 0, None), "--cluster` .* must be {job"),
        (("{", "ps", 0, None), "`cluster` must be JSON"),
        (("[]", "ps", 0, None), "must be a JSON object"),
        (('{"ps": "a:1"}', "ps", 0, None), "must be {job"),
        ((CLUSTER, None, 0, None), r"one of \['ps', 'worker'\]"),
        ((CLUSTER, "chief", 0, None), "Received: 'chief'"),
        ((CLUSTER, "ps", 2, None), "from 0 to 1 for job 'ps'. Received: 2"),
        ((CLUSTER, "ps", None, None), "--task_index"),
        ((None, None, None, "nonsense"), "`TF_CONFIG` must be JSON"),
    ],
)
def test_an_invalid_task_raises(arguments, words):
    with pytest.raises(ValueError, match=words):
        server.read_task(*arguments)


def test_threads_without_work_sleep():
    config = server.session_config(8)
    assert config.inter_op_parallelism_threads == 8
    assert config.experimental.disable_thread_spinning


# Program of the chief, which schedules a step on the worker, and then reads and
# writes variables itself.
CHIEF = textwrap.dedent("""
    import json, os, sys
    import numpy as np
    import tensorflow as tf
    import tf_layoutmap as tlm

    cluster = json.loads(sys.argv[1])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(
        resolver,
        variable_partitioner=tlm.partitioners.FixedShardsPartitioner(4))
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    start = np.arange(20, dtype=np.float32).reshape(10, 2)
    with strategy.scope():
        theirs = tf.Variable(lambda: tf.constant(start), shape=[10, 2],
                             dtype=tf.float32, name="table")
    table = tlm.ShardedVariable.from_tf(theirs)
    servers = sorted({device.split("/device")[0] for device in table.devices})
    assert servers == ["/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1"]

    @tf.function
    def step():
        def replica():
            ids = tf.constant([9, 0, 4, 9])
            with tf.GradientTape() as tape:
                rows = tf.gather(table, ids)
                loss = tf.reduce_sum(rows)
            gradient = tape.gradient(loss, table)
            before = tf.identity(rows)
            with tf.control_dependencies([before]):
                table.scatter_add(gradient)
            return before, tf.nn.embedding_lookup(table, ids)
        return strategy.run(replica)

    before, after = coordinator.fetch(coordinator.schedule(step))
    coordinator.join()
    ids = [9, 0, 4, 9]
    wanted = start.copy()
    np.add.at(wanted, ids, 1)
    np.testing.assert_array_equal(before, start[ids])
    np.testing.assert_array_equal(after, wanted[ids])
    np.testing.assert_array_equal(table.numpy(), wanted)
    np.testing.assert_array_equal(table[2:9:3], wanted[2:9:3])
    path = tf.train.Checkpoint(table=table).write(sys.argv[2])
    table.assign(tf.zeros([10, 2]))
    tf.train.Checkpoint(table=table).read(path).assert_consumed()
    np.testing.assert_array_equal(table.numpy(), wanted)
    np.testing.assert_array_equal(
        tf.train.load_variable(path, "table/.ATTRIBUTES/VARIABLE_VALUE"),
        wanted)
    print("as expected", flush=True)
    os._exit(0)  # Coordinators do not end while their workers live.
""")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_table_lives_on_two_parameter_servers(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    cluster = json.dumps(
        {"ps": addresses[:2], "worker": addresses[2:3], "chief": addresses[3:]}
    )
    environment = dict(
        os.environ,
        GRPC_FAIL_FAST="use_caller",
        CUDA_VISIBLE_DEVICES="",
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    servers = []
    try:
        for job, index in (("ps", 0), ("ps", 1), ("worker", 0)):
            servers.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tf_layoutmap.server",
                        f"--cluster={cluster}",
                        f"--job_name={job}",
                        f"--task_index={index}",
                    ],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=environment,
                )
            )
        for process in servers:
            assert "serves grpc://" in process.stdout.readline()
        chief = subprocess.run(
            [sys.executable, "-c", CHIEF, cluster, str(tmp_path / "c")],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert "as expected" in chief.stdout, chief.stderr[-3000:]
    finally:
        for process in servers:
            process.kill()
            process.wait()
            process.stdout.close()
