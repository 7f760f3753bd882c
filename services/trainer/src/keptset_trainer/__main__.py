"""`keptset-trainer [serve] --config FILE ...`, and the commands `replay` and `warm-start`."""

import sys


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command; leaves the process with its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["warm-start"]:
        from .warm_start.command import warm_start  # torch: only here, never in the ingest process

        sys.exit(warm_start(arguments[1:]))
    if arguments[:1] == ["replay"]:
        from .replay.command import replay  # torch as well

        sys.exit(replay(arguments[1:]))
    from .serve import serve

    sys.exit(serve(arguments[1:] if arguments[:1] == ["serve"] else arguments))


if __name__ == "__main__":
    main()
