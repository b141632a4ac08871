"""Draws the pictures of README.md, examples/README.md and two guides.

    python docs/images/make.py

The program runs the snippet of README.md and writes `shards.svg`: the rows of a
table on four devices. All numbers in the picture come from the snippet. Then
the program runs the tutorial and writes its loss curves to `losses.svg`. The
pictures of the guides are in `guide_pictures.py`. Requires matplotlib, which
the extra `docs` installs.
"""

import contextlib
import io
import pathlib
import re
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import guide_pictures  # noqa: E402
import matplotlib  # noqa: E402
from guide_pictures import COLORS, EDGE, EMPTY  # noqa: E402
from matplotlib import patches, pyplot  # noqa: E402

from tf_layoutmap.layout.mesh import transfer  # noqa: E402


def run_snippet() -> tuple[dict[str, Any], list[int]]:
    """Returns the variables and the printed numbers of README's snippet."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict[str, Any] = {"__name__": "snippet"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    return names, [int(line) for line in printed.getvalue().split()]


def draw_devices(
    axes: Any,
    title: str,
    num_rows: int,
    rows_of_devices: list[tuple[int, int]],
    bytes_per_device: int,
) -> None:
    """Draws the table on each device and fills the rows that the device holds.

    Args:
      axes: Matplotlib axes to draw on.
      title: Title of the axes.
      num_rows: Number of rows of the table.
      rows_of_devices: First row and exclusive last row of each device.
      bytes_per_device: Bytes that each device holds.
    """
    axes.set_title(title, fontsize=10.5, family="monospace")
    for device, (start, stop) in enumerate(rows_of_devices):
        color = COLORS[device]
        left = device * 1.25
        for (bottom, height), fill in (
            ((0, 1), EMPTY),
            ((1 - stop / num_rows, (stop - start) / num_rows), color),
        ):
            axes.add_patch(
                patches.Rectangle(
                    (left, bottom), 1, height, facecolor=fill, edgecolor=EDGE
                )
            )
        axes.text(
            left + 0.5,
            1 - (start + stop) / 2 / num_rows,
            f"rows\n{start:,} to\n{stop - 1:,}",
            color="white",
            ha="center",
            va="center",
            fontsize=8,
            linespacing=1.05,
        )
        axes.text(left + 0.5, 1.04, f"CPU:{device}", ha="center", fontsize=9)
    axes.text(
        2.375,
        -0.06,
        f"{bytes_per_device:,} bytes per device",
        ha="center",
        va="top",
        fontsize=11,
        weight="bold",
    )
    axes.set(xlim=(-0.1, 4.85), ylim=(-0.16, 1.1))
    axes.axis("off")


def run_tutorial() -> dict[str, Any]:
    """Returns the variables of the tutorial after all its code cells ran."""
    page = ROOT / "docs" / "tutorials" / "language_model.md"
    cells = re.findall(
        r"^```{code-cell} ipython3\n(.*?)^```",
        page.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    names: dict[str, Any] = {"__name__": "tutorial"}
    for code in cells:
        # Cells with tags configure the notebook only.
        if not code.startswith(":tags:"):
            exec(compile(code, str(page), "exec"), names)
    return names


def save(figure: Any, name: str) -> None:
    """Writes a figure next to this file, with the same bytes in each run."""
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.patch.set_facecolor("white")
    figure.tight_layout()
    figure.savefig(HERE / name, metadata={"Date": None})


def main() -> None:
    """Writes the pictures next to this file."""
    names, (before, after) = run_snippet()
    table = names["model"].get_layer("tokens").embeddings
    num_rows = table.shape[0]
    rows = {
        device: shard.bounds[0]
        for shard in transfer.unique_shards(table.shape, table.layout)
        for device in shard.devices
    }
    figure, both = pyplot.subplots(1, 2, figsize=(9.6, 2.9))
    draw_devices(
        both[0],
        "replicated on each device",
        num_rows,
        [(0, num_rows)] * len(rows),
        before,
    )
    draw_devices(
        both[1],
        'layout_map["tokens.embeddings"] = ("model", None)',
        num_rows,
        [rows[device] for device in sorted(rows)],
        after,
    )
    save(figure, "shards.svg")
    save(run_tutorial()["figure_of_losses"], "losses.svg")
    save(guide_pictures.draw_placements(), "placements.svg")
    steps = guide_pictures.run_vocabulary()
    save(guide_pictures.draw_vocabulary(steps), "vocabulary.svg")


if __name__ == "__main__":
    main()
