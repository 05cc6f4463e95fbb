"""The model under a choice of precisions, as autocast and wrapped scopes on a GPU would run it."""
