"""The planner: chooses layouts and shards from memory budgets and costs."""
