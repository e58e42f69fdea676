"""`brt serve`: serve models over HTTP, with a web page. Only this machine can connect, unless a key is given."""

from __future__ import annotations

import argparse
import logging
import socket
from pathlib import Path

from block_recurrent.cli.output import print_notes
from block_recurrent.cli.read import add_dtype_argument, add_weights_argument
from block_recurrent.errors import ConfigError, MissingExtraError
from block_recurrent.io.door import read_bytes

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHORTEST_KEY = 16
# Options of Limits: flag -> help.
LIMITS = {
    "--lanes": "texts generated at the same time (default: 16)",
    "--waiting": "requests that may wait in the queue (default: 64)",
    "--prompt-bytes": "maximum size of a request (default: 1 MiB)",
    "--text-bytes": "maximum size of a text to read into a memory (default: 64 MiB)",
    "--max-tokens": "maximum number of tokens that one request may generate (default: 8192)",
    "--memories-at-most": "maximum number of memories (default: 256)",
    "--trail": "checkpoints per memory, each as large on disk as the memory (default: 8)",
    "--trail-every": "tokens between checkpoints while reading (default: 4096)",
    "--seconds": "time limit of a request (default: 3600)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders, checkpoints, or model names (see 'brt models')"
    )
    parser.add_argument(
        "--memories", type=Path, default=Path("memories"), metavar="DIR", help="folder for saved memories"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any other than the default needs a key (default: 127.0.0.1)",
    )
    parser.add_argument("--port", type=int, default=8000, help="port; 0 chooses a free one (default: 8000)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file with the key that clients must send")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a checkpoint folder (default: last)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    add_dtype_argument(parser)
    add_weights_argument(parser)
    for flag, text in LIMITS.items():
        parser.add_argument(flag, type=int, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    key = _key(args.api_key_file)
    if args.host not in LOOPBACK and key is None:
        raise ConfigError(
            f"--host is {args.host}: other machines could connect, so give --api-key-file, a file with a secret key"
        )
    with _socket(args.host, args.port) as listening:
        return _serve(args, key, listening)


def _serve(args: argparse.Namespace, key: str | None, listening: socket.socket) -> int:
    try:
        import uvicorn

        from block_recurrent.serve.app import load_model, make_app
    except ImportError:
        raise MissingExtraError("brt serve", "serve") from None
    from block_recurrent.serve.limits import Limits

    given = {flag[2:].replace("-", "_"): getattr(args, flag[2:].replace("-", "_")) for flag in LIMITS}
    given["memories"] = given.pop("memories_at_most")
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    models = []
    for folder in args.runs:
        model, notes = load_model(folder, args.checkpoint, args.device, args.weights, args.dtype)
        models.append(model)
        print_notes(notes)
    app = make_app(models, args.memories, limits, key, args.host)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about every client that disconnects
    # No access log: it would contain what clients request. /metrics has counters.
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    host = f"[{args.host}]" if ":" in args.host else args.host
    with app.state.server.store.opened():
        address = f"http://{host}:{listening.getsockname()[1]}"
        print(
            f"serving {', '.join(model[0] for model in models)} at {address}; memories are in '{args.memories}'",
            flush=True,
        )
        uvicorn.Server(config).run([listening])
    return 0


def _socket(host: str, port: int) -> socket.socket:
    """Clients can connect from now on, and are answered when the server has started."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}") from None


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = read_bytes(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"the key in '{path}' must be one line of at least {SHORTEST_KEY} printable characters")
    return key
