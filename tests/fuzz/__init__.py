"""Fuzzing of everything that reads what a server or an engine sends."""
