"""Signals: columns of a token that are computed after sampling, one module per signal; see
``signals.signal``."""

# Settings of a run contain settings of signals, and signals train networks. So the two packages
# import each other; this line makes them load in the same order, whichever is imported first.
import agentjax.training  # noqa: F401
