"""Text generation: continues prompts token by token, in FP32 and under every verified plan, each with its own cache."""
