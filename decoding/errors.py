"""The one exception for input that a user can mend; jobs print it without a traceback."""


class UserError(ValueError):
    """Bad input: the message names what was found, what was expected and what to do."""
