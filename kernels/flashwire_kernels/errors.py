"""What can be wrong with a request for attention.

AttentionError
+-- InvalidAttention        meaningless whoever computes: every violation, each with its field
+-- UnsupportedBackend      meaningful, but the named backend cannot: every reason
+-- NotEnoughMemory         meaningful, but larger than the device: how much, and how much there is
+-- SecondDerivative        a gradient of a gradient was asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class AttentionError(Exception):
    """Root of this library's errors."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule broken: the option or tensor that breaks it, and how (value and limit)."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class InvalidAttention(AttentionError, ValueError):
    """The options or tensors do not describe an attention. `violations` names every reason."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(map(str, self.violations)))


class UnsupportedBackend(AttentionError):
    """The named backend cannot run this request. `reasons` is complete, not the first found."""

    def __init__(self, backend: str, reasons: Sequence[str]) -> None:
        self.backend = backend
        self.reasons = tuple(reasons)
        super().__init__(f"backend {backend!r} cannot run this request: " + "; ".join(reasons))


class NotEnoughMemory(AttentionError):
    """The request needs `needed` bytes of extra device memory; `available` are allowed."""

    def __init__(self, needed: int, available: int) -> None:
        self.needed = needed
        self.available = available
        super().__init__(f"needs {needed} bytes of memory, {available} are available")


class SecondDerivative(AttentionError):
    """Attention here is differentiable once."""

    def __init__(self) -> None:
        super().__init__("second derivatives of flash attention are not available")
