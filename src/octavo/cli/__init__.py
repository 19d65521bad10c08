"""The ``octavo`` command: one file per command, each importing the engine only when it runs."""
