"""Errors of `rollforward.model`; every one is picklable, because it crosses Ray.

Those that the user can put right are `ValueError`: a configuration, a checkpoint, a text. None is worth a retry.
"""


class ModelError(Exception):
    """Base of every error of the model folder; the caller stops before anything is allocated."""


class ConfigError(ModelError, ValueError):
    """A model configuration breaks a rule; the message names field, value, rule and way out."""


class UnsupportedVariantError(ConfigError):
    """The files belong to a relative of DeepSeek-V4 that this code does not run; use one that it does."""


class CheckpointError(ModelError, ValueError):
    """A checkpoint is damaged, incomplete or not of this configuration; the message names file and tensor."""


class WeightShapeError(ModelError, ValueError):
    """Published bytes are those of a tensor of another shape or type; nothing was cast or broadcast."""


class TokenizerError(ModelError, ValueError):
    """A tokenizer file or a text to encode is unusable; give another file or valid text."""


class EncodingError(ModelError, ValueError):
    """A conversation cannot be rendered or parsed as asked; fix its messages."""


class ModelInputError(ModelError, ValueError):
    """A forward was asked for with inputs that do not fit together; the caller builds another batch."""


class TrainerError(ModelError, ValueError):
    """The trainer was asked for something that it cannot do; the caller is wrong."""


class NonFiniteLossError(ModelError, RuntimeError):
    """A loss or its gradient is NaN or infinite. Nothing was updated; the run stops with a non-zero exit code."""


class RankLostError(ModelError, RuntimeError):
    """Another rank of the learner died or did not answer in time. The caller ends all ranks and resumes the run."""
