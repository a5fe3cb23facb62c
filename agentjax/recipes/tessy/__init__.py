"""TESSY (2604.14164): a teacher and a student write reasoning traces together."""
