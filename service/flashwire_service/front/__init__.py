"""The front end: HTTP. Nothing here imports torch."""
