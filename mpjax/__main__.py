"""Runs the command line as `python -m mpjax`."""

from mpjax.cli import main

if __name__ == "__main__":
    main()
