"""The version of the distribution; pyproject.toml states the same."""

__version__ = "0.1.0"
