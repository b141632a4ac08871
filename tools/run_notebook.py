"""Runs a notebook and writes its outputs into the file.

    python -m tools.run_notebook examples/layout_map_tour.ipynb

Outputs to standard error are removed, because TensorFlow's messages contain
times. The notebook imports the package from this checkout. Requires nbclient
and ipykernel, which the extra `test` installs.
"""

import argparse
import os
import pathlib
import tempfile
from unittest import mock

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[1]


def run(path: pathlib.Path) -> nbformat.NotebookNode:
    """Returns the notebook with the outputs of a new run.

    Args:
      path: The notebook, which is not changed.

    Raises:
      nbclient.exceptions.CellExecutionError: A cell raises an error.
    """
    notebook = nbformat.read(path, as_version=4)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)),
    ):
        nbclient.NotebookClient(
            notebook,
            timeout=120,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.get("name") != "stderr"
            ]
    return notebook


def main() -> None:
    """Parses the arguments and runs the notebook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=pathlib.Path)
    path = parser.parse_args().notebook
    notebook = run(path)
    # The metadata omits the version of Python, so that it does not change the
    # file.
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
