"""What all commands share: the verb with its options, and standard output."""
