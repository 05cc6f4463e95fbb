"""The recording run under a choice of precisions that did not happen, forwards and backwards: what a GPU would make of it."""
