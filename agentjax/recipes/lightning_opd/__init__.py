"""Lightning OPD (2604.13010): episodes are played and scored once, and trained on as stored."""
