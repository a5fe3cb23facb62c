"""PivotRL (2603.21383): the turns of experts' trajectories that a policy can learn from."""
