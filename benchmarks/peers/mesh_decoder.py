"""Program that trains a decoder of keras-hub on a mesh of logical CPUs.

The same program runs on this package, on TensorFlow without a mesh, and on JAX
in a Python environment without this package. Each line of the standard input is
a command, which is a JSON list. For each command, the program writes a result
as one line of JSON. The commands and their results are:

    ["open", contestant, name of the size, [batch, model], threads]
        times of the first step
    ["step"]      times of a training step
    ["predict"]   times of a batch of `predict`
    ["generate"]  times of the generation of 32 tokens
    ["peak"]      peak resident memory of the process in MiB

The contestant is "tlm", "tensorflow" or "jax". If the number of threads is not
0, each operation of "tlm" uses at most this number of threads. Times are two
numbers in milliseconds: wall-clock time, and processor time of all threads,
which depends less on other programs of the machine.
"""

import json
import os
import resource
import sys
import time

import numpy as np

# Sizes of the layers; the names state the number of parameters.
SIZES = {
    "20M": dict(vocabulary_size=24_000, hidden_dim=384, intermediate_dim=1_536),
    "70M": dict(vocabulary_size=32_000, hidden_dim=768, intermediate_dim=3_072),
}
NUM_LAYERS, NUM_HEADS = 6, 8
SAMPLES, LENGTH, STEPS = 4, 128, 4
PROMPTS, TOKENS = 2, 32


class Decoder:
    """A GPT-2 with random data."""

    def __init__(
        self, contestant: str, size: str, axes: list[int], threads: int = 0
    ):
        prepare(contestant, axes, threads)
        import keras
        import keras_hub

        if contestant != "tensorflow":
            keras.distribution.set_distribution(_parallel(axes))
        keras.utils.set_random_seed(1)
        self.model = keras_hub.models.GPT2CausalLM(
            keras_hub.models.GPT2Backbone(
                **SIZES[size],
                num_layers=NUM_LAYERS,
                num_heads=NUM_HEADS,
                max_sequence_length=LENGTH,
                dropout=0.0,
            ),
            preprocessor=None,
        )
        self.model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            sampler="greedy",
        )
        rng = np.random.default_rng(0)
        tokens = rng.integers(
            1, SIZES[size]["vocabulary_size"], [STEPS * SAMPLES, LENGTH + 1]
        ).astype(np.int32)
        self._inputs = {
            "token_ids": tokens[:, :-1],
            "padding_mask": np.ones([len(tokens), LENGTH], np.int32),
        }
        self._labels = tokens[:, 1:]
        mask = np.zeros([PROMPTS, 2 * TOKENS], np.int32)
        mask[:, :TOKENS] = 1
        self._prompts = {
            "token_ids": tokens[:PROMPTS, : 2 * TOKENS],
            "padding_mask": mask,
        }

    def first_step(self) -> list[float]:
        """Runs the first step, which compiles the model; returns its times."""
        return milliseconds(lambda: self.fit(SAMPLES))

    def fit(self, num_samples: int) -> None:
        """Trains the first samples for one epoch."""
        self.model.fit(
            {
                name: tensor[:num_samples]
                for name, tensor in self._inputs.items()
            },
            self._labels[:num_samples],
            batch_size=SAMPLES,
            shuffle=False,
            verbose=0,
        )

    def step(self) -> list[float]:
        """Trains several steps and returns the times of one step."""
        times = milliseconds(lambda: self.fit(STEPS * SAMPLES))
        return [milliseconds / STEPS for milliseconds in times]

    def predict(self) -> list[float]:
        """Predicts several batches and returns the times of one batch."""
        times = milliseconds(
            lambda: self.model.predict(
                self._inputs, batch_size=SAMPLES, verbose=0
            )
        )
        return [milliseconds / STEPS for milliseconds in times]

    def generate(self) -> list[float]:
        """Generates tokens and returns the times."""
        return milliseconds(
            lambda: self.model.generate(self._prompts, stop_token_ids=None)
        )

    def peak(self) -> float:
        """Returns the peak resident memory of the process in MiB."""
        return peak_memory()


def peak_memory() -> float:
    """Returns the peak resident memory of the process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def milliseconds(call) -> list[float]:
    """Returns the wall-clock time and the processor time of a call."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return [
        1e3 * (time.perf_counter() - start),
        1e3 * (time.process_time() - used),
    ]


def prepare(contestant: str, axes: list[int], threads: int) -> None:
    """Creates the logical devices, and selects the backend of Keras."""
    count = axes[0] * axes[1]
    if contestant == "jax":
        os.environ["KERAS_BACKEND"] = "jax"
        os.environ["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={count}"
        )
        return
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    if contestant == "tlm":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * count,
        )
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        import tf_layoutmap as tlm

        tlm.distribution.enable()


def _parallel(axes: list[int]):
    """Returns the distribution, which shards each block over two layers."""
    import keras

    mesh = keras.distribution.DeviceMesh(
        axes, ["batch", "model"], keras.distribution.list_devices()
    )
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*token_embedding/embeddings"] = ("model", None)
    layouts[".*(query|key|value)/kernel"] = (None, "model", None)
    layouts[".*attention_output/kernel"] = ("model", None, None)
    layouts[".*intermediate_dense/kernel"] = (None, "model")
    layouts[".*output_dense/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )


def main() -> None:
    """Runs commands until the standard input ends."""
    # Libraries also print to the standard output.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    decoder = None
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "open":
            decoder = Decoder(*arguments)
            answer = decoder.first_step()
        else:
            answer = getattr(decoder, verb)(*arguments)
        print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
