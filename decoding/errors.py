"""The exception for input that a user can correct; jobs print it without a traceback."""


class UserError(ValueError):
    """Bad input: the message names what was found, what was expected and what to do."""
