"""What error texts may say to those outside."""

import re
from pathlib import Path

_PATH = re.compile(r"(?<![\w:/.])(?P<first>/?[\w.@+-]+)(?:/[\w.@+-]+)*/(?P<last>[\w.@+-]+)/?")


def without_paths(text: str) -> str:
    """The text with the last part of each path of this machine in place of the path.

    A path is of this machine if its first folder is there, below the root or below the working directory, so
    routes stay as they are. For errors that are answered; logs have the whole.

    >>> without_paths("no file /usr/lib/python3/x.py; see /keptset/v1/status")
    'no file x.py; see /keptset/v1/status'
    """
    return _PATH.sub(lambda found: found["last"] if Path(found["first"]).is_dir() else found.group(), text)
