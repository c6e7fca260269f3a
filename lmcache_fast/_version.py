"""The package's version. pyproject.toml and CMake read it from here."""

__version__ = "0.1.0"
