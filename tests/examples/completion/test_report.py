"""The report states whether a model is new or resumed."""

import io

from completion.report import Report
from rich.console import Console


def printed(*arguments):
    console = Console(file=io.StringIO(), width=200)
    Report(console).begin(*arguments)
    return console.file.getvalue().strip()


def test_report_of_a_new_model():
    assert printed(None, 0, "/models/a") == "Training a new model in /models/a."


def test_report_of_a_resumed_model_names_the_flag_for_a_new_one():
    assert printed("/models/a/ckpt-1200", 1200, "/models/a") == (
        "Resuming from /models/a/ckpt-1200, step 1,200. Pass --fresh to train "
        "a new model."
    )
