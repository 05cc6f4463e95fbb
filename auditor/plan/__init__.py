"""From measurements and costs to plans: solved, tried, run as the artefact and compared."""
