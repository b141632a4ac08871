"""What TensorFlow's messages about closures are cut down to."""

import logging
import pathlib

import pytest
import tensorflow as tf

from tf_layoutmap.ps import messages

BAD = "Feature 'a', sample 0: id 9 is outside table 'a' with 8 rows"
# As a cluster raises it, where a server and a worker have met the error.
LONG = f"""Graph execution error:

2 root error(s) found.
  (0) INVALID_ARGUMENT:   {BAD}
\t [[{{{{node LayoutMap>PlanStep}}}}]]
Additional GRPC error information from remote target /job:worker/replica:0/\
task:0 while calling /tensorflow.WorkerService/RecvTensor:
:UNKNOWN:Error received from peer  {{grpc_status:3, grpc_message:"{BAD}"}}
\t [[LayoutMap>FoldGradients/_12]]
  (1) INVALID_ARGUMENT:  {BAD}
0 successful operations.
1 derived errors ignored. [Op:__inference_closure_165]"""


@pytest.fixture(autouse=True)
def without_a_level(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)


@pytest.mark.parametrize("message, sentence", [
    (LONG, BAD),
    (BAD, BAD),
    (f"{BAD} [Op:IteratorGetNext] name: ", BAD),
    (f"Graph execution error:\n\n{BAD}\n\t [[{{node A}}]]", BAD),
    ("two\nlines [Op:A]", "two lines"),
    ("CANCELLED\nAdditional GRPC error information from x:\n:UNKNOWN:no",
     "CANCELLED"),
    # Nothing but what is around a sentence: nothing is lost.
    ("Graph execution error:", "Graph execution error:"),
    ("", "")])
def test_the_sentence_of_a_message(message, sentence):
    assert messages.sentence_of(message) == sentence


def test_an_error_keeps_its_class_and_says_its_sentence():
    error = tf.errors.InvalidArgumentError(None, None, LONG)
    found = messages.concise(error)
    assert type(found) is tf.errors.InvalidArgumentError
    assert found.message == BAD
    assert str(found) == BAD


def test_all_is_said_at_level_0(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    error = tf.errors.InvalidArgumentError(None, None, LONG)
    assert messages.concise(error) is error
    record = logging.LogRecord("", logging.ERROR, "", 1, "Start cancelling "
                               "closures due to error x: y", (), None)
    assert messages.OneLinePerEvent().filter(record)


def shown(monkeypatch, lines):
    """What is logged of lines of TensorFlow's coordinator."""
    found = []
    monkeypatch.setattr(
        messages.absl_logging, "warning",
        lambda form, *values: found.append(form % values))
    one = messages.OneLinePerEvent()
    for line in lines:
        record = logging.LogRecord("", logging.ERROR, "", 1, line, (), None)
        if one.filter(record):
            found.append(record.getMessage())
    return found


def test_each_event_is_one_line(monkeypatch):
    where = "/job:worker/replica:0/task:1"
    assert shown(monkeypatch, [
        " /job:worker/task:0 encountered the following error when processing "
        f"closure: InvalidArgumentError():{LONG}",
        f"Start cancelling closures due to error InvalidArgumentError(): "
        f"{LONG}",
        f"Remote function on worker {where} failed with CancelledError():"
        "CANCELLED\nThis derived error is ignored and not reported to users.",
        f"Worker {where} failed with UnavailableError():recvmsg:Connection "
        "reset by peer\nAdditional GRPC error information from remote",
        "a line of another module"]) == [
            f"A closure failed on /job:worker/task:0: {BAD}",
            f"Lost worker {where}, whose closures run again: "
            "recvmsg:Connection reset by peer",
            "a line of another module"]


def test_a_line_that_comes_again_is_counted(monkeypatch):
    line = (" /job:worker/task:0 encountered the following error when "
            "processing closure: OutOfRangeError():End of sequence")
    short = "A closure failed on /job:worker/task:0: End of sequence"
    assert shown(monkeypatch, [line] * 120) == [
        short, f"{short} (10 times)", f"{short} (100 times)"]


def test_the_coordinator_of_tensorflow_logs_what_is_cut_down():
    """Its messages are recognized by their words."""
    names = tf.distribute.coordinator.ClusterCoordinator.__init__.__globals__
    source = pathlib.Path(names["__file__"]).read_text(encoding="utf-8")
    for words in ("encountered the following error when ",
                  '"processing closure: %r:%s"',
                  "Start cancelling closures due to error",
                  '"Worker %s failed with %r:%s"',
                  '"Remote function on worker %s failed with %r:%s',
                  "This derived error is ignored",
                  "It is treated as a transient"):
        assert words in source
