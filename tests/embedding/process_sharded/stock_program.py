"""One process of a group that writes a checkpoint for TensorFlow's class.

    python stock_program.py FOLDER

Trains sharded tables, and process 0 writes the checkpoint `end`.
"""

import json
import os
import pathlib
import sys

import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding import stock_class

NUM_STEPS = 2


def main(folder):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            stock_class.features(), None, over_processes="sharded"
        )
    stock_class.train(embedding, NUM_STEPS, strategy)
    tf.train.Checkpoint(embedding=embedding).write(
        str(pathlib.Path(folder) / (f"temporary_{worker}" if worker else "end"))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
