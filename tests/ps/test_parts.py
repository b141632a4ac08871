"""Tests the modules that runs on parameter servers use, without a cluster."""

import contextlib
import errno
import importlib
import json
import logging
import pathlib
import socket
import threading
import time
from concurrent import futures

import grpc
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap import server
from tf_layoutmap.local_cluster import free_ports
from tf_layoutmap.ps import (
    checkpoints,
    connection,
    messages,
    processes,
    restarts,
    waiting,
)

PROCESS = processes.Process("ps", 1, "host:7")
OWN = {"tensorflow": tf.__version__, "tf_layoutmap": tlm.__version__}


@pytest.mark.parametrize(
    "value, seconds",
    [("5min", 300), ("0.5 h", 1800), ("30s", 30), (2, 2), (0.25, 0.25)],
)
def test_durations_are_parsed(value, seconds):
    assert waiting.read_seconds(value, "save_every") == seconds


@pytest.mark.parametrize(
    "value",
    [
        "5",
        "min",
        "-5s",
        "0s",
        0,
        -1,
        float("inf"),
        float("nan"),
        True,
        "5 days",
    ],
)
def test_invalid_durations_raise(value):
    with pytest.raises(ValueError, match="`save_every` must be like"):
        waiting.read_seconds(value, "save_every")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "nonsense",
        "[]",
        "{}",
        json.dumps({"cluster": {"ps": ["a:1"]}}),
        json.dumps({"cluster": {"ps": [], "worker": ["a:1"]}}),
        json.dumps({"cluster": {"ps": ["a"], "worker": ["b:1"]}}),
        json.dumps({"cluster": {"ps": [7], "worker": ["b:1"]}}),
    ],
)
def test_a_cluster_without_servers_or_workers_raises(text):
    with pytest.raises(ValueError, match="TF_CONFIG must have a cluster"):
        connection.read_cluster(text)


@pytest.mark.parametrize(
    "jobs, words",
    [
        ({"ps": ["a:0"]}, "port from 1 to 65535. Received: 'a:0' of 'ps'"),
        ({"ps": ["a:99999"]}, "Received: 'a:99999'"),
        ({"ps": [":7"]}, "Received: ':7'"),
        ({"ps": ["a"]}, "Received: 'a'"),
        ({"ps": ["a:-1"]}, "Received: 'a:-1'"),
        ({"ps": ["a:\u0661"]}, "Each address"),
        ({"ps": [None]}, "Received: None"),
        (
            {"ps": ["a:1", "A:1"]},
            "different address.*'A:1' of 'ps' and of 'ps'",
        ),
        ({"ps": ["a:1"], "chief": ["a:1"]}, "'a:1' of 'ps' and of 'chief'"),
        ({"worker": {"0": "a:1"}}, "a list of addresses.*of 'worker'"),
        ({"ps": "a:1"}, "a list of addresses"),
        (["a:1"], "A cluster must be"),
    ],
)
def test_a_malformed_address_raises_at_once(jobs, words):
    if isinstance(jobs, dict):
        jobs = {"ps": ["s:1"], "worker": ["w:1"], **jobs}
    with pytest.raises(ValueError, match=words):
        connection.read_cluster(json.dumps({"cluster": jobs}))
    with pytest.raises(ValueError, match=words):
        server.read_task(None, "ps", 0, json.dumps({"cluster": jobs}))


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_the_task_of_another_process_raises(job, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                "cluster": {"ps": ["a:1"], "worker": ["b:1"]},
                "task": {"type": job, "index": 0},
            }
        ),
    )
    with pytest.raises(ValueError, match="must be called by the coordinator"):
        tlm.ps.connect(timeout_seconds=60)


def test_the_task_of_a_chief_may_be_missing():
    jobs = {"ps": ["[::1]:1"], "worker": ["b:1"]}
    for task in ({}, {"task": {"type": "chief", "index": 0}}):
        assert (
            connection.read_cluster(json.dumps({"cluster": jobs, **task}))
            == jobs
        )


