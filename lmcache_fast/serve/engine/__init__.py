"""An OpenAI-compatible engine on the CPU that shares its KV cache through a server."""
