"""Tests the program `examples/dlrm.py` from its flags to its report."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import clicks.run
import pytest
from clicks.settings import Settings
from completion.report import Report

PROGRAM = "dlrm.py"
EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ("--max_lines=8000", "--batch_size=128", "--dim=8")


def run(start, model_dir, *arguments):
    ended = start(f"--model_dir={model_dir}", *SMALL, *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def first_run(start, model_dir):
    return run(start, model_dir)


def figures_of(printed):
    """Returns the AUC and the log loss of each row of the comparison."""
    return {
        name.strip(): (float(auc), float(loss))
        for name, auc, loss in re.findall(
            r"│ ([A-Za-z ]+?) +│ ([\d.]{6}) │ +([\d.]{6}) │", printed
        )
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_model_scores_between_counting_and_the_truth(first_run):
    figures = figures_of(first_run)
    assert figures["constant rate"][0] == 0.5
    assert (
        0.5
        < figures["naive Bayes"][0]
        < figures["DLRM"][0]
        < figures["true probabilities"][0]
    )
    assert "above naive Bayes." in first_run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_report_states_that_the_data_is_synthetic(first_run):
    assert "--data is not set: the data is synthetic." in first_run
    assert re.search(r"26 tables +│.*one copy, on the host", first_run)
    assert "Epoch 2/2" in first_run and "val_auc" in first_run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_exported_model_predicts_without_this_package(first_run):
    assert (
        "without tf_layoutmap predicted the same for 500 held-out lines"
    ) in " ".join(first_run.split())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_interrupted_and_started_again_it_ends_where_it_would_have(
    start, first_run, tmp_path
):
    run(start, tmp_path, "--epochs=1")
    again = run(start, tmp_path)
    assert "epoch-0001.keras, step 54" in " ".join(again.split())
    assert "Epoch 2/2" in again and "Epoch 1/2" not in again
    assert figures_of(again) == figures_of(first_run)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_file_of_ones_own_is_read_with_two_replicas(
    start, first_run, model_dir, tmp_path
):
    printed = run(
        start, tmp_path, f"--data={model_dir / 'generated.txt'}", "--replicas=2"
    )
    assert "synthetic" not in printed
    assert "true probabilities" not in printed
    assert "replicated on 2 replicas" in printed
    # With two replicas, the gradients of the MLPs are summed in a different
    # order, and differences in the last bit grow during training.
    assert figures_of(printed)["DLRM"] == pytest.approx(
        figures_of(first_run)["DLRM"], abs=5e-3
    )


def start_again(model_dir, dim=8):
    """Runs the example with the settings of `SMALL` in this process."""
    clicks.run.run(
        Report(),
        Settings(batch_size=128, dim=dim),
        data=None,
        model_dir=str(model_dir),
        fresh=False,
        max_lines=8000,
        replicas=1,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_folder_of_another_model_or_damaged_model_raises(
    error_message, first_run, model_dir, tmp_path
):
    assert "--model_dir must be empty or hold the same model" in error_message(
        lambda: start_again(model_dir, dim=16)
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    saved = damaged / "epoch-0002.keras"
    saved.write_bytes(saved.read_bytes()[:1000])
    message = error_message(lambda: start_again(damaged))
    assert "epoch-0002.keras cannot be loaded" in message
    assert "--fresh" in message


@pytest.mark.exhaustive
def test_batch_size_that_replicas_do_not_divide_raises(start):
    ended = start("--batch_size=10", "--replicas=4")
    assert ended.returncode != 0
    assert "--batch_size must be a multiple of --replicas" in ended.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_values_as_they_come_are_learned_too(capsys, tmp_path, monkeypatch):
    def run_small(epochs):
        clicks.run.run(
            Report(),
            Settings(batch_size=128, dim=4, epochs=epochs, capacity=1500),
            data=None,
            model_dir=str(tmp_path),
            fresh=False,
            max_lines=2500,
            replicas=1,
        )
        return capsys.readouterr().out

    printed = run_small(1)
    assert "values with a row" in printed
    keys, rows = (
        int(re.search(rf"{label} +│ ([\d,]+)", printed)[1].replace(",", ""))
        for label in ("values with a row", r"│ rows")
    )
    assert 0 < keys < rows
    assert figures_of(printed)["DLRM"][0] > 0.5
    assert "predicted the same for 312 held-out lines" in " ".join(
        printed.split()
    )
    # The saved model is loaded with its keys. It is not exported again.
    monkeypatch.setattr(clicks.run, "serve", lambda *_: None)
    again = run_small(1)
    assert "Training is complete" in again
    assert figures_of(again) == figures_of(printed)


def test_open_vocabulary_with_several_replicas_raises(start):
    ended = start("--open_vocabulary", "--replicas=2")
    assert ended.returncode != 0
    assert "--open_vocabulary requires --replicas=1" in ended.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_cluster_trains_what_this_process_measures_and_exports(tmp_path):
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tf_layoutmap.local_cluster",
            "--ps=2",
            "--workers=2",
            "--",
            sys.executable,
            str(EXAMPLES / PROGRAM),
            "--cluster",
            f"--model_dir={tmp_path}",
            "--max_lines=3000",
            "--batch_size=64",
            "--dim=8",
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=EXAMPLES.parent,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    printed = ended.stdout.replace("[chief:0] ", "")
    assert re.search(r"26 tables +│.*sharded over 2 servers", printed)
    assert "Epoch 2/2" in printed and "val_auc" in printed
    figures = figures_of(printed)
    assert 0.5 < figures["DLRM"][0] < figures["true probabilities"][0]
    assert "predicted the same for" in " ".join(printed.split())
