"""Architecture families, one module each, named after the `model_type` and found by the registry without being listed.

A module exposes ARCHITECTURES, the class names configurations give, and build(config: ConfigReader) -> Graph;
ENCODER = True says that its models make vectors of texts, MODEL_TYPE names a `model_type` no module can have. The first
line of its docstring is its row in docs/models.md.
"""
