"""Plans: chosen from measurements and costs, run as the artefact, compared with FP32, and explained."""
