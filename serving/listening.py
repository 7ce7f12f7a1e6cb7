"""Sockets of the servers, the number of their connections, and checks of shared settings."""

import errno
import importlib.util
import ipaddress
import logging
import resource
import socket
from collections.abc import Mapping, Sequence

from decoding.errors import UserError, without_stop
from decoding.values import check_settings, check_value, whole_number
from jobs.config import JobConfig

BACKLOG = 2048  # connections that wait until they are accepted
_FULL = "socket.accept() out of system resource"  # begins asyncio's message


def check_server(
    cfg: JobConfig, packages: Sequence[str], extra: str, least: Mapping[str, int]
) -> None:
    """Raise UserError for missing packages, unless it is a dry run, and for wrong settings.

    extra: the name under which pip installs the packages. least: the settings that are counts, and
    the smallest value of each.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and not cfg.dry_run:
        raise UserError(f"{cfg.job} needs {', '.join(missing)}. Run pip install -e '.[{extra}]'")
    for name, smallest in least.items():
        check_value(name, vars(cfg)[name], whole_number(smallest))
    check_value("port", vars(cfg)["port"], whole_number(0, 65535))
    check_settings(cfg, ("seed",))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UserError for an address in use or of another host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = "the port is in use" if error.errno == errno.EADDRINUSE else without_stop(error)
        remedy = "Set port= to another one, or port=0 for a free one, or host= to this machine's."
        raise UserError(f"cannot listen on {host}:{port}: {why}. {remedy}") from error


def address_of(listener: socket.socket) -> str:
    """Return a socket's HOST:PORT as in a URL."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_open_to_others(listener: socket.socket) -> bool:
    """Return whether other machines can reach a socket: its address is not a loopback one."""
    host = str(listener.getsockname()[0])
    return not ipaddress.ip_address(host.partition("%")[0]).is_loopback


def allow_connections() -> int:
    """Allow as many open files as the system lets this process; return the number.

    Each connection is an open file. At the limit new ones wait until others are closed, and a line
    on standard error says so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # a limit that the system does not grant
            pass
    logging.getLogger("asyncio").addFilter(lambda record: _explain_limit(record, soft))
    return soft


def _explain_limit(record: logging.LogRecord, files: int) -> bool:
    """Replace asyncio's traceback of every second in which it cannot accept a connection."""
    if record.getMessage().startswith(_FULL):
        record.exc_info, record.args = None, ()
        record.msg = (
            f"all {files:,} open files that the system allows are in use: new connections wait. "
            f"Raise the limit (ulimit -n), or let fewer clients in."
        )
    return True