def resolver(jobs: dict, **options):
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), **options
    )


def test_a_resolver_provides_the_addresses():
    jobs = {"ps": ["s:1"], "worker": ["w:1", "w:2"], "chief": ["c:1"]}
    for options in ({}, {"task_type": "chief", "task_id": 0}):
        assert connection.resolve_cluster(resolver(jobs, **options)) == jobs


@pytest.mark.parametrize(
    "jobs, options, words",
    [
        ({"worker": ["w:1"]}, {}, r"Missing: \['ps'\].*SimpleClusterResolver"),
        ({"ps": ["s:1"], "worker": ["w"]}, {}, "Received: 'w' of 'worker'"),
        (
            {"ps": {3: "s:1"}, "worker": ["w:1"]},
            {},
            "a list of addresses for each job",
        ),
        (
            {"ps": ["s:1"], "worker": ["w:1"]},
            {"task_type": "worker", "task_id": 0},
            r"argument `cluster_resolver` \(SimpleClusterResolver\) has the "
            "type",
        ),
        (
            {"ps": ["s:1"], "worker": ["w:1"]},
            {"rpc_layer": "http"},
            'must use the protocol "grpc"',
        ),
    ],
)
def test_a_resolver_of_an_unusable_cluster_raises(jobs, options, words):
    with pytest.raises(ValueError, match=words):
        connection.resolve_cluster(resolver(jobs, **options))


def test_another_object_than_a_resolver_raises():
    with pytest.raises(TypeError, match="`cluster_resolver` must be a"):
        tlm.ps.connect(cluster_resolver={"ps": ["s:1"]})


def not_found():
    return tf.errors.NotFoundError(None, None, "Op type not registered")


@pytest.mark.parametrize(
    "answer, words",
    [
        (None, "ps 1 at host:7 does not answer within"),
        (not_found(), "lacks the ops of tf_layoutmap .*m tf_layoutmap.server"),
        (
            OSError("no"),
            r"process ps 1 at host:7 are not available \(OSError\)",
        ),
        (
            {**OWN, "tensorflow": "2.9.1"},
            "has TensorFlow 2.9.1 and tf_layoutmap",
        ),
        ({**OWN, "tf_layoutmap": "0.0.1"}, "tf_layoutmap 0.0.1. Start it with"),
        ({}, "has TensorFlow None"),
    ],
)
def test_an_incompatible_process_raises(answer, words):
    with pytest.raises(RuntimeError, match=words):
        connection.check_answers({PROCESS: answer})


def test_another_patch_version_of_tensorflow_is_supported():
    minor = tf.__version__.rpartition(".")[0]
    connection.check_answers({PROCESS: {**OWN, "tensorflow": f"{minor}.99"}})


def test_a_closed_port_is_reported():
    (port,) = free_ports(1)
    process = processes.Process("ps", 0, f"127.0.0.1:{port}")
    assert processes.wait_until_all_serve([process], 0) == [
        f"no connection to {process.name}"
    ]
    assert processes.find_faults([process], 1) == processes.Faults(
        [f"ps 0 at 127.0.0.1:{port} accepts no connections"],
        has_lost_server=True,
    )


