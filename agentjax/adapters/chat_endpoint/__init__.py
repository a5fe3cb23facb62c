"""Models behind an endpoint with the OpenAI chat protocol. Needs the extra ``agentjax[web]``."""
