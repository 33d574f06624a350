"""The service: HTTP in front, compute behind. `flashwire-serve` starts it."""
