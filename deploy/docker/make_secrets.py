"""Writes secrets that are not there yet, one random text a file: `make_secrets.py DIRECTORY NAME ...`.

For a project of containers that is brought up for the first time. What is there stays as it is.
"""

import os
import secrets
import sys
from pathlib import Path


def main(directory: str, *names: str) -> None:
    """Each file is readable by its owner alone; nothing of its content is printed."""
    for name in names:
        path = Path(directory) / name
        if path.exists():
            print(f"{path} is there")
            continue
        temporary = path.with_name(f".{name}")
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        temporary.rename(path)
        print(f"{path} made")


if __name__ == "__main__":
    main(*sys.argv[1:])
