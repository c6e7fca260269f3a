"""Benchmarks: what this package takes, beside what it is compared with."""
