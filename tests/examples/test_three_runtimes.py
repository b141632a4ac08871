"""`one_program_three_runtimes.py` prints equal numbers for every runtime."""

import re

import pytest

PROGRAM = "one_program_three_runtimes.py"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_host_and_emulated_tpu_agree_bit_by_bit(start):
    ended = start("--steps=20", "--cores=4")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"host engine +│ +1 │.*reference", ended.stdout)
    row = re.search(
        r"emulated TPU +│ +4 │.*?│ +([\d.]{8}) │ +([\d.]{8}) │ "
        "bitwise identical",
        ended.stdout,
    )
    # The last loss is lower than the first loss.
    assert float(row[2]) < float(row[1])
    # The results are 20 losses, and 300 rows of 8 columns, each with a slot
    # variable of the same size.
    assert "agree in all 4,820 numbers" in ended.stdout


def test_cores_that_do_not_divide_the_batch_raise(start):
    ended = start("--cores=3")
    assert ended.returncode != 0
    assert "--cores must divide the batch size, 64" in ended.stderr
