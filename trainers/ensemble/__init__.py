"""Several trained models combined into one: ensembles and their members, with a shared trunk if wanted."""
