"""The fast host path. `forward` and `backward` are a tensors.Backend."""

from flashwire_kernels.cpu.backend import backward, forward

__all__ = ["backward", "forward"]
