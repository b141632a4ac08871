"""The planner: chooses layouts and shards from memory budgets and costs.

Start at `planner.py`. `problem.py` defines the input of the search, which
`tables.py` creates from feature configs. `search.py` selects the choices, and
`plan.py` presents the result. `probe.py` measures the costs of the machine.
"""
