"""Services on one machine: `eyas serve`, `run-batch`, the demo."""
