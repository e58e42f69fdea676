"""`brt`, also as `python -m block_recurrent`, which torchrun starts."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line. Ctrl-C is one line from here on, while modules are imported and at exit too."""
    try:
        from block_recurrent.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("brt: stopped", file=sys.stderr)
        return 130
    finally:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done, and threads are being joined


if __name__ == "__main__":
    sys.exit(main())
