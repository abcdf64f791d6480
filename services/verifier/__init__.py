"""The verifier service: an engine behind the Generation service, and its client of draft services."""
