"""A long run over a real server that is full, killed and restarted."""
