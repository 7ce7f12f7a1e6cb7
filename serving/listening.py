"""Sockets of the servers."""

import ipaddress
import socket

from decoding.errors import UserError, without_stop


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UserError for an address in use or of another host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        remedy = "Set port= to another one, or port=0 for a free one, or host= to this machine's."
        raise UserError(
            f"cannot listen on {host}:{port}: {without_stop(error)}. {remedy}"
        ) from error


def address_of(listener: socket.socket) -> str:
    """Return a socket's HOST:PORT as in a URL."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_open_to_others(listener: socket.socket) -> bool:
    """Return whether other machines can reach a socket: its address is not a loopback one."""
    host = str(listener.getsockname()[0])
    return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
