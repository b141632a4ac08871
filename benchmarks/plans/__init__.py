"""Compares predicted and measured step times of plans (`make bench-plan`).

`servers.py` measures tables on parameter servers, `mesh.py` measures Keras
models on a mesh of logical CPUs, and `report.py` compares the times.
`own_maps.py` compares plans with the layout maps that keras-hub ships.
"""
