"""Tests `examples/next_identifier.py` from its flags to its report."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import completion.run
import pytest
from completion.data import python_source
from completion.report import Report
from completion.settings import Settings

PROGRAM = "next_identifier.py"
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def first_run(start, sources, model_dir):
    ended = start(
        f"--data={sources}",
        f"--model_dir={model_dir}",
        "--steps=60",
        "--save_every=25",
        "--batch_size=256",
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def figures_of(printed):
    """Returns recall@10 and MRR of each row of the comparison."""
    found = re.findall(
        r"│ (most frequent|bigram counts|neural model) +│ +([\d.]+) │ +"
        r"([\d.]+)",
        printed,
    )
    return {name: (float(recall), float(mrr)) for name, recall, mrr in found}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_model_beats_both_baselines(first_run):
    figures = figures_of(first_run)
    assert len(figures) == 3
    for baseline in ("most frequent", "bigram counts"):
        for measure in (0, 1):
            assert figures["neural model"][measure] > figures[baseline][measure]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_exported_model_predicts_without_this_package(first_run):
    assert (
        "A process without tf_layoutmap returned the same 10 offers for each "
        "of 200 held-out positions"
    ) in " ".join(first_run.split())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_report_has_tables_progress_and_duration(first_run):
    for table in ("identifiers", "candidates", "pieces", "scopes"):
        assert re.search(rf"│ {table} +│.*│ Adagrad", first_run)
    assert "60/60" in first_run
    assert re.search(r"Took \d+ s; peak memory \d\.\d\d GiB", first_run)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_started_again_it_goes_on_from_the_newest_checkpoint(
    start, first_run, sources, model_dir
):
    assert "Training a new model" in first_run
    again = start(
        f"--data={sources}",
        f"--model_dir={model_dir}",
        "--steps=60",
        "--batch_size=256",
    )
    assert again.returncode == 0, again.stderr[-3000:]
    printed = " ".join(again.stdout.split())
    assert "Resuming from" in printed
    assert "ckpt-60, step 60. Pass --fresh to train a new model." in printed
    assert "Training is complete" in again.stdout
    assert figures_of(again.stdout) == figures_of(first_run)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_with_its_tower_on_a_mesh_it_learns_as_much(
    start, first_run, sources, tmp_path
):
    arguments = (
        f"--data={sources}",
        f"--model_dir={tmp_path}",
        "--steps=60",
        "--batch_size=256",
    )
    ended = start(*arguments, "--mesh=2x2")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"hidden.kernel +│.*\(None, 'model'\)", ended.stdout)
    assert "A process without tf_layoutmap returned the same" in ended.stdout
    figures, expected = figures_of(ended.stdout), figures_of(first_run)
    # Dropout draws different numbers on a mesh, so the model's metrics differ.
    # The baselines are equal.
    assert figures == {
        name: pytest.approx(both, abs=(0.02 if name == "neural model" else 0))
        for name, both in expected.items()
    }
    # The next run restores the checkpoint of the mesh without a mesh.
    again = start(*arguments)
    assert "ckpt-60, step 60" in " ".join(again.stdout.split())
    assert figures_of(again.stdout) == {
        name: pytest.approx(both, abs=1e-3) for name, both in figures.items()
    }


def test_invalid_mesh_flag_raises(start):
    ended = start("--mesh=two")
    assert ended.returncode != 0
    assert "must look like 2x2" in ended.stderr


def start_again(data, model_dir=None, **settings):
    """Runs the example in this process, without its flags."""
    completion.run.run(
        python_source.read_folder(data),
        Settings(**settings),
        Report(),
        data=str(data),
        model_dir=model_dir and str(model_dir),
        fresh=False,
        save_every=200,
        max_held_out=4096,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_folder_of_another_model_raises(
    error_message, first_run, sources, model_dir
):
    assert "--model_dir must be empty or hold the same model" in error_message(
        lambda: start_again(
            sources / "email", model_dir, num_steps=1, batch_size=64
        )
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_damaged_checkpoint_raises(
    error_message, first_run, sources, model_dir, tmp_path
):
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    state = damaged / "checkpoints" / "checkpoint"
    state.write_text(state.read_text().replace(str(model_dir), str(damaged)))
    rows = damaged / "checkpoints" / "ckpt-60.data-00000-of-00001"
    rows.write_bytes(rows.read_bytes()[: rows.stat().st_size // 2])
    message = error_message(
        lambda: start_again(sources, damaged, num_steps=60, batch_size=256)
    )
    assert re.search(r"ckpt-60 cannot be restored.*--fresh", message)


@pytest.mark.parametrize(
    "source, message",
    [
        ("missing", "which is missing"),
        ("empty", "at least one readable Python file"),
    ],
)
def test_unusable_data_raises(start, tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    ended = start(f"--data={tmp_path / source}")
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_too_few_positions_raise(error_message, tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = x\n")
    assert "at least --batch_size=1024 positions" in error_message(
        lambda: start_again(tmp_path)
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_cluster_trains_what_this_process_measures_and_exports(
    sources, tmp_path
):
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
            f"--data={sources}",
            f"--model_dir={tmp_path}",
            "--steps=60",
            "--batch_size=256",
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=EXAMPLES.parent,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    printed = ended.stdout.replace("[chief:0] ", "")
    figures = figures_of(printed)
    for measure in (0, 1):
        assert (
            figures["neural model"][measure]
            > (figures["most frequent"][measure])
        )
    assert "returned the same 10 offers" in " ".join(printed.split())
