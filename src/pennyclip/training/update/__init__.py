"""One optimizer update: forward, backward, clip, step."""
