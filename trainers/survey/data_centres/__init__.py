"""Training in data centres with slow links between them: Approximate Synchronous Parallel, in virtual time."""
