"""Errors that end a command, in a module that imports nothing."""


class RunFailed(Exception):
    """A run ended with an error; the message names its log."""
