"""Dataclasses to bytes and back, one way to dial and one way to serve. Knows no torch and no engine."""
