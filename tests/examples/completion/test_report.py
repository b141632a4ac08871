"""What a person gets to see says whose model it is."""

import io

from completion.report import Report
from rich.console import Console


def said(*arguments):
    console = Console(file=io.StringIO(), width=200)
    Report(console).begin(*arguments)
    return console.file.getvalue().strip()


def test_a_new_model_is_said_to_be_new():
    assert said(None, 0, "/models/a") == "A new model, in /models/a."


def test_a_model_that_was_there_is_said_to_be_and_how_to_be_rid_of_it():
    assert said("/models/a/ckpt-1200", 1200, "/models/a") == (
        "Goes on from a model that was there, /models/a/ckpt-1200, step 1,200. "
        "--fresh starts over."
    )
