"""Requests in, chunks out, one step at a time. Knows no gRPC, no telemetry, and not which drafter it has."""
