"""Programs of small models on a mesh, counted instead of timed, against JAX.

The time of a step on logical CPUs says little about a step on accelerators.
This benchmark therefore counts what one device runs in a training step, in a
step of `predict`, and for one token of `generate`: operations, kernels that are
launched, collectives, and the bytes that the device sends. The counts of this
package are read from the programs that DTensor compiled
(`layout/replication/program_counts.py`), and the counts of JAX from the text of
its compiled programs, with the same Keras program, weights and layouts.

Kernels of TensorFlow are operations that compute or copy data. JAX fuses
operations, so it launches fewer kernels. The bytes of a collective are the
bytes that a ring sends: an all-reduce sends twice as many bytes as an
all-gather of the same result.

    python -m benchmarks mesh_counts --count_meshes=1x2

`make bench-mesh` creates an environment with JAX in `build/peers_jax`. The
benchmark uses no ids, so `--distributions` has no effect.
"""

import sys

import rich.table
from absl import flags

from benchmarks.peers.mesh_programs import MODELS
from benchmarks.peers.process import Peer
from benchmarks.whole_models import mesh_models

_MESHES = ("1x2", "2x2")
_SELECTED_MESHES = flags.DEFINE_multi_enum(
    "count_meshes", _MESHES, _MESHES, "Meshes of `mesh_counts`."
)
_SELECTED_MODELS = flags.DEFINE_multi_enum(
    "count_models", list(MODELS), list(MODELS), "Models of `mesh_counts`."
)


def _counts(python: str, contestant: str, model: str, mesh: str) -> dict:
    """Returns the counts of the programs of one contestant, by verb."""
    axes = [int(size) for size in mesh.split("x")]
    peer = Peer(python, "benchmarks.peers.mesh_programs")
    try:
        peer.ask("open", contestant, model, axes, 0)
        peer.ask("predict")
        if MODELS[model].generates:
            peer.ask("generate")
        return peer.ask("count")
    finally:
        peer.close()


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns its table."""
    del distribution, rounds
    pythons = {"tlm": sys.executable}
    if mesh_models.JAX.value:
        pythons["jax"] = mesh_models.JAX.value
    table = rich.table.Table(
        title="Programs of one device: this package / JAX", title_justify="left"
    )
    table.add_column("program")
    columns = ("ops", "kernels", "collectives", "sent_bytes")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    measured = {}
    for model in dict.fromkeys(_SELECTED_MODELS.value):
        for mesh in dict.fromkeys(_SELECTED_MESHES.value):
            counts = {
                name: _counts(python, name, model, mesh)
                for name, python in pythons.items()
            }
            measured[f"{model}, {mesh}"] = counts
            for verb in counts["tlm"]:
                table.add_row(
                    f"{model}, {mesh}, {verb}",
                    *(
                        " / ".join(
                            f"{of_peer[verb][column]:,.0f}"
                            for of_peer in counts.values()
                        )
                        for column in columns
                    ),
                )
    return table, measured
