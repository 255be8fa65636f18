"""What a person types: `python -m launch CONFIG` and its companions. See `python -m launch --help`."""
