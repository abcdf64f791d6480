"""Requests, their limits, and outputs, as callers see them."""
