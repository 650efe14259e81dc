"""Errors of `rollforward.kernels`; every one is picklable, because it crosses Ray.

All are the caller's to fix (`ValueError`). None is worth a retry.
"""


class KernelError(Exception):
    """Base of every error a kernel raises; the caller stops the step and reports it."""


class ShapeError(KernelError, ValueError):
    """A shape, or the way shapes fit together, is not what the op is defined on; the caller passes other tensors."""


class DtypeError(KernelError, ValueError):
    """A tensor has a dtype that the op does not take; the caller casts it, knowing what the cast costs."""


class NonFiniteError(KernelError, ValueError):
    """A weight to be quantised holds NaN or infinity; the caller stops before publishing or stepping."""


class ScaleRangeError(KernelError, ValueError):
    """Scales that no lossless FP4 to FP8 conversion can carry, or the NaN scale; the caller fixes the weights."""
