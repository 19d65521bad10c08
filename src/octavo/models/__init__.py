"""Model definitions: the graph vocabulary, the architecture families described with it, and the rewrites back ends share."""
