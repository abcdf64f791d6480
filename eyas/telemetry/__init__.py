"""Metrics, traces and logs of one process: plain numbers in, what Prometheus and OTLP take out. Knows no service."""
