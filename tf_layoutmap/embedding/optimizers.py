"""Optimizers that only the host engine supports.

These optimizers are used like TensorFlow's TPU optimizers: as the argument
`optimizer` of `TPUEmbedding` or `TableConfig`. A TPU does not support these
optimizers.
"""

from __future__ import annotations

from typing import Unpack

from tf_layoutmap.embedding.configs.optimizer_specs import (
    HostOptimizer,
    HostOptions,
    LearningRate,
)

__all__ = ["LAMB", "HostOptimizer", "RowwiseAdagrad"]


def __dir__() -> list[str]:
    return __all__


class RowwiseAdagrad(HostOptimizer):
    """Adagrad optimizer with one accumulator per row.

    In Adagrad, each value of a row has an accumulator. Here, the slot variable
    `accumulators` has the shape `[num_rows, 1]`, so it needs `1 / dim` of the
    memory. A step updates each row `p` that it looked up. With the accumulator
    `a` of the row, and the sum `g` of its gradients, the update is:

        a += mean(g**2)
        p -= learning_rate / (sqrt(a) + epsilon) * g

    DLRM's `RWSAdagrad` and FBGEMM's `EXACT_ROWWISE_ADAGRAD` use the same rule
    (Mudigere et al., "Software-Hardware Co-design for Fast and Scalable
    Training of Deep Learning Recommendation Models", arXiv 2104.05158).

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> words = tf.tpu.experimental.embedding.TableConfig(
    ...     4, 2, tf.ones, tlm.optimizers.RowwiseAdagrad(0.5), "sum", "words")
    >>> embedding = tlm.TPUEmbedding(
    ...     tf.tpu.experimental.embedding.FeatureConfig(words), None)
    >>> embedding.enqueue(tf.constant([1]))
    >>> embedding.apply_gradients(tf.ones_like(embedding.dequeue()))
    >>> embedding.embedding_tables[words].numpy()[:2].tolist()
    [[1.0, 1.0], [0.5, 0.5]]
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-8,
        **options: Unpack[HostOptions],
    ):
        """Stores the settings, which `TPUEmbedding` checks later.

        Args:
          learning_rate: A number, or a callable without arguments.
          initial_accumulator_value: Initial value of `accumulators`, at least
            0.
          epsilon: Number above 0 that is added to the square root.
          **options: Arguments of `HostOptimizer`, such as `clipvalue` and
            `weight_decay_factor`, as in TensorFlow's optimizers.
        """
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon


class LAMB(HostOptimizer):
    """LAMB optimizer that treats each row as a separate layer.

    The rule is algorithm 2 in You et al., "Large Batch Optimization for Deep
    Learning", ICLR 2020, arXiv 1904.00962.

    The slot variables `momenta` (`m`) and `velocities` (`v`) have the shape of
    the table. The slot variable `steps` (`t`), `[num_rows, 1]`, contains the
    number of updates of each row. A step updates each row `p` that it looked
    up. With the sum `g` of the row's gradients, the update is:

        t += 1
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        m_hat, v_hat = m / (1 - beta_1**t), v / (1 - beta_2**t)
        r = m_hat / (sqrt(v_hat) + epsilon) + weight_decay * p
        p -= learning_rate * norm(p) / norm(r) * r

    If one of the norms is 0, the ratio of the norms is replaced by 1. The ratio
    is not clipped. Therefore an update changes a row by `learning_rate` times
    the norm of the row.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[HostOptions],
    ):
        """Stores the settings, which `TPUEmbedding` checks later.

        Args:
          learning_rate: A number, or a callable without arguments.
          beta_1: Decay of the momenta, at least 0 and below 1.
          beta_2: Decay of the velocities, at least 0 and below 1.
          epsilon: Number above 0 that is added to the square root.
          weight_decay: The parameter lambda in the paper. The weight decay is
            part of `r`, so it changes the direction of an update, but not its
            length. In contrast, `weight_decay_factor` decays the row after the
            update.
          **options: Arguments of `HostOptimizer`, such as `clipvalue` and
            `weight_decay_factor`, as in TensorFlow's optimizers.
        """
        super().__init__(learning_rate, **options)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.weight_decay = weight_decay
