"""The notebook runs, and its committed text outputs are correct."""

import pathlib

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("nbclient")

from tools import run_notebook  # noqa: E402

NOTEBOOK = (
    pathlib.Path(__file__).parents[2] / "examples" / "layout_map_tour.ipynb"
)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    """Returns the printed output of a cell, which is deterministic."""
    return "".join(output.get("text", "") for output in cell.outputs)


def num_plots(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


@pytest.fixture(scope="module")
def committed():
    return code_cells(nbformat.read(NOTEBOOK, as_version=4))


def test_outputs_and_a_plot_are_committed(committed):
    numbers = [cell.execution_count for cell in committed]
    assert numbers == list(range(1, len(committed) + 1))
    assert sum(map(num_plots, committed)) == 1
    assert "bytes per device" in "".join(map(text_of, committed))


@pytest.mark.exhaustive
@pytest.mark.slow  # Starts a Jupyter kernel, which imports TensorFlow.
def test_cells_print_the_committed_outputs(committed):
    executed = code_cells(run_notebook.run(NOTEBOOK))
    assert list(map(text_of, executed)) == list(map(text_of, committed))
    assert list(map(num_plots, executed)) == list(map(num_plots, committed))
