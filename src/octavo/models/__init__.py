"""Model definitions: the graph vocabulary, the architecture families, and the rewrites all back ends share."""