@contextlib.contextmanager
def listener(answer: bytes):
    """Yields a port on which connections are accepted and receive `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections = []

        def accept():
            while True:
                try:
                    connections.append(listening.accept()[0])
                    connections[-1].sendall(answer)
                except OSError:
                    return  # The test or the peer closed the connection.

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in connections:
            one.close()


@pytest.mark.parametrize(
    "answer, words",
    [
        (b"", "no answer from {name}, but its port is open"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "{name} is not a TensorFlow server"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "{name} is not a TensorFlow"),
    ],
)
def test_a_port_of_another_program_is_reported_within_the_deadline(
    answer, words
):
    with listener(answer) as port:
        process = processes.Process("ps", 0, f"127.0.0.1:{port}")
        began = time.monotonic()
        (fault,) = processes.wait_until_all_serve([process], 0.5)
        assert words.format(name=process.name) in fault
        # The timeout is 0.5 s, and the bound includes a margin for busy
        # machines.
        assert time.monotonic() - began < 30


def test_another_grpc_server_is_reported():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        process = processes.Process("ps", 0, f"127.0.0.1:{port}")
        assert "ps 0 at" in (
            fault := processes.connection_fault(process, 30) or ""
        )
        assert "is not a TensorFlow server" in fault
    finally:
        server.stop(None).wait()


def test_a_tensorflow_server_is_identified_by_its_task():
    (port,) = free_ports(1)
    address = f"localhost:{port}"
    server = tf.distribute.Server(
        {"ps": [address]}, job_name="ps", task_index=0
    )
    assert (
        processes.connection_fault(processes.Process("ps", 0, address), 30)
        is None
    )
    assert processes.connection_fault(
        processes.Process("ps", 1, address), 30
    ) == (f"ps 1 at {address} has another task in its cluster")
    del server


class Folder:
    """Folder of checkpoints that contain one file each."""

    def __init__(self, path, max_to_keep=2):
        self.path = path
        self.checkpoints = checkpoints.CheckpointFolder(path, max_to_keep)

    def save(self, num_done):
        def write(prefix):
            with open(prefix, "w") as file:
                file.write(str(num_done))

        self.checkpoints.save(num_done, write)

    def names(self):
        return sorted(one.name for one in self.path.iterdir())


def test_the_newest_checkpoints_are_kept(tmp_path):
    folder = Folder(tmp_path / "new")
    assert folder.checkpoints.newest() is None
    for num_done in (8, 9, 10):
        folder.save(num_done)
    assert folder.names() == ["closure-10", "closure-9"]
    prefix, num_done = folder.checkpoints.newest()
    assert num_done == 10
    with open(prefix) as file:
        assert file.read() == "10"


def test_a_failed_checkpoint_leaves_no_files(tmp_path):
    folder = Folder(tmp_path)
    folder.save(1)

    def fail(prefix):
        with open(prefix, "w") as file:
            file.write("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folder.checkpoints.save(2, fail)
    assert folder.names() == ["closure-1"]
    assert folder.checkpoints.newest().num_done == 1


@pytest.mark.parametrize(
    "raised, number",
    [
        (tf.errors.ResourceExhaustedError, errno.ENOSPC),
        (tf.errors.PermissionDeniedError, errno.EACCES),
        (tf.errors.NotFoundError, errno.ENOENT),
        (lambda *args: tf.errors.UnknownError(*args), errno.EIO),
    ],
)
def test_a_write_error_of_a_server_raises_os_error(tmp_path, raised, number):
    folder = Folder(tmp_path)
    folder.save(1)

    def fail(prefix):
        raise raised(None, None, "/d/x; No space left on device [Op:SaveV2]")

    with pytest.raises(OSError, match="No space left on device") as caught:
        folder.checkpoints.save(2, fail)
    assert caught.value.errno == number
    assert "being-written" in caught.value.filename
    assert folder.names() == ["closure-1"]


def test_a_lost_server_does_not_raise_os_error(tmp_path):
    folder = Folder(tmp_path)

    def fail(prefix):
        raise tf.errors.UnavailableError(None, None, "Connection reset")

    with pytest.raises(tf.errors.UnavailableError):
        folder.checkpoints.save(2, fail)
    assert folder.names() == []


def test_an_incomplete_checkpoint_is_never_restored(tmp_path):
    folder = Folder(tmp_path)
    folder.save(1)
    (tmp_path / ".being-written-closure-7").mkdir()
    # A folder of another program has no `run.json`.
    (tmp_path / "closure-8").mkdir()
    again = Folder(tmp_path)
    assert again.checkpoints.newest().num_done == 1
    assert ".being-written-closure-7" not in again.names()


def test_a_checkpoint_of_the_same_closure_is_replaced(tmp_path):
    """Programs may change variables without running closures."""
    folder = Folder(tmp_path)
    folder.save(1)
    for text in ("changed", "again"):
        folder.checkpoints.save(
            2, lambda prefix, text=text: pathlib.Path(prefix).write_text(text)
        )
    assert folder.names() == ["closure-1", "closure-2.1"]
    prefix, num_done = folder.checkpoints.newest()
    assert num_done == 2
    assert pathlib.Path(prefix).read_text() == "again"


def test_a_failed_replacement_keeps_the_previous_checkpoint(tmp_path):
    folder = Folder(tmp_path)
    folder.save(2)

    def fail(prefix):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folder.checkpoints.save(2, fail)
    assert folder.names() == ["closure-2"]
    assert pathlib.Path(folder.checkpoints.newest().prefix).read_text() == "2"


def test_the_newest_checkpoint_of_the_same_closure_is_restored(tmp_path):
    """Simulates a program that was killed before it removed old checkpoints."""
    folder = Folder(tmp_path)
    for name in ("closure-2", "closure-2.9", "closure-2.10", "closure-1.20"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
        (tmp_path / name / "variables").write_text(name)
    prefix, num_done = folder.checkpoints.newest()
    assert num_done == 2
    assert pathlib.Path(prefix).read_text() == "closure-2.10"
    folder.save(3)
    assert folder.names() == ["closure-2.10", "closure-3"]


def test_interrupted_removals_are_completed(tmp_path):
    (tmp_path / ".being-removed-closure-1").mkdir(parents=True)
    assert Folder(tmp_path).names() == []


class TestCheckObjects:
    """Tests restores into objects that differ from the checkpoint."""

    @pytest.fixture
    def prefix(self, tmp_path):
        return tf.train.Checkpoint(
            dense=tf.Variable(5.0),
            pair=[tf.Variable([1.0, 2.0])],
            more={"x": tf.Variable(1)},
        ).write(str(tmp_path / "variables"))

    @staticmethod
    def objects(**changes):
        objects = {
            "dense": tf.Variable(0.0),
            "pair": [tf.Variable([0.0, 0.0])],
            "more": {"x": tf.Variable(0)},
            **changes,
        }
        return tf.train.Checkpoint(
            **{name: one for name, one in objects.items() if one is not None}
        )

    @pytest.mark.parametrize(
        "changes, words",
        [
            (
                {"dense": tf.Variable([1.0, 2.0])},
                r"'dense' has shape \[2\], and \[\] in the checkpoint",
            ),
            (
                {"pair": [tf.Variable(0.0)]},
                r"'pair/0' has shape \[\], and \[2\] in the checkpoint",
            ),
            ({"dense": None}, r"objects lack \['dense'\]"),
            ({"pair": []}, r"objects lack \['pair'\], completely or in part"),
            ({"more": {}}, r"`allow_missing=\['more'\]`"),
            ({"new": tf.Variable(0)}, r"the checkpoint lacks \['new'\]"),
        ],
    )
    def test_differences_raise_with_the_name(self, prefix, changes, words):
        with pytest.raises(ValueError, match=words) as raised:
            checkpoints.check_objects(prefix, self.objects(**changes), False)
        assert repr(prefix) in str(raised.value)

    @pytest.mark.parametrize("allowed", [True, ["more", "dense", "none"]])
    def test_allowed_objects_may_be_missing(self, prefix, allowed):
        checkpoints.check_objects(
            prefix, self.objects(dense=None, more={}), allowed
        )
        with pytest.raises(ValueError, match="has shape"):
            checkpoints.check_objects(
                prefix, self.objects(pair=[tf.Variable(0)]), allowed
            )

    def test_objects_that_are_not_allowed_to_be_missing_raise(self, prefix):
        with pytest.raises(ValueError, match=r"objects lack \['dense'\]"):
            checkpoints.check_objects(
                prefix, self.objects(dense=None, more={}), ["more"]
            )

    @pytest.mark.parametrize("keras_version", ["keras", "tf_keras"])
    def test_objects_may_be_built_later(self, tmp_path, keras_version):
        keras = importlib.import_module(keras_version)

        def make_objects():
            layer = keras.layers.Dense(2)
            return layer, keras.optimizers.Adam(0.5)

        layer, optimizer = make_objects()
        layer.build([None, 3])
        optimizer.build(layer.trainable_variables)
        prefix = tf.train.Checkpoint(layer=layer, optimizer=optimizer).write(
            str(tmp_path / "variables")
        )
        for build in (False, True):
            layer, optimizer = make_objects()
            if build:
                layer.build([None, 3])
                optimizer.build(layer.trainable_variables)
            checkpoints.check_objects(
                prefix,
                tf.train.Checkpoint(layer=layer, optimizer=optimizer),
                False,
            )


def test_call_with_deadline_returns_and_raises_like_the_call():
    assert waiting.call_with_deadline(lambda: 3, 5) == 3
    with pytest.raises(KeyError):
        waiting.call_with_deadline(lambda: {}["a"], 5)


def test_call_with_deadline_raises_at_the_deadline():
    never = threading.Event()
    with pytest.raises(waiting.LateError):
        waiting.call_with_deadline(never.wait, 0.1)
    never.set()


def test_watched_closures_extend_the_deadline(monkeypatch):
    monkeypatch.setattr(
        "tf_layoutmap._core.tf_private.wait_for_closure", time.sleep
    )
    watched = [0.2] * 5
    assert (
        waiting.call_with_deadline(lambda: time.sleep(0.8) or 7, 0.5, watched)
        == 7
    )


def test_restarts_without_progress_are_limited():
    environment = {}
    assert [restarts.may_restart(0, environment) for _ in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert restarts.may_restart(7, environment)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (
            {"strategy": tf.distribute.get_strategy()},
            TypeError,
            "`strategy` must be the result of `tlm.ps.connect`",
        ),
        ({"strategy": None}, TypeError, "`strategy` must be"),
    ],
)
def test_a_run_requires_a_strategy_of_connect(changes, error, words, tmp_path):
    with pytest.raises(error, match=words):
        tlm.ps.Run(
            **{
                "step_fn": len,
                "dataset_fn": len,
                "checkpoint_dir": tmp_path,
                "objects": {},
                **changes,
            }
        )


BAD_ID = "Feature 'a', sample 0: id 9 is outside table 'a' with 8 rows"
# Message of an error that both a server and a worker reported.
LONG = f"""Graph execution error:

