"""The engine: requests, scheduler, KV block pool, prefix index and step loop. Token ids only: no text, no HTTP."""
