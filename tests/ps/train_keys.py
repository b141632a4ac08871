"""Trains open vocabularies on servers; test_key_faults.py starts it.

python -m tests.ps.train_keys FOLDER [OPTIONS AS JSON]

For each use of a key, a closure applies the gradient 1 to the row of the key.
Each closure uses two keys of the table `words`. Each closure also looks up new
keys of the table `stream`. In total, there are more keys than `stream` has
rows. With the option `shared`, the tables `words_2` and `stream_2` share the
vocabularies of these tables, and look up the same keys.

The program trains until the file FOLDER/stop exists, and then prints the tables
and the reports of evicted keys. The program writes a delta after each chunk,
and compares the deltas with a checkpoint at the end.
"""

import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.ps.train import worked

tpu = tf.tpu.experimental.embedding
RATE = 0.5
KEYS = [7, 11, 7]
DIMS = {"words": 4, "stream": 4}
# Tables that share the vocabularies of the other tables.
SHARED = {"words_2": "words", "stream_2": "stream"}


def embedding(on_evict=None, *, shared=False):
    others = SHARED if shared else {}
    return tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    64,
                    DIMS.get(name, 2),
                    initializer=tf.zeros_initializer(),
                    name=name,
                )
            )
            for name in (*others, *DIMS)
        },
        tpu.SGD(RATE),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(64),
            "stream": tlm.vocabulary.OpenVocabulary(64, on_evict=on_evict),
            **others,
        },
        partitioner=tlm.partitioners.FixedShardsPartitioner(2),
    )


def shared_rows_in(embeddings):
    """Returns the rows of the tables that share a vocabulary."""
    return {
        config.name: tf.gather(
            tf.convert_to_tensor(table),
            embeddings.vocabularies[config.name].lookup(
                embeddings.vocabularies[SHARED[config.name]].keys()
            ),
        ).numpy()
        for config, table in embeddings.embedding_tables.items()
        if config.name in SHARED
    }


def found_in(embeddings):
    rows = {
        config.name: tf.convert_to_tensor(table).numpy()
        for config, table in embeddings.embedding_tables.items()
    }
    words, stream = (
        embeddings.vocabularies[one] for one in ("words", "stream")
    )
    keys = words.keys().numpy()
    places = words.lookup(keys).numpy()
    counts = tf.convert_to_tensor(words.count_variable).numpy().ravel()
    return {
        "rows": {
            int(key): rows["words"][place].tolist()
            for key, place in zip(keys, places, strict=True)
        },
        "counts": {
            int(key): int(counts[place])
            for key, place in zip(keys, places, strict=True)
        },
        "words": words.stats(),
        "stream": stream.stats(),
        # Each row must be 0 or -RATE, because each key is used once with
        # gradient 1.
        "stream_rows": np.unique(
            rows["stream"][stream.lookup(stream.keys()).numpy()]
        ).tolist(),
        "steps": [
            sorted(
                {
                    int(copy[0])
                    for copy in embeddings._variables[name][
                        "vocabulary_numbers"
                    ].variables
                }
            )
            for name in ("words", "stream")
        ],
    }


def tensors(path):
    """Returns the tensors of tables in a checkpoint as bytes."""
    reader = tf.train.load_checkpoint(str(path))
    return {
        key: np.asarray(reader.get_tensor(key)).tobytes()
        for key in reader.get_variable_to_shape_map()
        if key.startswith("embedding/")
    }


def main():
    folder = pathlib.Path(sys.argv[1])
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    chunk = options.pop("chunk", 4)
    work = options.pop("work", 0)
    shared = options.pop("shared", False)
    strategy = tlm.ps.connect(
        cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        timeout_seconds=60,
    )
    gone = []
    with strategy.scope():
        embeddings = embedding(gone.append, shared=shared)

    def dataset_fn():
        # The datasets of all workers contain different keys.
        return tf.data.Dataset.random(rerandomize_each_iteration=True).batch(24)

    def step(fresh):
        keys = {"words": tf.constant(KEYS, tf.int64), "stream": fresh}
        if shared:
            keys.update({other: keys[name] for other, name in SHARED.items()})
        embeddings.enqueue(keys)
        activations = embeddings.dequeue()
        embeddings.apply_gradients(
            {name: tf.ones_like(one) for name, one in activations.items()}
        )
        return worked(work)

    run = tlm.ps.Run(
        strategy,
        step,
        dataset_fn,
        folder / "checkpoints",
        objects={"embedding": embeddings},
        **options,
    )
    saved = tf.train.Checkpoint(embedding=embeddings)
    base = saved.write(str(folder / "base"))
    writer = tlm.deltas.DeltaWriter(embeddings, folder / "deltas", base=base)
    while not (folder / "stop").exists():
        run.steps(chunk)
        writer.write()
        print(f"DONE {run.num_done}", flush=True)
        if embeddings.stats()["num_repeated"]:
            print("REPEATED", flush=True)
    end = saved.write(str(folder / "end"))
    full = tlm.deltas.apply(base, folder / "deltas", folder / "full")
    print(
        "FOUND "
        + json.dumps(
            {
                **found_in(embeddings),
                "num_reported": {
                    table: sum(
                        len(one.keys) for one in gone if one.table == table
                    )
                    for table in {one.table for one in gone}
                },
                "reported_rows": np.unique(
                    np.concatenate([one.rows.ravel() for one in gone])
                ).tolist(),
                "shared_rows": {
                    name: np.unique(one, axis=0).tolist()
                    for name, one in shared_rows_in(embeddings).items()
                },
                "num_deltas": len(writer.deltas),
                "num_parts": len(writer.deltas[0].meta.files) - 1,
                "deltas_are_equal": tensors(full) == tensors(end),
                "num_done": run.num_done,
                "num_repeated": embeddings.stats()["num_repeated"],
            }
        ),
        flush=True,
    )
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    main()
