"""Errors of `rollforward.kernels`; every one is picklable, because it crosses Ray.

The caller's to fix are `ValueError`. None is worth a retry.
"""


class KernelError(Exception):
    """Base of every error a kernel raises; the caller stops the step and reports it."""


class ShapeError(KernelError, ValueError):
    """A shape, or the way shapes fit together, is not what the op is defined on; the caller passes other tensors."""


class DtypeError(KernelError, ValueError):
    """A tensor has a dtype that the op does not take; the caller casts it, knowing what the cast costs."""


class DeviceError(KernelError, ValueError):
    """Tensors of one call lie on several GPUs; the caller moves them to one."""


class NonFiniteError(KernelError, ValueError):
    """A weight to be quantised holds NaN or infinity; the caller stops before publishing or stepping."""


class ScaleRangeError(KernelError, ValueError):
    """Scales that no lossless FP4 to FP8 conversion can carry, or the NaN scale; the caller fixes the weights."""


class BackendError(KernelError, ValueError):
    """An op is to run in a form that it does not have, or that this machine cannot run; the caller names another."""


class ProgramMissingError(KernelError, RuntimeError):
    """A program of a tile form is not compiled; the caller compiles the model's programs (`dispatch.warm`) once."""
