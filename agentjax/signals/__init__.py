"""What is known of a token beyond its sampling, one module a signal; see ``signals.signal``."""
