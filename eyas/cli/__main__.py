"""Runs the command line: `python -m eyas.cli`."""

from eyas.cli.main import main

if __name__ == "__main__":
    main()
