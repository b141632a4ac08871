"""Models of keras-hub on a mesh: what is sharded, and how long steps take.

The first table shows eight small models on a mesh of one by two logical CPUs:
the share of the floating-point operations that every device computes, and the
share of the bytes of sharded weights that a step gathers. The values are read
from the programs that DTensor compiled (`explain(model).measured`). For
`generate`, the values are from the program that generates one token.

The second table compares models on a mesh with the same program on TensorFlow
without a mesh, and on JAX: a GPT-2 of two sizes (`peers/mesh_decoder.py`), a
Llama with grouped queries and a U-Net (`peers/mesh_programs.py`). `make
bench-peers` creates an environment with JAX in `build/peers_jax`;
`--jax_python` is the path of another Python interpreter with `jax`, `keras` and
`keras-hub`. Each contestant runs in its own process, and the calls are
interleaved. The benchmark uses no ids, so `--distributions` has no effect.

`--sizes`, `--meshes` and `--shares` select a part of the benchmark:

    python -m benchmarks mesh_models --noshares --sizes=20M --meshes=1x2
"""

import json
import pathlib
import subprocess
import sys

import numpy as np
import rich.table
from absl import flags

from benchmarks.peers.process import Peer

_JAX_OF_MAKE = (
    pathlib.Path(__file__).parents[2] / "build" / "peers_jax" / "bin" / "python"
)
_MESHES = ("1x2", "2x1", "2x2")
# Program that runs each model.
_PROGRAMS = {
    "20M": "benchmarks.peers.mesh_decoder",
    "70M": "benchmarks.peers.mesh_decoder",
    "grouped": "benchmarks.peers.mesh_programs",
    "unet": "benchmarks.peers.mesh_programs",
}
_VERBS = ("step", "predict", "generate")

JAX = flags.DEFINE_string(
    "jax_python",
    str(_JAX_OF_MAKE) if _JAX_OF_MAKE.exists() else None,
    "Python interpreter with jax, keras and keras-hub; empty without JAX.",
)
_SELECTED_SIZES = flags.DEFINE_multi_enum(
    "sizes", list(_PROGRAMS), list(_PROGRAMS), "Models of `mesh_models`."
)
_SELECTED_MESHES = flags.DEFINE_multi_enum(
    "meshes", _MESHES, _MESHES, "Meshes of `mesh_models`."
)
_HAS_SHARES = flags.DEFINE_bool(
    "shares", True, "Whether `mesh_models` measures the eight small models."
)
_THREADS = flags.DEFINE_integer(
    "threads_per_operation",
    0,
    "Maximum number of threads of one operation of this package in "
    "`mesh_models`; 0 is the number of cores per device.",
)


def _models() -> dict[str, tuple]:
    """Returns a test case for each model."""
    from tests.real.hub import encoders, images, language, own_maps
    from tests.real.hub.common import backbone_case, language_case

    def decoder(name):
        return language_case(*language.BACKBONES[name])

    def encoder(name, cases):
        case = cases[name]
        return backbone_case(case) if not hasattr(case, "make") else case

    return {
        "GPT-2": decoder("GPT-2"),
        "BERT": encoder("BERT", encoders.CASES),
        "Mixtral": decoder("Mixtral"),
        "Llama, its own map": own_maps.CASES["Llama"],
        "Gemma, its own map": own_maps.CASES["Gemma"],
        "ViT": encoder("ViT", images.CASES),
        "Whisper": encoder("Whisper", encoders.CASES),
        "ResNet": encoder("ResNet", images.CASES),
    }


_STEPS = ("train", "predict", "generate")


def _generate(case, model) -> None:
    """Generates tokens, and records the program that generates one token."""
    from tf_layoutmap.layout.keras3.context import context_of_model
    from tf_layoutmap.layout.ops import host_loops
    from tf_layoutmap.layout.replication import measured

    functions = []
    run = host_loops._Part.__call__

    def recorded(part, *args):
        functions.append(part._function)
        return run(part, *args)

    host_loops._Part.__call__ = recorded
    try:
        case.generate(model)
    finally:
        host_loops._Part.__call__ = run
    if functions:
        # The last function is the part after the loop.
        measured.record(
            model, "generate", functions[-2], context_of_model(model), 0
        )


