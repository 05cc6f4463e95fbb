"""What every reporter writes of fixed audits; `make golden` writes the files again, for a reader of the diff to accept."""
