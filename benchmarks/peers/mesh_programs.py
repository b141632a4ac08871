"""Program that runs small models on a mesh, and counts their compiled programs.

The same program runs on this package, on TensorFlow without a mesh, and on JAX
in a Python environment without this package. Each line of the standard input is
a command, which is a JSON list. For each command, the program writes a result
as one line of JSON. The commands and their results are:

    ["open", contestant, name of the model, [batch, model], threads]
        times of the first training step
    ["step"]      times of a training step
    ["predict"]   times of a step of `predict`
    ["generate"]  times of the generation of tokens, decoders only
    ["count"]     ops, kernels, collectives and sent bytes of each program that
                  has run, by verb; of `generate`, of one token
    ["peak"]      peak resident memory of the process in MiB

The contestant is "tlm", "tensorflow" or "jax"; programs of "tensorflow" are not
counted. Times are two numbers in milliseconds: wall-clock time, and processor
time of all threads.
"""

import dataclasses
import json
import os
import sys
from typing import Any

import numpy as np

from benchmarks.peers import hlo_counts, mesh_decoder

STEPS = 4
# Programs of Keras on JAX, by the name of the function that is compiled.
_OF_JAX = {
    "train_step": "step",
    "predict_step": "predict",
    "compiled_generate_function": "generate",
}


class _Mlp:
    """Dense layers whose units and inputs are sharded alternately."""

    generates = False
    layouts = {
        r"wide\d/kernel": (None, "model"),
        r"wide\d/bias": ("model",),
        r"narrow\d/kernel": ("model", None),
    }
    sizes = dict(samples=256, dim=512, hidden=2_048)

    def make(self) -> Any:
        import keras

        x = inputs = keras.Input([self.sizes["dim"]])
        for number in range(2):
            x = keras.layers.Dense(
                self.sizes["hidden"], "relu", name=f"wide{number}"
            )(x)
            x = keras.layers.Dense(self.sizes["dim"], name=f"narrow{number}")(x)
        return keras.Model(inputs, x)

    def data(self, rng: np.random.Generator) -> tuple[Any, Any]:
        shape = [self.sizes["samples"], self.sizes["dim"]]
        return tuple(rng.normal(size=shape).astype(np.float32) for _ in "xy")

    loss = "mse"


