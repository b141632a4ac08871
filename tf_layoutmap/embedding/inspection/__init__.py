"""Analysis of the ids of a dataset before training.

Start at `inspect_ids.py`. `id_counts.py` counts ids. `html_report.py` and
`svg_plots.py` format the results.
"""
