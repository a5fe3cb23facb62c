"""Tasks and verifiers of reasoning-gym (2505.24760); the extra ``agentjax[envs]`` has it."""
