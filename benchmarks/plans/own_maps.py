"""Compares plans with the layout maps that keras-hub ships.

    python -m benchmarks.plans.own_maps

For each backbone of keras-hub with a layout map, the plan may need as many
bytes per device as this map, for the weights and in total. The devices are
logical CPUs. The steps of the models alternate, and the medians of their times
are compared. The processor time is less affected by other programs.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import argparse
import dataclasses
import math
import random
import time
from collections.abc import Callable

import keras
import keras_hub
import numpy as np

import tf_layoutmap as tlm
from tests.real import placement
from tests.real.hub import common
from tf_layoutmap.layout import explain
from tf_layoutmap.planning import keras_models, planner, search
from tf_layoutmap.planning.problem import Problem

SAMPLES, LENGTH = 8, 32
_DECODER = dict(
    vocabulary_size=2048,
    num_layers=2,
    num_query_heads=8,
    num_key_value_heads=4,
    hidden_dim=256,
    intermediate_dim=512,
)
_EXPERTS = dict(_DECODER, moe_intermediate_dim=256, num_experts=4, top_k=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A language model of keras-hub whose backbone has a layout map."""

    backbone: type
    task: type
    arguments: dict[str, int]

    def make(self) -> keras.Model:
        """Returns the compiled model; its weights are equal in every call."""
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        return common.language_model(self.task, self.backbone(**self.arguments))


models = keras_hub.models
CASES = {
    "Gemma": Case(
        models.GemmaBackbone, models.GemmaCausalLM, dict(_DECODER, head_dim=32)
    ),
    "Llama": Case(models.LlamaBackbone, models.LlamaCausalLM, _DECODER),
    "Llama 3": Case(models.Llama3Backbone, models.Llama3CausalLM, _DECODER),
    "Qwen": Case(models.QwenBackbone, models.QwenCausalLM, _DECODER),
    "Qwen MoE": Case(
        models.QwenMoeBackbone,
        models.QwenMoeCausalLM,
        dict(_EXPERTS, shared_expert_intermediate_dim=512),
    ),
    "Qwen 3 MoE": Case(
        models.Qwen3MoeBackbone,
        models.Qwen3MoeCausalLM,
        dict(_EXPERTS, head_dim=32),
    ),
}


@dataclasses.dataclass
class Contestant:
    """A layout map, and the times of its steps in seconds.

    Attributes:
      name: `"own map"`, `"plan"` or `"plan without a limit"`.
      bytes: Bytes of the weights on each device.
      run: Function that trains one step.
      wall: Duration of each step.
      cpu: Processor time of each step.
    """

    name: str
    bytes: int
    run: Callable[[], None]
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def measure(self) -> None:
        """Trains one step, and appends its times."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def layout_maps(
    case: Case, model: keras.Model, inputs
) -> dict[str, tlm.LayoutMap]:
    """Returns the map of the backbone, and the planned maps."""
    own_map, _ = placement.own_map(case.backbone)
    explanation = explain.explain(own_map, model)
    costs = planner.read_costs(None, math.prod(placement.AXES.values()))

    def problem_of(memory: int | None) -> Problem:
        return keras_models.problem_of_model(
            model,
            placement.AXES,
            memory,
            "adam",
            SAMPLES,
            inputs=inputs,
            costs=costs,
        )

    def map_of(solution: search.Solution) -> tlm.LayoutMap:
        layout_map = tlm.LayoutMap(placement.mesh())
        for key, axes in keras_models.keys_and_axes(
            solution.problem, solution.selected
        ).items():
            layout_map[key] = axes
        return layout_map

    problem = problem_of(None)
    without_limit = map_of(search.solve(problem))
    limit = sum(problem.fixed_memory.values())
    limit += placement.bytes_with_adam(explanation)
    limited = within(problem_of(limit), limit, explanation.bytes_per_device)
    return {
        "own map": own_map,
        "plan": map_of(limited),
        "plan without a limit": without_limit,
    }


def within(problem: Problem, limit: int, weights: int) -> search.Solution:
    """Returns a plan that needs at most a number of bytes.

    Args:
      problem: Problem of the model.
      limit: Bytes of each device, including gradients and activations.
      weights: Bytes of the weights on each device. A plan may need fewer bytes
        for gradients and more for weights than the map of the backbone.
        The limit is then reduced in steps of 1 %.
    """
    for percent in range(100, 0, -1):
        budgets = (limit * percent // 100,) * len(problem.devices)
        solution = search.solve(dataclasses.replace(problem, budgets=budgets))
        if solution.memory()[0]["weights"] <= weights:
            return solution
    raise RuntimeError("No plan needs as few bytes as the map of the backbone.")


def contestants(case: Case) -> list[Contestant]:
    """Returns a model for each layout map."""
    model = case.make()
    name = next(iter(common.inputs_of(model)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(
        1, case.arguments["vocabulary_size"], [SAMPLES, LENGTH]
    ).astype("int32")
    inputs = {
        key: tokens if key == name else np.ones_like(tokens)
        for key in model.input
    }
    labels = np.roll(tokens, -1, axis=1)
    measured = []
    for title, layout_map in layout_maps(case, model, inputs).items():
        with tlm.layout_map_scope(layout_map):
            sharded = case.make()

        def run(sharded=sharded):
            sharded.train_on_batch(inputs, labels)

        measured.append(
            Contestant(
                title,
                explain.explain(layout_map, sharded).bytes_per_device,
                run,
            )
        )
    return measured


def compare(name: str, case: Case, rounds: int) -> None:
    """Measures the maps of a backbone, and prints one line per map."""
    maps = contestants(case)
    for contestant in maps:
        contestant.run()
        contestant.run()
    for number in range(rounds):
        # The order changes, so that the state of the caches varies.
        order = maps.copy()
        random.Random(number).shuffle(order)
        for contestant in order:
            contestant.measure()
    baseline = maps[0]
    for contestant in maps:
        wall, cpu = np.median(contestant.wall), np.median(contestant.cpu)
        print(
            f"{name:10} {contestant.name:20} {contestant.bytes:>10,} bytes, "
            f"step {1e3 * wall:6.1f} ms, processor {1e3 * cpu:6.1f} ms, "
            f"relative to the own map: {wall / np.median(baseline.wall):.2f}, "
            f"processor {cpu / np.median(baseline.cpu):.2f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="Part of the names of the backbones."
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="Steps of each map."
    )
    options = parser.parse_args()
    for name, case in CASES.items():
        if options.only.lower() in name.lower():
            compare(name, case, options.rounds)


if __name__ == "__main__":
    main()
