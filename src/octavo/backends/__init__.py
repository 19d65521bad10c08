"""Back ends: what turns a model graph into something that runs a step; `interface` says what the engine expects."""
