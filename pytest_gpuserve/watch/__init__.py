"""Is it moving? Progress signals, phases per rank, budgets."""
