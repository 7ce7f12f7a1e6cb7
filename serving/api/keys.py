"""Keys that clients send, read from a file."""

import hashlib
import hmac
from pathlib import Path

from decoding.errors import UserError, without_stop
from serving.api.errors import RequestError

SCHEME = "bearer"


class Keys:
    """The accepted keys, of which only hashes stay in memory; without a file no key is needed."""

    def __init__(self, path: str = "") -> None:
        """Read the file, a key a line. Raises UserError if it cannot be read or has no key."""
        self._hashes: list[str] = []
        if not path:
            return
        try:
            lines = Path(path).expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"key_file={path} cannot be read: {without_stop(error)}. Write a key a line into "
                f"it."
            ) from error
        self._hashes = [_hash(line.strip()) for line in lines if line.strip()]
        if not self._hashes:
            raise UserError(f"key_file={path} has no key. Write a key a line into it.")

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def check(self, authorization: str | None) -> str:
        """Return the hash of the key in an Authorization header, "" if no key is needed.

        Raises RequestError for a missing or unknown key.
        """
        if not self._hashes:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = _hash(key.strip())
        found = [one for one in self._hashes if hmac.compare_digest(one, given)]
        if scheme.lower() != SCHEME or not found:
            raise RequestError(
                "the request has no valid key. Send the header Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )
        return found[0]


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