2 root error(s) found.
  (0) INVALID_ARGUMENT:   {BAD_ID}
\t [[{{{{node LayoutMap>PlanStep}}}}]]
Additional GRPC error information from remote target /job:worker/replica:0/\
task:0 while calling /tensorflow.WorkerService/RecvTensor:
:UNKNOWN:Error received from peer  {{grpc_status:3, grpc_message:"{BAD_ID}"}}
\t [[LayoutMap>FoldGradients/_12]]
  (1) INVALID_ARGUMENT:  {BAD_ID}
0 successful operations.
1 derived errors ignored. [Op:__inference_closure_165]"""


@pytest.fixture
def without_level(monkeypatch):
    """Removes TensorFlow's log level from the environment."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)


@pytest.mark.parametrize(
    "message, sentence",
    [
        (LONG, BAD_ID),
        (BAD_ID, BAD_ID),
        (f"{BAD_ID} [Op:IteratorGetNext] name: ", BAD_ID),
        (f"Graph execution error:\n\n{BAD_ID}\n\t [[{{node A}}]]", BAD_ID),
        ("two\nlines [Op:A]", "two lines"),
        (
            "CANCELLED\nAdditional GRPC error information from x:\n:UNKNOWN:no",
            "CANCELLED",
        ),
        # A message that contains no reason is not changed.
        ("Graph execution error:", "Graph execution error:"),
        ("", ""),
    ],
)
def test_sentence_of_removes_the_surrounding_text(message, sentence):
    assert messages.sentence_of(message) == sentence


