"""Sandbox back ends that need a tool, an engine or a service; ``sandbox.config`` names them."""
