"""The HTTP server: uvicorn, with connections that refuse requests under overload, malformed ones and slow clients."""
