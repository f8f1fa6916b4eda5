"""Owns `python -m fasttrain`."""

from fasttrain.cli.main import run

if __name__ == "__main__":
    run()
