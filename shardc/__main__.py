"""Run the command `shardc` as `python -m shardc`."""

from shardc.cli import main

main()
