"""The programs of docs/howto/run_on_a_cluster.md run, without a cluster."""

import json
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys

import pytest
import yaml

from tests.processes import ROOT
from tf_layoutmap import server
from tf_layoutmap.ps import connection

PAGE = (ROOT / "docs" / "howto" / "run_on_a_cluster.md").read_text()

# `srun` of this test starts one process per line of `scontrol`.
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames nodes"* ]] || exit 1
printf '127.0.0.1\\n127.0.0.1\\n127.0.0.1\\n'
"""
SRUN = """#!/bin/bash
for i in 0 1 2; do SLURM_PROCID=$i "$@" & done
wait
"""
PROGRAM = """
import tensorflow as tf
import tf_layoutmap as tlm

strategy = tlm.ps.connect(timeout_seconds=100)
with strategy.scope():
    weight = tf.Variable(20.0)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
found = coordinator.schedule(tf.function(lambda: weight + 1.0)).fetch()
print("FOUND", float(found), weight.device, flush=True)
"""


def block(language: str) -> str:
    """Returns the only block of a language on the page."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    return found


def write_command(folder: pathlib.Path, name: str, text: str):
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def free_range(size: int) -> int:
    """Returns the first of `size` consecutive free ports."""
    while True:
        sockets = [socket.socket() for _ in range(size)]
        try:
            sockets[0].bind(("127.0.0.1", 0))
            first = sockets[0].getsockname()[1]
            for i, one in enumerate(sockets[1:], 1):
                one.bind(("127.0.0.1", first + i))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for one in sockets:
                one.close()


@pytest.mark.exhaustive
def test_the_slurm_script_trains(tmp_path):
    """Takes several seconds, because four processes import TensorFlow."""
    commands = tmp_path / "bin"
    commands.mkdir()
    write_command(commands, "scontrol", SCONTROL)
    write_command(commands, "srun", SRUN)
    write_command(
        commands, "python", f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    )
    (tmp_path / "train.py").write_text(PROGRAM)
    script = block("bash")
    assert "\nport=2222\n" in script
    script = script.replace("port=2222", f"port={free_range(4) + 1}")
    nodes = f"nodes{os.getpid()}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{commands}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "SLURM_JOB_NODELIST": nodes,
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            code = process.wait(120)
        finally:
            kill_all(nodes)
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-3000:]
    assert "FOUND 21.0 /job:ps" in text
    for name in ("ps:0", "ps:1", "worker:0"):
        assert f"{name} serves grpc" in text


def kill_all(nodes: str):
    """Kills all processes of the script, as Slurm does."""
    variable = f"SLURM_JOB_NODELIST={nodes}\0".encode()
    for folder in pathlib.Path("/proc").iterdir():
        try:
            if variable in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], dict]:
    """The objects of the page by kind and name."""
    return {
        (one["kind"], one["metadata"]["name"]): one
        for one in yaml.safe_load_all(block("yaml"))
    }


def shown_by(container: dict, cluster: str, hostname: str, tmp_path) -> dict:
    """Runs the command of a container with a `python` that shows its input."""
    write_command(
        tmp_path,
        "python",
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ.get('TF_CONFIG')]))\n",
    )
    arguments, tf_config = json.loads(
        subprocess.run(
            [*container["command"], *container["args"]],
            env={
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "HOSTNAME": hostname,
                "CLUSTER": cluster,
            },
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    return {"arguments": arguments, "tf_config": tf_config}


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["template"]


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_the_pods_of_kubernetes_have_the_addresses_of_the_cluster(
    manifests, tmp_path, job
):
    config = manifests["ConfigMap", "cluster"]["data"]["CLUSTER"]
    cluster = json.loads(config)
    manifest = manifests["StatefulSet", job]
    service = manifests["Service", manifest["spec"]["serviceName"]]
    (port,) = service["spec"]["ports"]
    labels = pod_of(manifest)["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert manifest["spec"]["selector"]["matchLabels"] == labels
    (container,) = pod_of(manifest)["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "cluster"}}]
    addresses = []
    for i in range(manifest["spec"]["replicas"]):
        pod = f"{job}-{i}"
        addresses.append(f"{pod}.{service['metadata']['name']}:{port['port']}")
        arguments = shown_by(container, config, pod, tmp_path)["arguments"]
        module, name, *flags = arguments
        assert (module, name) == ("-m", "tf_layoutmap.server")
        values = dict(one.removeprefix("--").split("=", 1) for one in flags)
        assert server.read_task(
            values["cluster"],
            values["job_name"],
            int(values["task_index"]),
            None,
        ) == (cluster, job, i)
    assert cluster[job] == addresses


def test_the_coordinator_of_kubernetes_knows_the_cluster(manifests, tmp_path):
    config = manifests["ConfigMap", "cluster"]["data"]["CLUSTER"]
    cluster = json.loads(config)
    job = manifests["Job", "train"]
    service = manifests["Service", "train"]
    labels = pod_of(job)["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    (port,) = service["spec"]["ports"]
    assert cluster["chief"] == [f"train:{port['port']}"]
    (container,) = pod_of(job)["spec"]["containers"]
    found = shown_by(container, config, "train-abc", tmp_path)
    assert found["arguments"] == ["train.py"]
    assert connection.read_cluster(found["tf_config"]) == cluster
