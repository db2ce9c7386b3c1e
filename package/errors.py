"""Every error this package raises on purpose; needs neither torch nor the DSL."""

from __future__ import annotations


class RingFP4Error(Exception):
    """Base class: what went wrong, what was expected, what came, and the remedy.

    The parts are kept as attributes, so that callers and tests need not parse the text.
    """

    def __init__(self, what: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        self.what, self.expected, self.got, self.remedy = what, expected, got, remedy
        parts = [what]
        if expected:
            parts.append(f"expected {expected}")
        if got:
            parts.append(f"got {got}")
        text = "; ".join(parts)
        if remedy:
            text += f". Remedy: {remedy}"
        super().__init__(text)


class InputError(RingFP4Error, ValueError):
    """An argument of a public call is unusable; nothing was launched."""


class UnservedError(RingFP4Error):
    """No loaded artefact serves this device, shape or schedule."""


class ArtifactError(RingFP4Error):
    """A manifest or cubin is missing, corrupt, or of another version."""


class DriverError(RingFP4Error):
    """A CUDA driver call failed, or there is no usable driver."""

    def __init__(self, what: str, *, code: int = 0, name: str = "", remedy: str = "") -> None:
        self.code, self.name = code, name
        super().__init__(what, got=f"{name} ({code})" if name else "", remedy=remedy)


class RingError(RingFP4Error):
    """A ring is too small, belongs elsewhere, or does not exist yet where it must."""


class ConfigError(RingFP4Error):
    """A kernel configuration violates its own constraints; nothing was compiled."""


class ShapesError(RingFP4Error):
    """A shapes file has mistakes; the text lists all of them with file and line."""


class BuildError(RingFP4Error):
    """A kernel compiled to something that must not be shipped, or did not compile."""
