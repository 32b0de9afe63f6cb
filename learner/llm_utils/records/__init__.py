"""The files of a run, and their readers."""