class _UNet:
    """A U-Net: blocks of two convolutions, at three resolutions.

    The first convolution of a block is sharded by its output channels, and the
    second one by its input channels.
    """

    generates = False
    layouts = {
        r"wide\d/kernel": (None, None, None, "model"),
        r"wide\d/bias": ("model",),
        r"norm\d/(gamma|beta|moving_mean|moving_variance)": ("model",),
        r"narrow\d/kernel": (None, None, "model", None),
        # The last dimension of this kernel contains the input channels.
        r"up\d/kernel": (None, None, None, "model"),
    }
    sizes = dict(samples=8, size=64, filters=(32, 64, 128))

    def _block(self, x: Any, filters: int, number: int) -> Any:
        from keras import layers

        x = layers.Conv2D(filters, 3, padding="same", name=f"wide{number}")(x)
        x = layers.BatchNormalization(name=f"norm{number}")(x)
        x = layers.ReLU()(x)
        x = layers.Conv2D(filters, 3, padding="same", name=f"narrow{number}")(x)
        x = layers.BatchNormalization(name=f"last_norm{number}")(x)
        return layers.ReLU()(x)

    def make(self) -> Any:
        import keras
        from keras import layers

        size, filters = self.sizes["size"], self.sizes["filters"]
        x = inputs = keras.Input([size, size, 3])
        skipped = []
        number = 0
        for count in filters[:-1]:
            x = self._block(x, count, number)
            skipped.append(x)
            x = layers.MaxPooling2D()(x)
            number += 1
        x = self._block(x, filters[-1], number)
        for level, count in enumerate(reversed(filters[:-1])):
            number += 1
            x = layers.Conv2DTranspose(
                count, 2, strides=2, padding="same", name=f"up{level}"
            )(x)
            x = layers.Concatenate()([skipped.pop(), x])
            x = self._block(x, count, number)
        return keras.Model(inputs, layers.Conv2D(4, 1, name="classes")(x))

    def data(self, rng: np.random.Generator) -> tuple[Any, Any]:
        shape = [self.sizes["samples"], *[self.sizes["size"]] * 2]
        images = rng.normal(size=[*shape, 3]).astype(np.float32)
        return images, rng.integers(0, 4, shape).astype(np.int32)

    @property
    def loss(self) -> Any:
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class _Decoder:
    """A decoder of keras-hub."""

    generates = True
    layouts = {
        ".*token_embedding/embeddings": ("model", None),
        ".*token_embedding/reverse_embeddings": (None, "model"),
        ".*(query|key|value)/kernel": (None, "model", None),
        ".*attention_output/kernel": ("model", None, None),
        ".*(intermediate|gate)_dense/kernel": (None, "model"),
        ".*output_dense/kernel": ("model", None),
    }
    sizes = dict(samples=4, vocabulary=24_000, length=128)

    def data(self, rng: np.random.Generator) -> tuple[Any, Any]:
        samples, length = self.sizes["samples"], self.sizes["length"]
        tokens = rng.integers(
            1, self.sizes["vocabulary"], [samples, length + 1]
        ).astype(np.int32)
        inputs = {
            "token_ids": tokens[:, :-1],
            "padding_mask": np.ones([samples, length], np.int32),
        }
        return inputs, tokens[:, 1:]

    @property
    def loss(self) -> Any:
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class _Gpt2(_Decoder):
    """A GPT-2 with 20 million parameters, as in `mesh_decoder`."""

    def make(self) -> Any:
        import keras_hub

        return keras_hub.models.GPT2CausalLM(
            keras_hub.models.GPT2Backbone(
                **mesh_decoder.SIZES["20M"],
                num_layers=mesh_decoder.NUM_LAYERS,
                num_heads=mesh_decoder.NUM_HEADS,
                max_sequence_length=self.sizes["length"],
                dropout=0.0,
            ),
            preprocessor=None,
        )


class _Grouped(_Decoder):
    """A Llama in which four heads of queries use the same key and value."""

    sizes = dict(samples=4, vocabulary=8_000, length=128)

    def make(self) -> Any:
        import keras_hub

        return keras_hub.models.LlamaCausalLM(
            keras_hub.models.LlamaBackbone(
                vocabulary_size=self.sizes["vocabulary"],
                num_layers=4,
                num_query_heads=8,
                num_key_value_heads=2,
                hidden_dim=256,
                intermediate_dim=768,
            ),
            preprocessor=None,
        )


MODELS = {"decoder": _Gpt2, "grouped": _Grouped, "unet": _UNet, "mlp": _Mlp}


