"""Model names, versions, shares of traffic and shadows."""
