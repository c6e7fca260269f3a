"""How chunk bytes travel between this process and the server."""
