"""What is known of a token beyond its sampling, one module a signal; see ``signals.signal``."""

# Settings of a run name settings of signals, which train networks: the two packages import modules
# of each other, and they load in one order whichever of them is asked for first.
import agentjax.training  # noqa: F401
