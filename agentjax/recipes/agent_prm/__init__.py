"""AgentPRM (2511.08325): promise and progress of steps, and the loss of a model of them."""
