"""Tests `examples/sharded_transformer.py` from its flags to its report."""

import re
import shutil

import logical_mesh
import pytest
import transformer.run
from completion.report import Report
from transformer.settings import Settings

from tests.layout.meshes import mesh_of

PROGRAM = "sharded_transformer.py"
SMALL = (
    "--steps=160",
    "--dim=32",
    "--heads=2",
    "--blocks=1",
    "--context=32",
    "--batch_size=64",
    "--windows=64",
    "--sample=20",
)


def run(start, sources, model_dir, *arguments):
    ended = start(
        f"--data={sources}", f"--model_dir={model_dir}", *SMALL, *arguments
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def first_run(start, sources, model_dir):
    return run(start, sources, model_dir, "--epochs=2")


def losses_of(printed):
    """Returns the log loss of each row of the comparison."""
    found = re.findall(
        r"│ (unigrams|bigrams|trigrams|Transformer) +│ +([\d.]+)", printed
    )
    return {name: float(loss) for name, loss in found}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_model_beats_counting(first_run):
    losses = losses_of(first_run)
    assert losses["Transformer"] < losses["bigrams"] < losses["unigrams"]
    assert "nats better than bigrams" in first_run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_report_has_layouts_and_bytes_per_device(first_run):
    assert re.search(
        r"attend_0.query_dense.kernel +│ \(32, 2, 16\) +│ \(None, 'model', "
        r"None\)",
        first_run,
    )
    per_device, in_all = map(
        float,
        re.search(
            r"([\d.]+) KiB per device of ([\d.]+) KiB in all", first_run
        ).groups(),
    )
    assert per_device < 0.6 * in_all
    assert "Problem:" not in first_run
    held, once = map(
        float,
        re.search(
            r"fullest device holds ([\d.]+) MiB.*copy is ([\d.]+) MiB",
            first_run,
        ).groups(),
    )
    assert held < 0.6 * once
    for prompt in ("def", "class", "import"):
        assert re.search(rf"│ {prompt} +│ ", first_run)
    assert "Epoch 2/2" in first_run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_interrupted_and_started_again_it_ends_where_it_would_have(
    start, first_run, sources, model_dir, tmp_path
):
    assert "Training a new model" in first_run
    interrupted = tmp_path / "interrupted"
    shutil.copytree(model_dir, interrupted)
    (interrupted / "epoch-0002.keras").unlink()
    again = run(start, sources, interrupted, "--epochs=2")
    assert "epoch-0001.keras, step 160" in " ".join(again.split())
    # Saving is exact, but sums over devices may differ in the last bit.
    assert losses_of(again)["Transformer"] == pytest.approx(
        losses_of(first_run)["Transformer"], abs=2e-3
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_saved_model_goes_on_any_mesh(start, first_run, sources, model_dir):
    again = run(start, sources, model_dir, "--epochs=2", "--mesh=1x1")
    assert "step 320" in again and "Training is complete" in again
    assert losses_of(again) == pytest.approx(losses_of(first_run), abs=1e-3)


def start_again(sources, model_dir, dim=32):
    """Runs the example with the settings of `SMALL` in this process."""
    settings = Settings(
        steps_per_epoch=160,
        dim=dim,
        num_heads=2,
        num_blocks=1,
        context=32,
        batch_size=64,
    )
    transformer.run.run(
        Report(),
        settings,
        data=str(sources),
        model_dir=str(model_dir),
        fresh=False,
        num_windows=64,
        sample_length=20,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_folder_of_another_model_or_damaged_model_raises(
    error_message, first_run, sources, model_dir, tmp_path, monkeypatch
):
    # This process has already split its CPU, so existing devices are used.
    monkeypatch.setattr(
        logical_mesh,
        "make_mesh",
        lambda shape: mesh_of(batch=shape[0], model=shape[1]),
    )
    assert "--model_dir must be empty or hold the same model" in error_message(
        lambda: start_again(sources, model_dir, dim=64)
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    saved = damaged / "epoch-0002.keras"
    saved.write_bytes(saved.read_bytes()[:1000])
    message = error_message(lambda: start_again(sources, damaged))
    assert re.search(r"epoch-0002.keras cannot be loaded", message)
    assert "--fresh" in message


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("--mesh=2by2", "must look like 2x2"),
        ("--heads=3", "--heads must be a multiple of 2"),
    ],
)
def test_invalid_flag_raises_without_a_traceback(start, wrong, words):
    ended = start(wrong)
    assert ended.returncode != 0
    assert words in ended.stderr
    assert "Traceback (most recent" not in ended.stderr
