"""The version, also of what is written into manifests."""

__version__ = "0.1.0"
