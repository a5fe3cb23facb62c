"""The reward part "rubric": criteria a task has, judged or checked by rules (RaR, 2507.17746)."""
