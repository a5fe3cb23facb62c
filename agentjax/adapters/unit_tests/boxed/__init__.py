"""Programs that run inside boxes: standard library only, sent there as source, never imported with
the rest. ``candidate`` answers calls of the code under test, ``tests`` runs the tests; see
``adapters.unit_tests`` for what lies between them.
"""
