"""C2 (2604.13618): a generator and a verifier of rubrics, trained on preferences."""
