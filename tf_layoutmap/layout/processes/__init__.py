"""What several processes that train one model agree on before each step."""
