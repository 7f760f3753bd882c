"""`python -m keptset_settings` prints all settings as a Markdown table."""

from .help import settings_table

if __name__ == "__main__":
    print(settings_table(), end="")
