"""Benchmarks in one process, and their dated reports."""
