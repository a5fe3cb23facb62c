"""RAD-2 (2604.15308): a generator proposes trajectories, a discriminator chooses among them."""
