"""Generation: prompts continued token by token, in FP32 and under every plan, each with its own cache."""
