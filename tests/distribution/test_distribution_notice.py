"""A distribution of Keras that has no effect causes one warning."""

import subprocess
import sys
import textwrap

import keras
import pytest

from tests.distribution import stock
from tests.processes import ROOT
from tf_layoutmap._core import distribution_notice

_SECONDS = 120

# Without a use of its API, importing the package runs no other code of it.
PROGRAM = """
import sys
{before}
import tf_layoutmap as tlm
assert "keras" not in sys.modules or {imports_keras_first}
import keras

assert tlm.process.patches() == ()
{enable}
distribution = {distribution}
keras.distribution.set_distribution(distribution)
for _ in range(2):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
print(sorted({{patch.group for patch in tlm.process.patches()}}))
"""


def run(before="", enable="", distribution="keras.distribution.DataParallel()"):
    program = PROGRAM.format(
        before=before,
        enable=enable,
        distribution=distribution,
        imports_keras_first=bool(before),
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.count("shards nothing before"), done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import keras"])
def test_a_distribution_without_effect_causes_one_warning(before):
    assert run(before) == (1, "[]\n")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("enable", "distribution", "groups"),
    [
        ("", "None", []),
        ("", "tlm.distribution.DataParallel()", ["keras3"]),
        (
            "tlm.distribution.enable()",
            "keras.distribution.DataParallel()",
            ["checkpoints", "keras3", "keras_distribution", "memory", "mesh"],
        ),
    ],
)
def test_a_distribution_with_an_effect_causes_no_warning(
    enable, distribution, groups
):
    found, printed = run("", enable, distribution)
    assert found == 0
    assert set(groups) <= set(eval(printed))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_disable_leaves_no_replaced_name():
    switch = (
        "tlm.distribution.enable()\n"
        "assert {patch.group for patch in tlm.process.patches()} == {'keras3', "
        "'keras_distribution'}\n"
        "tlm.distribution.disable()"
    )
    # After `disable`, the distribution has no effect again.
    assert run("", switch) == (1, "[]\n")
    warned = (
        "import gc\n"
        "keras.distribution.set_distribution(keras.distribution.DataParallel())"
        "\ngc.collect()\n"
    )
    assert run("", warned + switch) == (1, "[]\n")


@stock.creates_distributions
def test_the_warning_points_at_the_program(monkeypatch):
    monkeypatch.setattr(distribution_notice, "_warned", False)
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(
            devices=keras.distribution.list_devices("cpu")[:1]
        )
    )
    try:
        with pytest.warns(UserWarning, match="shards nothing before") as caught:
            distribution_notice._check("stop", {})
    finally:
        keras.distribution.set_distribution(None)
    assert [one.filename for one in caught] == [__file__]
