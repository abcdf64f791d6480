"""What the `eyas` command needs to ask a running router."""
