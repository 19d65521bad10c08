"""How good a model's predictions are: perplexity of a text, and divergence from another model or form."""
