"""What `lmcache bench engine` is made of: prompts, a client that times streamed answers, the load, and its figures."""
