"""Stubs that `make protos` generates from protos/eyas/v1; edit those."""
