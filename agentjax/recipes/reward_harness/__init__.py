"""RewardHarness (2605.08703): skills and tools that evolve over frozen judges."""
