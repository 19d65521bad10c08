"""Between callers and the engine: tokenising, chat templates, detokenising, stop strings and request outputs."""
