"""Tools that need a package or a program of others; ``tools.config`` names them."""
