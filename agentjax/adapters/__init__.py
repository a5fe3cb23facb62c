"""Adapters: what wraps an outside package, program or service. The core chooses them by name."""
