"""The reward part "genrm": the answers of a group, compared in pairs (Nemotron 3)."""