@pytest.mark.usefixtures("without_level")
def test_a_shortened_error_keeps_its_class():
    error = tf.errors.InvalidArgumentError(None, None, LONG)
    found = messages.shorten_error(error)
    assert type(found) is tf.errors.InvalidArgumentError
    assert found.message == BAD_ID
    assert str(found) == BAD_ID


def test_log_level_0_keeps_full_messages(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    error = tf.errors.InvalidArgumentError(None, None, LONG)
    assert messages.shorten_error(error) is error
    record = logging.LogRecord(
        "",
        logging.ERROR,
        "",
        1,
        "Start cancelling closures due to error x: y",
        (),
        None,
    )
    assert messages.CoordinatorLogFilter().filter(record)


def logged_lines(monkeypatch, lines):
    """Returns what is logged when TensorFlow's coordinator logs `lines`."""
    found = []
    monkeypatch.setattr(
        messages.absl_logging,
        "warning",
        lambda form, *values: found.append(form % values),
    )
    one = messages.CoordinatorLogFilter()
    for line in lines:
        record = logging.LogRecord("", logging.ERROR, "", 1, line, (), None)
        if one.filter(record):
            found.append(record.getMessage())
    return found


@pytest.mark.usefixtures("without_level")
def test_each_event_is_logged_in_one_line(monkeypatch):
    where = "/job:worker/replica:0/task:1"
    assert logged_lines(
        monkeypatch,
        [
            " /job:worker/task:0 encountered the following error when "
            f"processing closure: InvalidArgumentError():{LONG}",
            f"Start cancelling closures due to error InvalidArgumentError(): "
            f"{LONG}",
            f"Remote function on worker {where} failed with CancelledError():"
            "CANCELLED\nThis derived error is ignored and not reported "
            "to users.",
            f"Worker {where} failed with UnavailableError():recvmsg:Connection "
            "reset by peer\nAdditional GRPC error information from remote",
            "5 out of the last 5 calls to <function MultiDeviceSaver.save."
            "<locals>.tf_function_save at 0x7f> triggered tf.function "
            "retracing.",
            "a line of another module",
        ],
    ) == [
        f"A closure failed on /job:worker/task:0: {BAD_ID}",
        f"Lost worker {where}, whose closures run again: "
        "recvmsg:Connection reset by peer",
        "a line of another module",
    ]


@pytest.mark.usefixtures("without_level")
def test_repeated_lines_are_counted(monkeypatch):
    line = (
        " /job:worker/task:0 encountered the following error when "
        "processing closure: OutOfRangeError():End of sequence"
    )
    short = "A closure failed on /job:worker/task:0: End of sequence"
    assert logged_lines(monkeypatch, [line] * 120) == [
        short,
        f"{short} (10 times)",
        f"{short} (100 times)",
    ]


def test_tensorflows_coordinator_logs_the_filtered_messages():
    """Checks that TensorFlow still contains the filtered messages."""
    names = tf.distribute.coordinator.ClusterCoordinator.__init__.__globals__
    source = pathlib.Path(names["__file__"]).read_text(encoding="utf-8")
    for words in (
        "encountered the following error when ",
        '"processing closure: %r:%s"',
        "Start cancelling closures due to error",
        '"Worker %s failed with %r:%s"',
        '"Remote function on worker %s failed with %r:%s',
        "This derived error is ignored",
        "It is treated as a transient",
    ):
        assert words in source
