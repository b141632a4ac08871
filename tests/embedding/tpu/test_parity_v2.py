"""Graphs on SparseCores match the graphs of TensorFlow's `TPUEmbeddingV2`.

Operations are compared as in test_parity.py. Only the checks of ids differ:
TensorFlow's class passes an id that is not a row of its table to the TPU.
"""

import copy
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import covering
from tests.embedding.tpu import canonical, traced_tpu
from tf_layoutmap.embedding.tpu import batches

if tf.__version__ < "2.21":
    pytest.skip(
        "TPUEmbeddingV2 of TensorFlow 2.20 supports one feature only",
        allow_module_level=True,
    )

tpu = tf.tpu.experimental.embedding

OPTIMIZERS = {
    "sgd": lambda rate: tpu.SGD(rate),
    "adagrad": lambda rate: tpu.Adagrad(rate, initial_accumulator_value=0.3),
    "adagrad_momentum": lambda rate: tpu.AdagradMomentum(
        rate, momentum=0.9, use_nesterov=True, exponent=3, beta2=0.9
    ),
    "adam": lambda rate: tpu.Adam(rate, beta_1=0.8, sum_inside_sqrt=False),
    "ftrl": lambda rate: tpu.FTRL(rate, l1_regularization_strength=0.01),
}


@dataclasses.dataclass(frozen=True)
class Case:
    optimizer: str = "sgd"
    num_cores: int = 2
    sparse_cores: int = 4
    # Form of the input of each feature.
    forms: str = "dense ragged"
    combiner: str = "sum"
    dims: tuple = (8, 6)
    has_weights: bool = False
    dynamic_rate: bool = False
    is_pipelined: bool = False
    quantized: bool = False
    stacking: bool = True
    structure: str = "dict"
    place: str = "lookup"
    gradients: str = "all"
    lookups: int = 1


CHOICES = {
    "optimizer": list(OPTIMIZERS),
    "num_cores": [1, 2, 4],
    "sparse_cores": [2, 4],
    "forms": ["dense", "ragged", "sparse", "dense ragged", "sparse sparse"],
    "combiner": ["sum", "mean", "sqrtn"],
    "dims": [(8, 8), (6, 6), (8, 6)],
    "has_weights": [False, True],
    "dynamic_rate": [False, True],
    "is_pipelined": [False, True],
    "quantized": [False, True],
    "stacking": [True, False],
    "structure": ["dict", "list", "nested"],
    "place": ["lookup", "enqueue", "device"],
    "gradients": ["all", "none"],
    "lookups": [1, 2],
}


def drawn_cases(number):
    generator = np.random.default_rng(0)
    return [
        Case(
            **{
                name: values[generator.integers(len(values))]
                for name, values in CHOICES.items()
            }
        )
        for _ in range(number)
    ]


CASES = list(
    dict.fromkeys(
        [
            *(
                dataclasses.replace(Case(), **{name: value})
                for name, values in CHOICES.items()
                for value in values
            ),
            *drawn_cases(60),
        ]
    )
)


def test_there_are_many_cases():
    assert len(CASES) >= 80


def marked_cases():
    pairwise = covering.covering(
        [list(dataclasses.asdict(case).values()) for case in CASES], 2
    )
    for index, case in enumerate(CASES):
        yield pytest.param(
            case, marks=[] if index in pairwise else [pytest.mark.exhaustive]
        )


def structured(case, flat):
    if case.structure == "list":
        return list(flat)
    if case.structure == "nested":
        return {"b": (flat[0],), "a": {"x": list(flat[1:])}}
    return dict(zip("ba", flat))


def in_order(case, flat):
    """Returns values of the features in the order of `case.forms`."""
    number = len(case.forms.split())
    places = tf.nest.flatten(structured(case, list(range(number))))
    return [flat[places.index(index)] for index in range(number)]


def feature_config_of(case, rate):
    optimizer = OPTIMIZERS[case.optimizer](rate)
    tables = [
        tpu.TableConfig(
            num_rows,
            dim,
            tf.ones_initializer(),
            optimizer=optimizer,
            combiner=case.combiner,
            name=f"table{index}",
            quantization_config=tpu.QuantizationConfig(4, -1.0, 0.5)
            if case.quantized
            else None,
        )
        for index, (num_rows, dim) in enumerate(zip((70, 100), case.dims))
    ]
    return structured(
        case,
        [
            # The samples of the second feature have two dimensions.
            tpu.FeatureConfig(tables[index], output_shape=[[8], [4, 4]][index])
            for index, _ in enumerate(case.forms.split())
        ],
    )


