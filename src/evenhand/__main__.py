"""`python -m evenhand` is the command line."""

from evenhand.cli import run

if __name__ == "__main__":
    run()
