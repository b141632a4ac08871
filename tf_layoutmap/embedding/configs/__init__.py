"""Frozen specs of tables, features and optimizers.

Start at `config.py`, which reads TensorFlow's table and feature configs.
"""
