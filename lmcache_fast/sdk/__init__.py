"""LMCache's SDK: the modules ``kvcache``, ``stream`` and ``batch`` of its first generation."""
