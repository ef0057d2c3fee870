"""The version, as pyproject.toml has it: of the package as it is imported, installed or not."""

VERSION = "0.2.0"