def _measure(name: str) -> dict[str, list[float]]:
    """Trains and predicts with one model on a mesh; returns shares per step."""
    import keras

    import tf_layoutmap as tlm
    from tests.layout.meshes import mesh_of
    from tests.real import placement
    from tf_layoutmap.layout.explain import explain

    case = _models()[name]
    if case.backbone is None:
        mesh = mesh_of(batch=1, model=2)
        layouts = placement.generic_map([case.make()], mesh)
    else:
        layouts = case.backbone.get_layout_map(
            tlm.distribution.DeviceMesh(
                (1, 2), ("batch", "model"), ["cpu:0", "cpu:1"]
            )
        )
    keras.backend.clear_session()
    with tlm.layout_map_scope(layouts):
        model = case.make()
    x, y = case.data(model)
    model.fit(x, y, verbose=0)
    model.predict(x, verbose=0)
    if case.generate:
        _generate(case, model)
    explanation = explain(layouts, model)
    sharded = sum(
        variable.bytes_total
        for variable in explanation.variables
        if any(variable.axes)
    )
    shares = {}
    for step in _STEPS:
        layers = [layer for layer in explanation.measured if layer.step == step]
        flops = sum(layer.flops for layer in layers)
        if not flops:
            continue
        shares[step] = [
            sum(layer.flops * layer.replicated for layer in layers) / flops,
            sum(layer.gathered_bytes for layer in layers) / max(sharded, 1),
        ]
    return shares


def _shares() -> tuple[rich.table.Table, dict]:
    table = rich.table.Table(
        title="Eight models of keras-hub on a 1x2 mesh", title_justify="left"
    )
    table.add_column("model")
    for column in ("replicated FLOPs", "gathered weights"):
        table.add_column(f"{column}, fit / predict / generate", justify="right")
    shares = {}
    for name in _models():
        # The logical devices of a process cannot be changed.
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.whole_models.mesh_models", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        shares[name] = json.loads(run.stdout.splitlines()[-1])
        columns = [
            [
                f"{100 * shares[name][step][column]:.0f}"
                if step in shares[name]
                else "-"
                for step in _STEPS
            ]
            for column in range(2)
        ]
        table.add_row(name, *(f"{' / '.join(texts)} %" for texts in columns))
    return table, shares


def _compare(size: str, mesh: str, rounds: int) -> tuple[list[list[str]], dict]:
    """Measures the contestants with one model on one mesh."""
    pythons = {"tlm": sys.executable, "tensorflow": sys.executable}
    if JAX.value:
        pythons["jax"] = JAX.value
    peers = {
        name: Peer(python, _PROGRAMS[size]) for name, python in pythons.items()
    }
    axes = [int(size) for size in mesh.split("x")]
    results = {
        name: {"first step": peer.ask("open", name, size, axes, _THREADS.value)}
        for name, peer in peers.items()
    }
    verbs = [verb for verb in _VERBS if verb != "generate" or size != "unet"]
    for verb in verbs:
        for peer in peers.values():
            # The first two calls can compile programs.
            peer.ask(verb), peer.ask(verb)
        times = {name: [] for name in peers}
        for _ in range(rounds):
            for name, peer in peers.items():
                times[name].append(peer.ask(verb))
        for name, values in times.items():
            results[name][verb] = np.median(values, axis=0).tolist()
    rows = []
    for name, peer in peers.items():
        results[name]["peak"] = peer.ask("peak")
        peer.close()
        rows.append(
            [
                f"{size}, {mesh}",
                name,
                *(
                    "{:,.0f} ({:,.0f})".format(*results[name][verb])
                    if verb in results[name]
                    else "-"
                    for verb in ("first step", *_VERBS)
                ),
                f"{results[name]['peak']:,.0f} MiB",
            ]
        )
    return rows, results


def _comparison(rounds: int) -> tuple[rich.table.Table, dict]:
    table = rich.table.Table(
        title="Models: medians of interleaved calls in ms (processor time of "
        "all threads)",
        title_justify="left",
    )
    for column in ("model", "contestant"):
        table.add_column(column)
    for column in (
        *("first step", "step", "predict"),
        *("generate 32 tokens", "peak memory"),
    ):
        table.add_column(column, justify="right")
    measured = {}
    for size in dict.fromkeys(_SELECTED_SIZES.value):
        for mesh in dict.fromkeys(_SELECTED_MESHES.value):
            rows, measured[f"{size}, {mesh}"] = _compare(
                size, mesh, min(rounds, 5)
            )
            for row in rows:
                table.add_row(*row)
    return table, measured


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of both parts."""
    del distribution
    both, measured = rich.table.Table.grid(), {}
    for part in [_shares] * _HAS_SHARES.value + [lambda: _comparison(rounds)]:
        table, figures = part()
        both.add_row(table)
        measured |= figures
    return both, measured


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