def spec_of(form, index, dtype):
    num_samples = [8, 16][index]
    if form == "ragged":
        return tf.RaggedTensorSpec([num_samples, None], dtype)
    if form == "sparse":
        return tf.SparseTensorSpec([num_samples, 5], dtype)
    return tf.TensorSpec([[8], [4, 4]][index], dtype)


def trace(case, cls):
    """Traces the step of `case` with the class `cls`, without a TPU."""
    strategy = traced_tpu.strategy_of(
        case.num_cores,
        embedding=traced_tpu.V2,
        sparse_cores=case.sparse_cores,
    )
    is_stacked = case.stacking and len(case.forms.split()) > 1
    variable = tf.Variable(0.5, trainable=False)
    rate = (lambda: variable * 2.0) if case.dynamic_rate else 0.25
    with (
        traced_tpu.replaced(),
        tf.variable_creator_scope(traced_tpu.variables_on_cpus),
        strategy.scope(),
    ):
        embedding = cls(
            feature_config_of(case, rate),
            None,
            case.is_pipelined,
            tpu.SparseCoreEmbeddingConfig(
                disable_table_stacking=not case.stacking,
                max_ids_per_chip_per_sample=32,
                max_ids_per_table={
                    "table0_table1" if is_stacked else "table0": 128
                },
            ),
        )
        embedding.build()

        def program(*values):
            return _program(case, strategy, embedding, list(values))

        forms = case.forms.split()
        specs = [
            spec_of(form, index, dtype)
            for dtype in (tf.int64, tf.float32)[: 1 + case.has_weights]
            for index, form in enumerate(forms)
        ]
        return (
            embedding,
            tf.function(program, autograph=False)
            .get_concrete_function(*specs)
            .graph,
        )


def _program(case, strategy, embedding, values):
    number = len(case.forms.split())
    features = structured(case, values[:number])
    weights = structured(case, values[number:]) if case.has_weights else None
    enqueued = None
    if case.place == "device":
        device = strategy.extended._tpu_devices.flatten()[0]
        enqueued = embedding.enqueue(features, weights, device)

    def core(features, weights, enqueued):
        for _ in range(case.lookups):
            if case.place == "lookup":
                activations, preserved = embedding(features, weights)
            else:
                if case.place == "enqueue":
                    enqueued = embedding.enqueue(features, weights)
                activations, preserved = embedding.dequeue(enqueued)
            gradients = in_order(case, tf.nest.flatten(activations))
            gradients = [gradient * 2.0 for gradient in gradients]
            # TensorFlow's class raises an error for a padded table.
            if case.gradients == "none" and case.dims[0] == 8:
                gradients[0] = None
            embedding.apply_gradients(structured(case, gradients), preserved)
        return activations

    return strategy.run(core, args=(features, weights, enqueued))


def rows_of(embedding):
    """Returns the layouts without the numbers of samples and features."""
    layouts = {}
    for name, layout in embedding.embedding_layouts.items():
        layouts[name] = copy.deepcopy(layout)
        # TensorFlow's class counts only the first feature.
        layouts[name].ClearField("per_sparse_core_batch_size")
        layouts[name].ClearField("num_features")
    return layouts


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("case", list(marked_cases()), ids=str)
def test_graph_and_layouts_match_tensorflow(case):
    stock, expected = trace(case, tpu.TPUEmbeddingV2)
    embedding, graph = trace(case, tlm.TPUEmbeddingV2)
    assert rows_of(embedding) == rows_of(stock)
    wanted = canonical.operations(expected)
    assert any("SparseDenseMatmulGrad" in kind for kind, _ in wanted)
    assert canonical.operations(graph, batches.ID_CHECK_SCOPE) == wanted
    # The ids of each feature are checked once in each lookup.
    checks = [op for op in graph.get_operations() if op.type == "Assert"]
    num_lookups = 1 if case.place == "device" else case.lookups
    assert len(checks) == num_lookups * len(case.forms.split())
