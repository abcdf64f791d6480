"""The applications: sockets, wiring and lifecycle around the library."""
