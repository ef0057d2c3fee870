"""The version, equal to that in pyproject.toml: of the imported package, installed or not."""

VERSION = "0.2.0"
