"""Checks that `generate` of keras-hub runs its loop from the host, sharded."""

import os
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.ops import device_loops, host_loops

keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)
models = keras_hub.models
samplers = keras_hub.samplers
dtensor = tf.experimental.dtensor

VOCABULARY, LENGTH = 32, 8
HEADS = dict(
    vocabulary_size=VOCABULARY,
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=16,
    dropout=0.0,
    max_sequence_length=LENGTH,
)
QUERIES = dict(
    vocabulary_size=VOCABULARY,
    num_layers=1,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=8,
    intermediate_dim=16,
)
BACKBONES = {
    "GPT-2": lambda: models.GPT2CausalLM(
        models.GPT2Backbone(**HEADS), preprocessor=None
    ),
    "OPT": lambda: models.OPTCausalLM(
        models.OPTBackbone(**HEADS), preprocessor=None
    ),
    "GPT-NeoX": lambda: models.GPTNeoXCausalLM(
        models.GPTNeoXBackbone(**HEADS), preprocessor=None
    ),
    "Llama": lambda: models.LlamaCausalLM(
        models.LlamaBackbone(**QUERIES), preprocessor=None
    ),
    "Mistral": lambda: models.MistralCausalLM(
        models.MistralBackbone(**QUERIES, sliding_window=4), preprocessor=None
    ),
    "Gemma": lambda: models.GemmaCausalLM(
        models.GemmaBackbone(**QUERIES, head_dim=4), preprocessor=None
    ),
    "Falcon": lambda: models.FalconCausalLM(
        models.FalconBackbone(
            vocabulary_size=VOCABULARY,
            num_layers=1,
            num_attention_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
        ),
        preprocessor=None,
    ),
    "Bloom": lambda: models.BloomCausalLM(
        models.BloomBackbone(
            **{k: v for k, v in HEADS.items() if k != "max_sequence_length"}
        ),
        preprocessor=None,
    ),
    "Qwen": lambda: models.QwenCausalLM(
        models.QwenBackbone(**QUERIES), preprocessor=None
    ),
    "Mixtral": lambda: models.MixtralCausalLM(
        models.MixtralBackbone(**QUERIES, num_experts=4), preprocessor=None
    ),
}
SAMPLERS = {
    "greedy": samplers.GreedySampler,
    "top-k": lambda: samplers.TopKSampler(k=5, seed=3),
    "top-p": lambda: samplers.TopPSampler(p=0.8, seed=4),
    "random": lambda: samplers.RandomSampler(seed=5),
    "beam": lambda: samplers.BeamSampler(num_beams=3),
    "contrastive": lambda: samplers.ContrastiveSampler(k=3, alpha=0.5),
}
# Matrices are sharded as in Megatron-LM: attention by heads, the first
# feedforward layer by columns, and the second feedforward layer by rows.
AXES = {
    ".*token_embedding.embeddings": ("model", None),
    ".*(query|key|value|query_key_value)(_dense)?.kernel": (
        None,
        "model",
        None,
    ),
    ".*(attention_output|output_dense).kernel": ("model", None, None),
    ".*(feedforward_|mlp_)(intermediate|gate)_dense.kernel": (None, "model"),
    ".*(feedforward_|mlp_)output_dense.kernel": ("model", None),
    ".*dense_h_to_4h.kernel": (None, "model"),
    ".*dense_4h_to_h.kernel": ("model", None),
}


def axes_for(model):
    """Returns the entries of `AXES` that fit all weights that they match."""
    paths = {w.path.replace("/", "."): len(w.shape) for w in model.weights}
    found = {}
    for key, axes in AXES.items():
        for path, rank in paths.items():
            if (
                re.fullmatch(key, path)
                and rank == len(axes)
                and "moe" not in path
            ):
                found[path.replace(".", "/") + "$"] = axes
    return found


def pair_of(name, strict=True):
    """Returns a model, and the same model on a strict layout map."""
    keras.utils.set_random_seed(3)
    plain = BACKBONES[name]()
    # Larger weights, so that the tokens depend on the prompt.
    rng = np.random.default_rng(0)
    plain.set_weights(
        [
            w + 0.3 * rng.normal(size=w.shape).astype(w.dtype)
            for w in plain.get_weights()
        ]
    )
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=strict)
    axes = axes_for(plain)
    assert len(axes) >= 4
    for key, value in axes.items():
        layout_map[key] = layout_of(mesh, *value)
    with tlm.layout_map_scope(layout_map):
        model = BACKBONES[name]()
    model.set_weights(plain.get_weights())
    return plain, model


def prompt_of(seed=0, batch=4, length=3):
    rng = np.random.default_rng(seed)
    return {
        "token_ids": rng.integers(1, VOCABULARY, (batch, LENGTH)).astype(
            "int32"
        ),
        "padding_mask": np.repeat(
            np.arange(LENGTH)[None] < length, batch, 0
        ).astype("int32"),
    }


def tokens_of(model, stop=None, **options):
    return np.asarray(
        model.generate(prompt_of(**options), stop_token_ids=stop)["token_ids"]
    )


