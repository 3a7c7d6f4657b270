"""``python -m omniw4``."""

from omniw4.cli.app import main

main()
