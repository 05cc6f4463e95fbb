"""Progress display of an audit: on a terminal, in a log, in a notebook."""