@pytest.fixture(autouse=True)
def no_warning():
    """Raises an error if a function is replicated with gathered weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlm.layout.LayoutMapWarning)
        yield


@pytest.fixture
def loops(monkeypatch):
    """Records the loop variables and the number of steps of each loop.

    The host runs all steps.
    """
    monkeypatch.setattr(device_loops, "can_run_on", lambda mesh: False)
    found = []
    run = host_loops._Loop.run

    def recorded(loop, values):
        before = [values[id(x)] for x in loop.variables]
        step, steps = loop.step, []
        loop.step = lambda *args: steps.append(1) or step(*args)
        loop.step.captures = step.captures
        try:
            after = run(loop, values)
        finally:
            loop.step = step
        found.append((before, after, len(steps)))
        return after

    monkeypatch.setattr(host_loops._Loop, "run", recorded)
    return found


@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_tokens_equal_those_of_one_device(name):
    plain, model = pair_of(name)
    for one in (plain, model):
        one.compile(sampler="greedy")
    for stop in (None, [3, 7, 11]):
        np.testing.assert_array_equal(
            tokens_of(model, stop), tokens_of(plain, stop)
        )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_choose_the_tokens_of_one_device(sampler):
    plain, model = pair_of("GPT-2")
    for one in (plain, model):
        one.compile(sampler=SAMPLERS[sampler]())
    for stop in (None, [3, 7, 11]):
        for seed in range(3):
            np.testing.assert_array_equal(
                tokens_of(model, stop, seed=seed),
                tokens_of(plain, stop, seed=seed),
            )
    states = [
        [np.asarray(v) for v in one.sampler.variables] for one in (plain, model)
    ]
    np.testing.assert_array_equal(*states)


@pytest.mark.parametrize("sampler", ["greedy", "top-k"])
def test_devices_repeat_the_first_step_without_the_host(sampler, monkeypatch):
    plain, model = pair_of("GPT-2")
    for one in (plain, model):
        one.compile(sampler=SAMPLERS[sampler]())
    calls, run = [], host_loops._Loop._run_step
    monkeypatch.setattr(
        host_loops._Loop,
        "_run_step",
        lambda loop, *args: calls.append(1) or run(loop, *args),
    )
    for stop in (None, [3]):
        for number in range(3):
            # Prompts of another length need no new trace.
            options = dict(seed=number, length=3 + number)
            np.testing.assert_array_equal(
                tokens_of(model, stop, **options),
                tokens_of(plain, stop, **options),
            )
            assert len(calls) == 1
        calls.clear()
    for seed, expected in zip(model.sampler.variables, plain.sampler.variables):
        np.testing.assert_array_equal(seed, expected)


def test_the_cache_stays_sharded(loops):
    _, model = pair_of("GPT-2")
    model.compile(sampler="greedy")
    tokens_of(model)
    ((before, after, steps),) = loops
    assert steps == LENGTH - 3
    for variables in (before, after):
        # The keys and the values of the only layer.
        caches = [x for x in variables if x.shape.rank == 4]
        assert len(caches) == 2
        for cache in caches:
            assert dtensor.fetch_layout(cache).sharding_specs == [
                "batch",
                "unsharded",
                "model",
                "unsharded",
            ]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_stop_tokens_end_the_loop_early(loops):
    plain, model = pair_of("GPT-2")
    for one in (plain, model):
        one.compile(sampler="greedy")
    first = tokens_of(plain, batch=1)[0, 3]
    assert tokens_of(model, [int(first)], batch=1)[0, 3] == first
    assert [steps for *_, steps in loops] == [1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_other_prompts_and_weights_are_used_without_a_new_trace(monkeypatch):
    plain, model = pair_of("GPT-2")
    for one in (plain, model):
        one.compile(sampler="greedy")
    steps = []
    original = type(model).generate_step

    def counted(self, *args, **kwargs):
        steps.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate_step", counted)
    tokens_of(model)
    # One trace for a single device, which is incomplete, and one for the mesh.
    assert len(steps) == 2
    found = [tokens_of(model, seed=1)]
    weights = [np.roll(w, 1) for w in plain.get_weights()]
    for one in (plain, model):
        one.set_weights(weights)
    found.append(tokens_of(model, seed=1))
    assert len(steps) == 2
    assert not np.array_equal(*found)
    np.testing.assert_array_equal(found[1], tokens_of(plain, seed=1))


PROGRAM = """
import numpy as np
from tests.layout.replication import test_generate

_, model = test_generate.pair_of("GPT-2")
model.compile(sampler="greedy")
test_generate.tokens_of(model, stop=[3])
sharded = {
    "x".join(map(str, w.shape))
    for w in model.weights
    if not w.value.layout.is_fully_replicated()
}
assert len(sharded) >= 3
print("sharded", *sharded)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_compiled_functions_gather_no_weight(tmp_path):
    # TensorFlow reads these variables when it is imported.
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ
        | {
            "TF_DUMP_GRAPH_PREFIX": str(tmp_path),
            "TF_CPP_VMODULE": "dtensor_mlir_passes=5",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    sharded = set(result.stdout.split("sharded ")[1].split())
    for part in ("generate_step", "loop_step", "after_loop"):
        dumps = [
            *tmp_path.glob(f"*after_DTensorSPMDExpansion.*{part}*.mlir"),
        ]
        # Each part is compiled once.
        assert len(dumps) == 1
        gathered = {
            shape
            for line in dumps[0].read_text().splitlines()
            if "tf.DTensorAllGather" in line
            for shape in re.findall(r"-> tensor<([0-9x]+)x\w+>", line)
        }
        # The tokens are gathered, so the pattern matches. The logits of half of
        # the batch are not gathered.
        assert part != "loop_step" or gathered == {f"4x{LENGTH}"}
        assert not gathered & sharded
