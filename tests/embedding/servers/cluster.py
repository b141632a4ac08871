"""A cluster whose servers and worker are threads of this process."""

import os

# With this setting, the worker waits for servers that start later.
os.environ["GRPC_FAIL_FAST"] = "use_caller"

import tensorflow as tf

from tf_layoutmap.local_cluster import free_ports


def start(num_servers: int, num_workers: int = 1):
    """Returns the servers and the strategy; callers must keep the servers."""
    ports = [
        f"localhost:{port}"
        for port in free_ports(num_servers + num_workers + 1)
    ]
    spec = tf.train.ClusterSpec(
        {
            "ps": ports[:num_servers],
            "worker": ports[num_servers:-1],
            "chief": ports[-1:],
        }
    )
    servers = [
        tf.distribute.Server(spec, job_name=job, task_index=index)
        for job, count in [("ps", num_servers), ("worker", num_workers)]
        for index in range(count)
    ]
    return servers, tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, rpc_layer="grpc"
        )
    )
