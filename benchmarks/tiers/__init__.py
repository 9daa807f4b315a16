"""Benchmarks of tiers."""
