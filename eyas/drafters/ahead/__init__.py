"""Drafting ahead: trees grown while the target verifies, and the trial of whether they pay."""
