"""Measuring servers over HTTP: work to send, a cheap client, what clients see as figures, and reports to compare by."""
