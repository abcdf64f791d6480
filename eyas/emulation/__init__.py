"""Devices that are not there: their costs, and a clock that counts them."""
