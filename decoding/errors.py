"""The exception for input that a user can correct; jobs print it without a traceback."""


class UserError(ValueError):
    """An error in the user's input; its message names what was found and expected, and a remedy."""
