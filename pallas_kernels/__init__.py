"""Sequence kernels for JAX, usable on their own: each folder holds one operation.

``api.py`` has the signature, the mathematics and the checks; ``reference.py`` is the slow truth;
the other files hold one implementation each. ``implementation=None`` picks the fastest one that was
measured for the backend and always works; a named one runs or raises.
"""
