"""Parts that serve: an LMCache server and a CPU engine, and the demo that joins them."""
