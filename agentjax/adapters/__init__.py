"""What wraps an outside package or speaks an outside protocol; the core reaches it by name."""
