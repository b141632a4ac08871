"""Tests that programs continue if their output cannot be printed."""

import os
import subprocess
import sys

import pytest

from tests.processes import ROOT

# The output is larger than the buffer of a pipe, so the program blocks if its
# output is not read.
PROGRAM = (
    "import sys; write = sys.stdout.buffer.write; "
    "write('\\u00fc'.encode() * 200_000 + b'\\nend\\n'); sys.exit(3)"
)
COMMAND = [
    *[sys.executable, "-m", "tf_layoutmap.local_cluster"],
    *["--ps", "0", "--", sys.executable, "-c", PROGRAM],
]


def start(stdout, encoding="utf-8"):
    return subprocess.Popen(
        COMMAND,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": encoding,
        },
    )


def end(process):
    """Returns the exit code and the standard error."""
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, errors.decode()


@pytest.mark.parametrize("output", ["closed pipe", "full disk"])
def test_a_program_ends_if_the_standard_output_fails(output):
    if output == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    try:
        process = start(writer)
    finally:
        os.close(writer)
    code, errors = end(process)
    assert code == 3
    # The error is reported once, not for each line.
    assert errors.count("The standard output failed") == 1, errors
    assert "Traceback" not in errors


def test_characters_that_the_output_does_not_contain_are_escaped():
    process = start(subprocess.PIPE, "ascii")
    try:
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3
    assert b"[worker:0] \\xfc\\xfc" in printed, errors
    assert b"worker:0 has ended with exit code 3" in printed
