"""Report: what an audit came to, in words, tables and pictures; nothing here measures or decides anything."""

FORMATS = ("github", "html", "json", "md", "sarif", "text")
"""What `--format` may ask for; what makes them is in `reporters`, which needs torch."""
