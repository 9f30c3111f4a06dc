"""The command line, one file a command.

A command module imports only typer and its siblings here; everything heavy is imported inside
the functions that need it, so that `fullbore --help` answers at once and commands that need no
torch work without it.
"""