class Program:
    """A model with random data."""

    def __init__(
        self, contestant: str, name: str, axes: list[int], threads: int = 0
    ):
        self._contestant = contestant
        self._programs: dict[str, Any] = {}
        mesh_decoder.prepare(contestant, axes, threads)
        if contestant == "jax":
            _record_compiled(self._programs)
        import keras

        case = MODELS[name]()
        if contestant != "tensorflow":
            keras.distribution.set_distribution(_parallel(case.layouts, axes))
        keras.utils.set_random_seed(1)
        self.model = case.make()
        self.model.compile(
            keras.optimizers.Adam(1e-4),
            case.loss,
            **({"sampler": "greedy"} if case.generates else {}),
        )
        self._devices = axes[0] * axes[1]
        self.x, self.y = case.data(np.random.default_rng(0))
        self._samples = len(self.y)

    def _repeated(self, data: Any, count: int) -> Any:
        if isinstance(data, dict):
            return {k: self._repeated(v, count) for k, v in data.items()}
        return np.concatenate([data] * count)

    def first_step(self) -> list[float]:
        """Runs the first step, which compiles the model; returns its times."""
        return mesh_decoder.milliseconds(lambda: self.fit(1))

    def fit(self, steps: int) -> Any:
        """Trains several steps."""
        return self.model.fit(
            self._repeated(self.x, steps),
            self._repeated(self.y, steps),
            batch_size=self._samples,
            shuffle=False,
            verbose=0,
        )

    def step(self) -> list[float]:
        """Trains several steps and returns the times of one step."""
        times = mesh_decoder.milliseconds(lambda: self.fit(STEPS))
        return [milliseconds / STEPS for milliseconds in times]

    def predict(self) -> list[float]:
        """Predicts several batches and returns the times of one batch."""
        x = self._repeated(self.x, STEPS)
        times = mesh_decoder.milliseconds(
            lambda: self.model.predict(x, batch_size=self._samples, verbose=0)
        )
        return [milliseconds / STEPS for milliseconds in times]

    def generate(self) -> list[float]:
        """Generates tokens and returns the times."""
        tokens = self.x["token_ids"][: mesh_decoder.PROMPTS]
        mask = np.zeros([len(tokens), 2 * mesh_decoder.TOKENS], np.int32)
        mask[:, : mesh_decoder.TOKENS] = 1
        prompts = {
            "token_ids": tokens[:, : 2 * mesh_decoder.TOKENS],
            "padding_mask": mask,
        }
        if self._contestant == "tlm":
            _record_tokens(self._programs)
        return mesh_decoder.milliseconds(
            lambda: self.model.generate(prompts, stop_token_ids=None)
        )

    def peak(self) -> float:
        """Returns the peak resident memory of the process in MiB."""
        return mesh_decoder.peak_memory()

    def count(self) -> dict[str, dict[str, float]]:
        """Returns the counts of the programs that have run, by verb."""
        if self._contestant == "jax":
            return {
                verb: dataclasses.asdict(
                    hlo_counts.Module(text, self._devices).counts(
                        of_loop=verb == "generate"
                    )
                )
                for verb, text in self._programs.items()
            }
        from tf_layoutmap.layout.replication import measured, program_counts

        names = {
            "step" if kind == "train" else kind: program.name
            for kind, program in measured._of_models[self.model].items()
        }
        if self._programs:
            # The last program is the part after the loop.
            names["generate"] = list(self._programs)[-2]
        return {
            verb: dataclasses.asdict(program_counts.count(name))
            for verb, name in names.items()
        }


def _record_tokens(programs: dict[str, Any]) -> None:
    """Records the functions of a split `generate`, in the order of calls."""
    import tensorflow as tf

    from tf_layoutmap.layout.ops import host_loops

    if programs:
        return
    run = host_loops._Part.__call__

    def recorded(part: Any, *args: Any) -> Any:
        name = tf.compat.as_str(part._function.name)
        programs.pop(name, None)
        programs[name] = part
        return run(part, *args)

    host_loops._Part.__call__ = recorded


def _parallel(layouts: dict, axes: list[int]) -> Any:
    import keras

    mesh = keras.distribution.DeviceMesh(
        axes, ["batch", "model"], keras.distribution.list_devices()
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, value in layouts.items():
        layout_map[key] = value
    return keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


def _record_compiled(programs: dict[str, Any]) -> None:
    """Records the compiled text of the functions of `_OF_JAX`."""
    import jax

    original = jax.jit

    def jit(*functions: Any, **options: Any) -> Any:
        compiled = original(*functions, **options)
        function = functions[0] if functions else None
        name = _OF_JAX.get(getattr(function, "__name__", ""))
        if name is None:
            return compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            # The call donates its arguments, so the program is compiled first.
            if name not in programs:
                programs[name] = (
                    compiled.lower(*args, **kwargs).compile().as_text()
                )
            return compiled(*args, **kwargs)

        return call

    jax.jit = jit


def main() -> None:
    """Runs commands until the standard input ends."""
    # Libraries also print to the standard output.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program: Any = None
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "open":
            program = Program(*arguments)
            answer = program.first_step()
        else:
            answer = getattr(program, verb)(*arguments)
        print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
