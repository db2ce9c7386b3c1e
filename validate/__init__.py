"""``python -m ringfp4.validate``: checks this package on the user's own GPU (docs/validation.md)."""
