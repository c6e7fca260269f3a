"""Policies × compression ratios through an engine: gain and cost."""
