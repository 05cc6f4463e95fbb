"""How far an audit is, for who waits for it: on a terminal, in a log, in a notebook."""
