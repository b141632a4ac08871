"""One of two processes that read a table and then end.

    python end_program.py FOLDER HOW

Process 0 writes the file `done` 2 seconds after the read, directly before it
ends. Process 1 ends after the read, with an error if HOW is "error". If HOW is
"late", the processes wait only 0.1 seconds for each other.
"""

import json
import os
import pathlib
import sys
import time

import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap import process_end

tpu = tf.tpu.experimental.embedding


def main(folder, how):
    if how == "late":
        process_end.WAIT_SECONDS = 0.1
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    table = tpu.TableConfig(5, 2, optimizer=tpu.SGD(0.1), name="words")
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            tpu.FeatureConfig(table), None, over_processes="sharded"
        )
    embedding.build()
    embedding.embedding_tables[table].numpy()
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        time.sleep(2)
        (pathlib.Path(folder) / "done").touch()
    elif how == "error":
        raise RuntimeError(how)


if __name__ == "__main__":
    main(*sys.argv[1:])
