"""Compiles the functions of models for TPUs, on a machine without a TPU.

`python -m tests.accelerators.tpu_compiler` runs three kinds of processes:

1. `mesh_functions` trains each model of `models` on a mesh and writes the
   functions that DTensor compiles for one device. `strategy_functions` does the
   same for a step under `TPUStrategy`.
2. `lowering` replaces the collectives (`collectives`) and lets XLA convert the
   functions to StableHLO.
3. `compiling` compiles StableHLO for TPUs with libtpu, in an environment with
   JAX and without TensorFlow.

`page` then writes the tables of docs/tpu_compilation.md.
"""
