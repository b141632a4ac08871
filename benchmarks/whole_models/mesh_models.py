"""Models of keras-hub on a mesh: what is sharded, and how long steps take.

The first table shows eight small models on a mesh of one by two logical CPUs:
the share of the floating-point operations that every device computes, and the
share of the bytes of sharded weights that a step gathers. The values are read
from the programs that DTensor compiled (`explain(model).measured`).

The second table compares a decoder on a mesh with the same program on
TensorFlow without a mesh, and on JAX if `--jax_python` is the path of a Python
interpreter with `jax`, `keras` and `keras-hub`. Each contestant runs in its own
process, and the calls are interleaved. The benchmark uses no ids, so
`--distributions` has no effect.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import rich.table
from absl import flags

from benchmarks.peers.process import Peer

_JAX = flags.DEFINE_string(
    "jax_python", None, "Python interpreter with jax, keras and keras-hub."
)
_MESHES = ((1, 2), (2, 1), (2, 2))
_SIZES = ("20M", "70M")
_VERBS = ("step", "generate")


def _models() -> dict[str, tuple]:
    """Returns a test case for each model."""
    from tests.real.hub import encoders, images, language, own_maps
    from tests.real.hub.common import backbone_case, language_case

    def decoder(name):
        return language_case(*language.BACKBONES[name])

    def encoder(name, found):
        case = found[name]
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
    explanation = explain(layouts, model)
    sharded = sum(
        one.bytes_total for one in explanation.variables if any(one.axes)
    )
    shares = {}
    for step in ("train", "predict"):
        layers = [one for one in explanation.measured if one.step == step]
        flops = sum(one.flops for one in layers)
        shares[step] = [
            sum(one.flops * one.replicated for one in layers) / max(flops, 1),
            sum(one.gathered_bytes for one in layers) / max(sharded, 1),
        ]
    return shares


def _shares() -> tuple[rich.table.Table, dict]:
    table = rich.table.Table(
        title="Eight models of keras-hub on a 1x2 mesh", title_justify="left"
    )
    table.add_column("model")
    for column in ("replicated FLOPs", "gathered weights"):
        table.add_column(f"{column}, fit / predict", justify="right")
    found = {}
    for name in _models():
        # The logical devices of a process cannot be changed.
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.whole_models.mesh_models", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[name] = json.loads(run.stdout.splitlines()[-1])
        shares = zip(found[name]["train"], found[name]["predict"])
        table.add_row(
            name,
            *(f"{100 * a:.0f} / {100 * b:.0f} %" for a, b in shares),
        )
    return table, found


def _compare(
    size: str, axes: Sequence[int], rounds: int
) -> tuple[list[list[str]], dict]:
    """Measures the contestants with one decoder on one mesh."""
    pythons = {"tlm": sys.executable, "tensorflow": sys.executable}
    if _JAX.value:
        pythons["jax"] = _JAX.value
    peers = {
        name: Peer(python, "benchmarks.peers.mesh_decoder")
        for name, python in pythons.items()
    }
    found = {}
    for name, peer in peers.items():
        _, first = peer.ask("open", name, size, axes)
        found[name] = {"first step": first}
    for verb in _VERBS:
        for peer in peers.values():
            # The first two calls can compile programs.
            peer.ask(verb, 0), peer.ask(verb, 0)
        times = {name: [] for name in peers}
        for _ in range(rounds):
            for name, peer in peers.items():
                times[name].append(peer.ask(verb, 0))
        for name, values in times.items():
            found[name][verb] = float(np.median(values))
    rows = []
    for name, peer in peers.items():
        found[name]["peak"] = peer.ask("peak", 0)
        peer.close()
        times = [f"{found[name][v]:,.0f} ms" for v in ("first step", *_VERBS)]
        rows.append(
            [
                f"{size}, {axes[0]}x{axes[1]}",
                name,
                *times,
                f"{found[name]['peak']:,.0f} MiB",
            ]
        )
    return rows, found


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of both parts."""
    del distribution
    shares, measured = _shares()
    table = rich.table.Table(
        title="Decoders: medians of interleaved calls", title_justify="left"
    )
    for column in ("decoder", "contestant"):
        table.add_column(column)
    for column in ("first step", "step", "generate 32 tokens", "peak memory"):
        table.add_column(column, justify="right")
    for size in _SIZES:
        for axes in _MESHES:
            rows, found = _compare(size, list(axes), min(rounds, 5))
            measured[f"{size}, {axes}"] = found
            for row in rows:
                table.add_row(*row)
    both = rich.table.Table.grid()
    both.add_row(shares)
    both.add_row(table)
    return both, measured


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
