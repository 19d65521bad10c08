"""The HTTP server: routing, limits and streams shared by all dialects; each dialect is a folder of its own."""
