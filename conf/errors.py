"""What can be wrong with a configuration or a command line. Other folders' errors are in their own errors.py."""

__all__ = ["ConfError", "ConfigError", "RunDirError", "UsageError"]


class ConfError(ValueError):
    """Base of this folder's errors: the user can put it right.

    The message says what, the value, the rule and the way out. The caller prints the message without a
    traceback and exits with code 2. Nothing has been allocated or written.
    """


class ConfigError(ConfError):
    """A key, value or group choice that the schema does not know. Correct the YAML file or the override it names."""


class UsageError(ConfError):
    """The command line itself is wrong: an unknown verb, option or recipe. `rollforward --help` lists what there is."""


class RunDirError(ConfError):
    """The run directory holds another run, is in use, is damaged, or cannot be written. Choose another run_dir, or put
    right what the message names."""
