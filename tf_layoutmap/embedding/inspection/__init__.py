"""Analysis of the ids of a dataset before training.

Start at `inspect_ids.py`. `id_counts.py` counts ids. `sparse_core_counts.py`
counts the ids that SparseCores exchange, and `sparse_core_limits.py` computes
limits from these counts. `html_report.py` and `svg_plots.py` format the
results.
"""
