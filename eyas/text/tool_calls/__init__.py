"""Formats in which models write tool calls and reasoning, and the readers of each."""
